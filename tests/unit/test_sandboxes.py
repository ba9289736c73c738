"""Sandbox providers: what configs name, what is put in their place, what can be used on a machine, and the options for it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from gymgate.core.config import EnvironmentConfig, RuntimeConfig, StackConfig
from gymgate.core.errors import ConfigError, NeedMissingError
from gymgate.gym.catalog import Catalog
from gymgate.gym.catalog.sandboxes import (
    choose_provider,
    packaged_providers,
    providers_of,
    refuse_undefined,
    sandbox_block,
)
from gymgate.gym.inside.resolve import provider_in, sandbox_references, value_at
from gymgate.gym.runtime import sandbox_providers as machine
from gymgate.integrations.eval_options import EvalOptions
from gymgate.integrations.trl.spec import NeMoGymSpec
from gymgate.integrations.verl.worker import LoopConfig
from support.command_lines import environments_of, settings_of

PROVIDERS = (
    "apptainer",
    "daytona",
    "docker",
    "e2b",
    "ecs_fargate",
    "enroot",
    "local",
    "opensandbox",
    "openshell",
)
DOCKER = {
    "default_metadata": {"sandbox-api": "docker-cli"},
    "docker": {"create": {"network": None, "init": True}},
}


def config_with(provider: Any, **top: Any) -> dict[str, Any]:
    """A config with one agent whose `sandbox_provider` is `provider`."""
    return {
        "a": {"responses_api_agents": {"x": {"entrypoint": "app.py", "sandbox_provider": provider}}},
        **top,
    }


def test_references_by_name_by_interpolation_and_inline() -> None:
    by_name = config_with("box", box={"default_metadata": {}, "docker": {}})
    (reference,) = sandbox_references(by_name)
    assert reference == ("a.responses_api_agents.x.sandbox_provider", "box", "docker")
    assert sandbox_references(config_with("${box}"))[0][1:] == ("box", None)
    assert sandbox_references(config_with({"apptainer": {"create": {}}}))[0][1:] == (None, "apptainer")
    assert sandbox_references(config_with(None)) == sandbox_references(config_with("")) == []


def test_a_reference_below_other_settings_and_in_a_resources_server() -> None:
    block = {"entrypoint": "app.py", "environment": {"sandbox_provider": {"opensandbox": {}}}}
    (reference,) = sandbox_references({"r": {"resources_servers": {"y": block}}})
    assert reference == ("r.resources_servers.y.environment.sandbox_provider", None, "opensandbox")


@pytest.mark.parametrize("provider", ["box", "${box}"])
def test_a_chosen_provider_fills_the_block_that_the_config_names(provider: str) -> None:
    config = config_with(provider, box={"default_metadata": {}})
    choose_provider(config, DOCKER)
    assert config["box"] == {"docker": DOCKER["docker"], "default_metadata": {"sandbox-api": "docker-cli"}}


def test_it_replaces_another_provider_and_keeps_overrides_of_its_own() -> None:
    """`--sandbox docker --set box.docker.create.network=none` where a file has opensandbox."""
    box = {
        "default_metadata": {"sandbox-api": "opensandbox-sdk", "team": "me"},
        "opensandbox": {"connection": {}},
        "docker": {"create": {"network": "none"}},
    }
    config = config_with("box", box=box)
    choose_provider(config, DOCKER)
    assert config["box"] == {
        "docker": {"create": {"network": "none", "init": True}},
        "default_metadata": {"sandbox-api": "docker-cli", "team": "me"},
    }
    assert DOCKER["docker"] == {"create": {"network": None, "init": True}}


def test_inline_settings_are_replaced_without_the_metadata_that_only_blocks_have() -> None:
    config = config_with({"opensandbox": {"connection": {}}})
    choose_provider(config, DOCKER)
    assert value_at(config, "a.responses_api_agents.x.sandbox_provider") == {"docker": DOCKER["docker"]}


def test_settings_of_the_same_provider_stay() -> None:
    """An environment that sets docker up in its own way keeps that."""
    config = config_with("box", box={"docker": {"create": {"extra_run_args": ["--device", "/dev/kvm"]}}})
    choose_provider(config, DOCKER)
    assert config["box"]["docker"]["create"] == {
        "network": None,
        "init": True,
        "extra_run_args": ["--device", "/dev/kvm"],
    }
    ((name, settings),) = providers_of(config)
    assert name == "docker"
    settings["seen"] = True
    assert config["box"]["docker"]["seen"] is True


def test_a_block_without_a_provider_is_refused_with_the_choices() -> None:
    references = tuple(sandbox_references(config_with("box")))
    with pytest.raises(
        NeedMissingError, match=r"a\.responses_api_agents\.x\.sandbox_provider.*--sandbox NAME.*here: local"
    ):
        refuse_undefined("env", references, "here: local")
    refuse_undefined("env", tuple(sandbox_references(config_with({"local": {}}))), "")


@pytest.mark.parametrize(
    "text",
    [
        "box:\n  docker: {create: {}}\n",
        "docker: {create: {}}\ndefault_metadata: {a: b}\n",
        "docker: {create: {}}\n",
    ],
)
def test_a_yaml_file_of_ones_own(tmp_path: Path, text: str) -> None:
    site = tmp_path / "site"
    shipped = site / "nemo_gym/sandbox/providers/docker/configs/docker.yaml"
    shipped.parent.mkdir(parents=True)
    shipped.write_text("sandbox: {docker: {exec: {}}}\n")
    (own := tmp_path / "own.yaml").write_text(text)
    assert provider_in(sandbox_block(str(own), site)) == "docker"
    assert sandbox_block(str(own), site)["docker"] == {"create": {}}
    assert sandbox_block("docker", site)["docker"] == {"exec": {}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sandbox: {docker: {}, local: {}}", "docker, local"),
        ("[]", "has list"),
        ("a: [", "YAML"),
        (None, "No such file"),
    ],
)
def test_what_is_wrong_with_a_yaml_file(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        sandbox_block(str(tmp_path / "own.yaml"), tmp_path)


def test_an_unknown_provider_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    directory = tmp_path / "nemo_gym/sandbox/providers"
    (directory / "apptainer").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"'dokcer'.*apptainer"):
        sandbox_block("dokcer", tmp_path)


def test_what_can_be_used_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for needs in machine.PROVIDERS.values():
        for name in needs.variables:
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    unusable = machine.usable_choices(("docker", "e2b"))
    assert "docker" in unusable
    assert "E2B_API_KEY" in unusable
    usable = machine.usable_choices(machine.PROVIDERS)
    assert [name for name in machine.PROVIDERS if name in usable] == ["local"]
    monkeypatch.setenv("E2B_API_KEY", "x")
    assert machine.check_provider("e2b") == ("e2b", True, "with --env-var E2B_API_KEY")
    assert machine.undeclared_variables("e2b", ()) == ["E2B_API_KEY"]
    assert (
        machine.undeclared_variables("e2b", ("E2B_API_KEY",))
        == machine.undeclared_variables("docker", ())
        == []
    )


@pytest.mark.parametrize(
    ("answer", "usable"), [("echo 20.10.24", True), ("echo 'no daemon' >&2; exit 1", False)]
)
def test_docker_needs_its_daemon(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: str, *, usable: bool
) -> None:
    (program := tmp_path / "docker").write_text(f"#!/bin/sh\n{answer}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    check = machine.check_provider("docker")
    assert check.usable is usable
    assert check.detail.startswith(str(program))
    assert check.detail.endswith("daemon 20.10.24" if usable else "(no daemon)")


def test_options_become_an_environment() -> None:
    assert [config.config for config in environments_of(["e"])] == [None]
    assert [config.config for config in environments_of(["e"], "--config", "a")] == ["a"]
    (found,) = environments_of(
        ["e"],
        *("--config", "a", "--config", "b.yaml", "--sandbox", "docker"),
        *settings_of("sandbox.docker.create.network=none"),
    )
    assert found.config == ("a", "b.yaml")
    assert found.sandbox == "docker"
    assert dict(found.overrides) == {"sandbox.docker.create.network": "none"}


def test_sdks_have_it_too() -> None:
    """TRL's spec, verl's YAML and verifiers' taskset."""
    stacks = (
        NeMoGymSpec("e", sandbox="docker").settings.stack,
        LoopConfig.model_validate({"environments": [{"name": "e", "sandbox": "docker"}]}).stack,
        EvalOptions(env="e", sandbox="docker").run_spec().stack,
    )
    assert {stack.environments for stack in stacks} == {(EnvironmentConfig(name="e", sandbox="docker"),)}


