"""`--set`: single keys and YAML files as overrides of an environment's config; `--env-var`."""

from __future__ import annotations

from pathlib import Path

import pytest

from gymgate.cli.environments import checked_env_vars, environment_configs
from gymgate.core.config import EnvironmentConfig, StackConfig
from gymgate.core.errors import ConfigError
from gymgate.quality import CheckRequest
from gymgate.stack.identity import identity_of

NESTED = """
server:
  resources_servers:
    mine: {worth: 0.5, limits: [{low: 0}, {high: 1}], empty: {}}
other.key: text
"""


def test_a_file_is_its_leaves_and_later_settings_win(tmp_path: Path) -> None:
    (tmp_path / "over.yaml").write_text(NESTED)
    (one,) = environment_configs(
        ["a"], (), None, [f"@{tmp_path}/over.yaml", "other.key=[1]", "new={x: {y: 2}}"]
    )
    assert dict(one.overrides) == {
        "server.resources_servers.mine.worth": 0.5,
        "server.resources_servers.mine.limits": ({"low": 0}, {"high": 1}),
        "server.resources_servers.mine.empty": {},
        "other.key": (1,),
        "new.x.y": 2,
    }
    a, b = environment_configs(["a", "b"], (), None, [f"b:@{tmp_path}/over.yaml", "a:x=1"])
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
        environment_configs(["a"], (), None, [f"@{tmp_path}/over.yaml"])


def test_variables_must_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "x")
    monkeypatch.delenv("NOT_MINE", raising=False)
    assert checked_env_vars(("MINE", "MINE")) == ("MINE",)
    with pytest.raises(ConfigError, match="'NOT_MINE'"):
        checked_env_vars(("MINE", "NOT_MINE"))


def test_a_check_takes_lists_as_overrides_and_depends_on_its_variables() -> None:
    request = CheckRequest(environment="a", version="0.7.0", overrides=(("x", [1, {"y": 2}]),))
    assert CheckRequest.model_validate_json(request.model_dump_json()) == request
    assert request.model_copy(update={"env_vars": ("MINE",)}).settings != request.settings
