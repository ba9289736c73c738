"""`--set`: single keys and YAML files as overrides of an environment's config; `--env-var`."""

from __future__ import annotations

from pathlib import Path

import pytest

from gymgate.cli.environments import stack_fields
from gymgate.cli.run import command
from gymgate.core.config import EnvironmentConfig, StackConfig
from gymgate.core.errors import ConfigError
from gymgate.quality import CheckRequest
from gymgate.stack.client.identity import identity_of
from support.command_lines import environments_of, settings_of

NESTED = """
server:
  resources_servers:
    mine: {worth: 0.5, limits: [{low: 0}, {high: 1}], empty: {}}
other.key: text
"""


def test_a_file_is_its_leaves_and_later_settings_win(tmp_path: Path) -> None:
    (tmp_path / "over.yaml").write_text(NESTED)
    (one,) = environments_of(
        ["a"], *settings_of(f"@{tmp_path}/over.yaml", "other.key=[1]", "new={x: {y: 2}}")
    )
    assert dict(one.overrides) == {
        "server.resources_servers.mine.worth": 0.5,
        "server.resources_servers.mine.limits": ({"low": 0}, {"high": 1}),
        "server.resources_servers.mine.empty": {},
        "other.key": (1,),
        "new.x.y": 2,
    }
    a, b = environments_of(["a", "b"], *settings_of(f"b:@{tmp_path}/over.yaml", "a:x=1"))
    assert (len(a.overrides), len(b.overrides)) == (1, 4)


def test_mappings_in_overrides_leave_a_config_hashable_and_the_same_after_a_trip() -> None:
    config = StackConfig(
        environments=(EnvironmentConfig(name="a", overrides=(("x", [{"y": [1, {"z": 2}]}]), ("e", {}))),)
    )
    again = StackConfig.model_validate_json(config.model_dump_json())
    assert config == again
    assert hash(config) == hash(again)
    assert identity_of(config, b"") == identity_of(again, b"")


@pytest.mark.parametrize(("text", "said"), [("- 1\n", "mapping"), ("a: [", "not YAML")])
def test_a_file_that_is_no_mapping_is_named(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "over.yaml").write_text(text)
    with pytest.raises(ConfigError, match=rf"^--set @.*over\.yaml[: ][^\n]*{said}[^\n]*$"):
        environments_of(["a"], "--set", f"@{tmp_path}/over.yaml")


def test_variables_must_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "x")
    monkeypatch.delenv("NOT_MINE", raising=False)
    mine = ("a", "--env-var", "MINE")
    with command.make_context("run", [*mine, "--env-var", "MINE"]) as context:
        assert stack_fields(context, ["a"])["env_vars"] == ("MINE",)
    context = command.make_context("run", [*mine, "--env-var", "NOT_MINE"])
    with pytest.raises(ConfigError, match="'NOT_MINE'"):
        stack_fields(context, ["a"])


def test_a_check_takes_lists_as_overrides_and_depends_on_its_variables() -> None:
    environment = {"name": "a", "overrides": {"x": [1, {"y": 2}]}}
    request = CheckRequest.model_validate({"environments": [environment]})
    assert CheckRequest.model_validate_json(request.model_dump_json()) == request
    other = CheckRequest.model_validate({"environments": [environment], "env_vars": ["MINE"]})
    assert other.settings != request.settings