def test_a_stack_with_both_survives_json() -> None:
    spec = EnvironmentConfig(name="e", config=("a", "b.yaml"), sandbox="local")
    stack = StackConfig(environments=(spec,))
    assert StackConfig.model_validate(json.loads(stack.model_dump_json())) == stack
    assert hash(stack) != hash(StackConfig(environments=("e",)))


def test_several_configs_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """b.yaml overrides what the environment's config a says, and what c includes."""
    site, cwd = tmp_path / "site", tmp_path / "work"
    configs = site / "resources_servers/e/configs"
    configs.mkdir(parents=True)
    cwd.mkdir()
    agent = {
        "a": {"responses_api_agents": {"x": {"entrypoint": "app.py", "steps": 1, "sandbox_provider": "box"}}}
    }
    (configs / "a.yaml").write_text(yaml.safe_dump(agent))
    (cwd / "c.yaml").write_text(
        yaml.safe_dump({"box": {"local": {}}, "a": {"responses_api_agents": {"x": {"steps": 3}}}})
    )
    (cwd / "b.yaml").write_text(
        yaml.safe_dump({"config_paths": ["c.yaml"], "a": {"responses_api_agents": {"x": {"steps": 2}}}})
    )
    monkeypatch.chdir(cwd)
    catalog = Catalog(site, "0.7.0")
    plain = catalog.find("e").config()
    assert [(each.name, each.provider) for each in plain.sandboxes] == [("box", None)]
    both = catalog.find("e", ("a", "b.yaml")).config(("a", "b.yaml"))
    assert both.name == "a+b.yaml"
    assert both.all_files == (configs / "a.yaml", cwd / "b.yaml")
    assert both.agents[0].block["steps"] == 2
    assert both.sandboxes[0].provider == "local"
    assert catalog.find("e", ("b.yaml", "a")).config(("b.yaml", "a")).agents[0].block["steps"] == 1
    assert catalog.find("e", "a") is catalog.find("e")
    with pytest.raises(ConfigError, match="'z'"):
        catalog.find("e", ("a", "z"))


