"""A small release under tmp_path, laid out as the real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from gymgate.core.config import EnvironmentConfig
from gymgate.core.errors import ConfigError
from gymgate.gym.catalog import Catalog

ROW = {"responses_create_params": {"input": "hi"}, "answer": "1"}
ROLLOUT = {**ROW, "response": {"output": []}, "reward": 1.0}


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def write_rows(path: Path, *rows: Any) -> Path:
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def config(name: str, agent: str = "simple_agent", **settings: Any) -> dict[str, Any]:
    """A resources server, its agent and the relay in front of it."""
    dataset = {
        "name": "example",
        "type": "example",
        "jsonl_fpath": f"resources_servers/{name}/data/example.jsonl",
    }
    train = {"name": "train", "type": "train", "jsonl_fpath": f"resources_servers/{name}/data/train.jsonl"}
    return {
        name: {"resources_servers": {name: {"entrypoint": "app.py", "domain": "math", **settings}}},
        f"{name}_agent": {
            "responses_api_agents": {
                agent: {
                    "entrypoint": "app.py",
                    "resources_server": {"type": "resources_servers", "name": name},
                    "model_server": {"type": "responses_api_models", "name": "policy_model"},
                    "datasets": [dataset, train],
                }
            }
        },
        f"{name}_relay": {"environment_servers": {"legacy_agent": {"entrypoint": "app.py"}}},
    }


def add(site: Path, name: str, **configs: dict[str, Any]) -> Path:
    """A resources server's directory with example rows and recordings."""
    path = site / "resources_servers" / name
    write(path / "app.py", "")
    for stem, value in (configs or {name: config(name)}).items():
        write(path / "configs" / f"{stem}.yaml", yaml.safe_dump(value))
    write_rows(path / "data" / "example.jsonl", ROW, ROW)
    write_rows(path / "data" / "example_rollouts.jsonl", ROLLOUT)
    return path


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A release whose scan does not ship."""
    site = tmp_path / "site-packages"
    (site / "nemo_gym-9.9.9.dist-info").mkdir(parents=True)
    for agent in ("simple_agent", "cli_agent"):
        write(site / "responses_api_agents" / agent / "app.py", "")
    add(site, "math")
    add(site, "mcqa")
    inherited = {
        "config_paths": ["resources_servers/math/configs/math.yaml"],
        "aime_math": {"_inherit_from": "math"},
        "aime_agent": {
            "_inherit_from": "math_agent",
            "responses_api_agents": {
                "simple_agent": {"resources_server": {"name": "aime_math"}, "datasets": []}
            },
        },
    }
    write(site / "benchmarks" / "aime" / "config.yaml", yaml.safe_dump(inherited))
    write(site / "benchmarks" / "aime" / "manifest.yaml", "name: aime\ndescription: From the manifest.\n")
    write(site / "benchmarks" / "prompts" / "default.yaml", "user: '{question}'\n")
    write(site / "environments" / "math" / "config.yaml", yaml.safe_dump(config("math")))
    write(site / "environments" / "alias" / "prepare.py", "")
    return site


@pytest.fixture
def catalog(site: Path) -> Catalog:
    return Catalog(site, "9.9.9")


def test_environments_are_sorted_and_directories_without_configs_are_none(catalog: Catalog) -> None:
    listed = [(item.name, item.kind) for item in catalog.environments()]
    assert listed == [
        ("aime", "benchmarks"),
        ("math", "resources_servers"),
        ("math", "environments"),
        ("mcqa", "resources_servers"),
    ]


def test_a_config_holds_agents_datasets_and_apart_relays_and_models(catalog: Catalog) -> None:
    found = catalog.find("math").config()
    (agent,) = found.agents
    assert (agent.name, agent.type, agent.resources_server) == ("math_agent", "simple_agent", "math")
    assert [dataset.name for dataset in found.datasets] == ["example", "train"]
    assert [server.kind for server in found.servers] == ["resources_servers", "responses_api_agents"]
    others = [server.name for server in found.instances if server not in found.servers]
    assert others == ["math_relay", "policy_model"]
    assert found.model_servers == ()
    assert found.needs == ()


def test_what_a_benchmark_inherits_replaces_its_source(catalog: Catalog) -> None:
    benchmark = catalog.find("aime")
    (agent,) = benchmark.config().agents
    assert (agent.name, agent.resources_server) == ("aime_agent", "aime_math")
    assert agent.block["model_server"]["name"] == "policy_model"
    assert benchmark.domain == "math"
    assert benchmark.description == "From the manifest."
    assert benchmark.data == ()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("math", "resources_servers"),
        ("resources_servers/math", "resources_servers"),
        ("environments/math", "environments"),
        ("environments/math/", "environments"),
        ("aime", "benchmarks"),
    ],
)
def test_find(catalog: Catalog, name: str, kind: str) -> None:
    assert catalog.find(name).kind == kind


@pytest.mark.parametrize("name", ["mqca", "resources_servers/mqca", "mcqa2", "MCQA", "Mcqa"])
def test_an_unknown_name_brings_near_names(catalog: Catalog, name: str) -> None:
    with pytest.raises(ConfigError, match=r"\bmcqa\b"):
        catalog.find(name)


@pytest.mark.parametrize("name", ["", ".", "prompts", "alias", "environments/mcqa", "gone/config.yaml", "/"])
def test_what_is_no_environment_is_a_config_error(
    catalog: Catalog, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(ConfigError):
        catalog.find(name)


def test_a_directory_without_a_config_is_not_suggested(catalog: Catalog) -> None:
    with pytest.raises(ConfigError, match="`gymgate list` shows all"):
        catalog.find("alias")


def test_data_and_recordings(catalog: Catalog) -> None:
    environment = catalog.find("math")
    assert [(file.name, file.kind, file.rows()) for file in environment.data] == [
        ("example", "rows", 2),
        ("example_rollouts", "rollouts", 1),
    ]
    assert [file.name for file in environment.recordings()] == ["example_rollouts"]
    for name in ("example", "example.jsonl"):
        assert environment.data_file(name).name == "example"


def test_data_that_is_declared_elsewhere_belongs_to_the_environment(catalog: Catalog) -> None:
    (file,) = catalog.find("environments/math").data
    assert file.path.parts[-4:] == ("resources_servers", "math", "data", "example.jsonl")


@pytest.mark.parametrize(
    ("environment", "name", "reason"),
    [
        ("math", "nope", "'nope'.*example, example_rollouts"),
        (
            "math",
            "train",
            r"'train'.*'math'.*`gymgate data prepare resources_servers/math",
        ),
        ("aime", "example", "example"),
    ],
)
def test_unknown_data_brings_the_choices(catalog: Catalog, environment: str, name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        catalog.find(environment).data_file(name)


def test_the_default_config_decides_between_datasets_of_one_name(site: Path, catalog: Catalog) -> None:
    first, second = config("two"), config("two")
    path = "resources_servers/two/data/deep/example.jsonl"
    second["two_agent"]["responses_api_agents"]["simple_agent"]["datasets"][0]["jsonl_fpath"] = path
    add(site, "two", first=first, second=second)
    write_rows(site / path, ROW)
    environment = catalog.find("two")
    assert environment.data_file().name == "example"


def test_the_default_configs_examples_come_before_a_file_of_that_name(site: Path, catalog: Catalog) -> None:
    declared = config("own")
    path = "resources_servers/own/data/minif2f.jsonl"
    declared["own_agent"]["responses_api_agents"]["simple_agent"]["datasets"][0]["jsonl_fpath"] = path
    add(site, "own", own=declared)
    write_rows(site / path, ROW)
    assert catalog.find("own").data_file().path.name == "minif2f.jsonl"


def test_data_goes_by_the_name_of_its_file_or_dataset(site: Path, catalog: Catalog) -> None:
    """Examples by the type of their dataset. What has scores and no prompt is no row."""
    declared = config("few")
    (dataset, _) = declared["few_agent"]["responses_api_agents"]["simple_agent"]["datasets"]
    dataset |= {"name": "small", "jsonl_fpath": "resources_servers/few/data/deep/some.jsonl"}
    path = add(site, "few", few=declared)
    (path / "data" / "example.jsonl").unlink()
    write_rows(path / "data" / "deep" / "some.jsonl", ROW)
    write_rows(path / "data" / "scores.jsonl", {"reward": 1.0})
    environment = catalog.find("few")
    assert {environment.data_file(name).name for name in ("example", "small", "some")} == {"deep/some"}
    assert environment.data_file("scores").kind == "other"


def test_a_dataset_is_as_large_as_its_metrics_say(site: Path, catalog: Catalog) -> None:
    environment = catalog.find("math")
    train = environment.config().datasets[1]
    assert environment.stated_rows(train) is None
    stated = {"Number of examples": 6, "num_repeats": 2}
    write(site / "resources_servers" / "math" / "data" / "train_metrics.json", json.dumps(stated))
    assert environment.stated_rows(train) == 3


def test_only_what_no_other_place_has_is_in_the_registry(site: Path, catalog: Catalog) -> None:
    places: dict[str, Any] = {"gitlab_identifier": {"dataset_name": "d", "version": "1"}}
    for name, more in (("alone", {}), ("both", {"huggingface_identifier": {"repo_id": "o/d"}})):
        declared = config(name)
        declared[f"{name}_agent"]["responses_api_agents"]["simple_agent"]["datasets"][1] |= places | more
        add(site, name, **{name: declared})
    found = [catalog.find(name).config().datasets[1].is_in_registry for name in ("alone", "both")]
    assert found == [True, False]


def test_environments_of_a_stack_are_told_apart(catalog: Catalog, tmp_path: Path) -> None:
    """By their kind where a bare name means another one; two of one name do not go together."""
    own = [write(tmp_path / name / "mine.yaml", yaml.safe_dump(config("math"))) for name in "ab"]
    for names in (["math", "environments/math"], ["environments/math"]):
        assert [*catalog.environments_of(EnvironmentConfig(name=name) for name in names)] == names
    assert [*catalog.environments_of([EnvironmentConfig(name=str(own[0]))])] == ["mine"]
    with pytest.raises(ConfigError, match="mine"):
        catalog.environments_of(EnvironmentConfig(name=str(path)) for path in own)


@pytest.mark.parametrize(
    ("configs", "default"),
    [
        pytest.param({"a": config("e"), "e": config("e", "cli_agent")}, "e", id="same-name"),
        pytest.param({"a": config("e", "cli_agent"), "b": config("e")}, "b", id="simple-agent"),
        pytest.param(
            {"a": {"judge": {"responses_api_models": {"m": {}}}}, "b": config("e")}, "b", id="an-agent"
        ),
        pytest.param(
            {"e": {"judge": {"responses_api_models": {"m": {}}}}, "a": config("e")},
            "a",
            id="no-agent-of-its-name",
        ),
        pytest.param({"b": {"config_paths": []}, "a": {"config_paths": []}}, "a", id="none-has-an-agent"),
    ],
)
def test_default_config(site: Path, catalog: Catalog, configs: dict[str, Any], default: str) -> None:
    add(site, "e", **configs)
    environment = catalog.find("e")
    assert environment.config().name == default
    assert environment.config("a").path.name == "a.yaml"
    assert environment.config("a.yaml").name == "a"
    with pytest.raises(ConfigError, match=r"'z'.*: a, "):
        environment.config("z")


def test_configs_that_share_a_stem_are_named_by_their_path(site: Path, catalog: Catalog) -> None:
    for version in ("v5", "v6"):
        write(site / "benchmarks" / "lcb" / version / "config.yaml", yaml.safe_dump(config("math")))
    environment = catalog.find("lcb")
    assert [item.name for item in environment.configs] == ["v5/config", "v6/config"]
    assert [environment.config(name).name for name in ("config", "v6/config")] == ["v5/config", "v6/config"]


def test_a_config_that_does_not_load_is_a_need_not_an_exception(site: Path, catalog: Catalog) -> None:
    add(site, "broken", broken={"config_paths": ["gone.yaml"]})
    write(site / "resources_servers" / "broken" / "configs" / "worse.yaml", "a: [")
    assert [item.name for item in catalog.find("broken").configs] == ["broken", "worse"]
    for item in catalog.find("broken").configs:
        assert [need.kind for need in item.needs] == ["config"]
        assert f"{item.name}.yaml" in item.needs[0].detail


def test_a_users_config_by_path(site: Path, catalog: Catalog, tmp_path: Path) -> None:
    own = write(tmp_path / "own" / "mine.yaml", yaml.safe_dump(config("math")))
    for environment in (catalog.find(str(own)), catalog.find(str(own.parent))):
        assert environment.kind == "config"
        assert environment.config().path == own
        assert environment.data_file().path == site / "resources_servers/math/data/example.jsonl"
    assert catalog.find(str(own)).name == "mine"


def test_a_users_config_names_files_of_the_tree_it_lies_in(catalog: Catalog, tmp_path: Path) -> None:
    path = add(tmp_path / "own", "mine") / "configs" / "mine.yaml"
    write(path.parent.parent / "requirements.txt", "left-pad-py\n")
    environment = catalog.find(str(path))
    assert environment.data_file().path == tmp_path / "own/resources_servers/mine/data/example.jsonl"
    assert environment.config().requirements == ("left-pad-py",)


def test_a_users_directory_is_searched_no_deeper_than_configs_and_data(
    catalog: Catalog, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    write(own / "configs" / "a.yaml", yaml.safe_dump(config("math")))
    write(own / "deep" / "b.yaml", yaml.safe_dump(config("math")))
    write_rows(own / "data" / "mine.jsonl", ROW)
    environment = catalog.find(str(own))
    assert [item.name for item in environment.configs] == ["a"]
    assert environment.data_file("mine").rows() == 1


def test_a_users_root_comes_first(site: Path, tmp_path: Path) -> None:
    add(tmp_path / "roots", "math", math=config("math") | {"extra": {"responses_api_models": {"m": {}}}})
    add(tmp_path / "roots", "mine")
    catalog = Catalog(site, "9.9.9", [tmp_path / "roots"])
    assert catalog.find("math").config().model_servers == ("extra",)
    assert catalog.find("mine").path.parent.parent == tmp_path / "roots"
    listed = [(item.name, item.kind) for item in catalog.environments()]
    assert {"math", "mine", "mcqa"} <= {name for name, _ in listed}
    assert len(listed) == len({*listed})


def test_a_bare_name_is_a_server_before_it_is_a_benchmark_whoever_has_it(tmp_path: Path) -> None:
    """Of equal kinds, the user's own comes first."""
    release, own = tmp_path / "site", tmp_path / "own"
    for place in (
        release / "resources_servers" / "both",
        own / "benchmarks" / "both",
        release / "benchmarks" / "other",
        own / "benchmarks" / "other",
    ):
        write(place / "configs" / f"{place.name}.yaml", yaml.safe_dump(config(place.name)))
    catalog = Catalog(release, "9.9.9", [own])
    assert catalog.find("both").path == release / "resources_servers" / "both"
    assert catalog.find("other").path == own / "benchmarks" / "other"
