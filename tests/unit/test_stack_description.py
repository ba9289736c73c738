"""The settings that a stack says of itself, and the name of each environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gymgate.core.config import EnvironmentConfig, HTTPEndpoint, StackConfig
from gymgate.gym.catalog import Catalog
from gymgate.runs.described.settings import differences
from gymgate.stack.description import stack_settings
from support.faulty import CONFIG

KINDS = ("resources_servers", "environments", "benchmarks", "responses_api_agents")


def catalog(directory: Path) -> Catalog:
    """A release with environments of one name in each kind, and one that is a benchmark only."""
    for place in (*(f"{kind}/same" for kind in KINDS), "benchmarks/other"):
        write(directory / place / "configs" / f"{Path(place).name}.yaml")
    return Catalog(directory, "0.7.0")


def write(path: Path) -> Path:
    path.parent.mkdir(parents=True)
    path.write_text(CONFIG)
    return path


def configs(*names: object) -> list[EnvironmentConfig]:
    return [EnvironmentConfig(name=str(name)) for name in names]


def described(found: Catalog, **fields: Any) -> dict[str, Any]:
    config = StackConfig(**fields)
    return stack_settings(config, found, found.environments_of(config.environments))


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("same", "same"),
        ("resources_servers/same", "same"),
        ("environments/same", "environments/same"),
        ("benchmarks/same", "benchmarks/same"),
        ("responses_api_agents/same", "responses_api_agents/same"),
        ("benchmarks/other", "other"),
    ],
)
def test_a_packaged_environment_has_one_name(tmp_path: Path, given: str, name: str) -> None:
    assert [*catalog(tmp_path).environments_of(configs(given))] == [name]
    [environment] = described(Catalog(tmp_path, "0.7.0"), environments=(given,))["environments"]
    assert environment == {"name": name, "config": None, "agent": None, "overrides": []}


def test_a_users_own_goes_by_its_content(tmp_path: Path) -> None:
    found = catalog(tmp_path / "site")
    first = write(tmp_path / "a" / "mine.yaml")
    second = write(tmp_path / "b" / "mine.yaml")
    assert [*found.environments_of(configs(first))] == [*found.environments_of(configs(second))] == ["mine"]
    one, other = (described(found, environments=(str(path),)) for path in (first, second))
    assert not differences(one, other), "the same content in another place"
    second.write_text(CONFIG.replace("domain:", "level: 2\n      domain:", 1))
    changed = described(catalog(tmp_path / "again"), environments=(str(second),))
    assert differences(one, changed)


def test_a_sandboxs_file_counts_by_its_content(tmp_path: Path) -> None:
    found, file = catalog(tmp_path / "site"), tmp_path / "sandbox.yaml"
    environment = EnvironmentConfig(name="same", sandbox=str(file))
    settings = []
    for image in ("one", "one", "two"):
        file.write_text(f"docker: {{image: {image}}}\n")
        settings.append(described(found, environments=(environment,)))
    assert not differences(settings[0], settings[1])
    [changed] = differences(settings[0], settings[2])
    assert "content.sandbox" in changed


def test_a_judge_is_part_of_it_and_its_key_is_not(tmp_path: Path) -> None:
    found = catalog(tmp_path)

    def judged(**fields: Any) -> dict[str, Any]:
        endpoint = HTTPEndpoint(**{"base_url": "http://h/v1", "api_key_env": "KEY", **fields})
        return described(found, environments=("same",), models={"judge": endpoint})

    assert not differences(judged(), judged(base_url="http://other/v1", api_key_env="OTHER"))
    assert differences(judged(model="a"), judged(model="b"))
    assert differences(judged(), judged(dialect="responses"))
    assert "KEY" not in str(judged())


def test_what_a_stack_has_not_reported_is_no_difference() -> None:
    """Neither before it is up, nor for a run that was stored when it was not."""
    ran = {"nemo_gym": "0.6.0", "models": {"judge": "m"}, "sources": ["a"]}
    assert not differences(ran, {"sources": ["a"]})
    assert not differences({"sources": ["a"]}, ran)
    assert differences(ran, {**ran, "nemo_gym": "0.7.0"})
    assert differences(ran, {**ran, "models": {}})