def test_one_file_that_is_not_the_environments_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "resources_servers/e/configs").mkdir(parents=True)
    (tmp_path / "resources_servers/e/configs/e.yaml").write_text(yaml.safe_dump(config_with("box")))
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config_with("mine")))
    monkeypatch.chdir(tmp_path)
    found = Catalog(tmp_path, "0.7.0").find("e", "mine.yaml").config("mine.yaml")
    assert found.sandboxes[0].name == "mine"


@pytest.fixture(scope="module")
def release() -> Catalog:
    """The installed 0.7.0."""
    from gymgate.gym.runtime import ensure_runtime

    runtime = ensure_runtime(RuntimeConfig(version="0.7.0"))
    return Catalog(runtime.site, runtime.version)


@pytest.mark.gym
def test_every_provider_of_the_release_has_settings(release: Catalog) -> None:
    assert tuple(packaged_providers(release.site)) == PROVIDERS == tuple(machine.PROVIDERS)
    for name in PROVIDERS:
        assert provider_in(sandbox_block(name, release.site)) == name


@pytest.mark.gym
def test_requirements_of_providers_are_those_of_the_releases_extras(release: Catalog) -> None:
    from packaging.requirements import Requirement

    from gymgate.gym.catalog.requirements import Distributions

    installed = Distributions(release.site)
    lines = [*installed.gym_extra("sandbox"), *installed.gym_extra("openshell")]
    shipped = {each.name: each.specifier for each in map(Requirement, lines)}
    for needs in machine.PROVIDERS.values():
        for own in map(Requirement, needs.requirements):
            assert own.specifier == shipped[own.name], own


@pytest.mark.gym
def test_every_packaged_config_that_names_a_sandbox_gets_each_provider(release: Catalog) -> None:
    """All configs of 0.7.0, read as Gym's parser reads them: afterwards no block is left undefined."""
    from gymgate.gym.catalog.parse import ConfigProblem, ConfigReader

    reader = ConfigReader([release.site])
    blocks = {provider: sandbox_block(provider, release.site) for provider in PROVIDERS}
    undefined = named = 0
    for kind in ("resources_servers", "environments", "benchmarks", "responses_api_agents"):
        for path in sorted((release.site / kind).rglob("*.yaml")):
            try:
                config = reader.read(path)
            except ConfigProblem:
                continue
            if not (before := sandbox_references(config)):
                continue
            named += 1
            undefined += any(each.provider is None for each in before)
            for provider, block in blocks.items():
                chosen = copy.deepcopy(config)
                choose_provider(chosen, block)
                after = sandbox_references(chosen)
                assert {each.provider for each in after} == {provider}, path
                assert [each.setting for each in after] == [each.setting for each in before], path
    assert (named, undefined) == NAMED


NAMED = (109, 74)
"""Configs of 0.7.0 that name a sandbox, and those of them that leave its provider to another config."""
