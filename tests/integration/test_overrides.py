"""Overrides that nothing reads are refused, and none that something does: packaged configs, documented settings, real stacks."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest
import yaml

import gymgate
from gymgate import ensure_runtime
from gymgate.core.config import EnvironmentConfig
from gymgate.core.errors import ConfigError
from gymgate.gym.catalog.parse import ConfigReader
from gymgate.gym.inside.resolve import AGENTS, RESOURCES, Node, ServerInstance, servers_of, unknown_part
from gymgate.gym.overrides import refuse_unknown
from gymgate.gym.runtime import open_catalog
from support.stacks import runtime, stack_config

pytestmark = [pytest.mark.gym, pytest.mark.warm]
DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = DOCS.parent / "examples"
MCQA = "mcqa.resources_servers.mcqa"
OWN = ("warehouse", "fix_repo", "telemetry", "sandbox")
"""Blocks of environments that a reader writes, of telemetry and of sandboxes, which other tests try."""


def site(version: str) -> Path:
    return ensure_runtime(runtime(version)).site


def packaged_settings(root: Path) -> list[tuple[ServerInstance, set[str]]]:
    """The settings of each server in a release's configs, and those one level below them."""
    servers: dict[tuple[str, str], ServerInstance] = {}
    settings: dict[tuple[str, str], set[str]] = defaultdict(set)
    kinds = ("resources_servers", "responses_api_agents", "environments", "benchmarks")
    for path in (path for kind in kinds for path in (root / kind).rglob("*.yaml")):
        try:
            config = yaml.safe_load(path.read_text())
        except yaml.YAMLError:
            continue
        for server in servers_of(config, AGENTS, RESOURCES) if isinstance(config, dict) else ():
            for name, value in server.block.items():
                below = [f"{name}.{key}" for key in value] if isinstance(value, dict) else []
                settings[server.type, server.entrypoint].update((name, *below))
                servers.setdefault((server.type, server.entrypoint), server)
    return [(servers[key], names) for key, names in settings.items()]


def refusal(config: Node, key: str, position: int, root: Path) -> str | None:
    try:
        refuse_unknown("e", [(key, position)], config, [root])
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("version", ["0.7.0", "0.6.0"])
def test_no_setting_of_a_packaged_config_is_refused(version: str) -> None:
    """Each is tried as an override of a server that lacks it."""
    root, added = site(version), []
    config: dict[str, Node] = {}
    for number, (server, settings) in enumerate(packaged_settings(root)):
        name = f"server_{number}"
        config[name] = {server.kind: {server.type: {"entrypoint": server.entrypoint or "app.py"}}}
        added += [
            (f"{name}.{server.kind}.{server.type}.{setting}", 3 + setting.count(".")) for setting in settings
        ]
    assert len(added) > 2000
    refuse_unknown("e", added, config, [root])


@pytest.mark.parametrize(
    ("config", "position", "key", "word"),
    [
        ({"mcqa": {"resources_servers": {"mcqa": {"entrypoint": "app.py"}}}}, 3, f"{MCQA}.domian", "domain"),
        (
            {"mcqa": {"resources_servers": {"mcqa": {"entrypoint": "app.py"}}, "resource_servers": {}}},
            1,
            "mcqa.resource_servers.mcqa.domain",
            "resources_servers",
        ),
        (
            {"mcqa": {"resources_servers": {"mcqa": {"entrypoint": "app.py"}, "mcqaa": {"domain": "math"}}}},
            2,
            "mcqa.resources_servers.mcqaa.domain",
            "mcqa",
        ),
        ({"telemetry": {"enabled": True, "enabeld": True}}, 1, "telemetry.enabeld", "enabled"),
        ({"judge_model_name": "a", "judge_modell_name": "b"}, 0, "judge_modell_name", "judge_model_name"),
        ({"fool": 1, "foo": 1}, 0, "foo", "fool"),
    ],
)
def test_a_typo_is_refused_with_near_names(config: Node, position: int, key: str, word: str) -> None:
    message = refusal(config, key, position, site("0.7.0"))
    assert message is not None
    assert repr(key) in message
    assert word in message.partition("near names")[2].partition(";")[0]


def test_what_stands_in_code_or_config_is_taken() -> None:
    root = site("0.7.0")
    block = {"entrypoint": "app.py"}
    mine = {"mine": {"resources_servers": {"mine": block}}, "sandbox": {"docker": {}}, "v": "${a.b}"}
    assert refusal(mine, "mine.resources_servers.mine.entrypoint", 1, root) is None  # a whole server
    assert refusal(mine, "sandbox.docker.create.network", 2, root) is None  # for a provider
    assert refusal(mine, "mine.resources_servers.mine.headers.X-Team", 4, root) is None  # of a mapping
    assert refusal(mine, "a", 0, root) is None  # interpolated
    assert refusal(mine, "skip_venv_if_present", 0, root) is None  # NeMo Gym's
    free = {"mcqa": {"responses_api_agents": {"simple_agent": block}}}
    key = "mcqa.responses_api_agents.simple_agent.max_steps"
    assert refusal(free, key, 3, root) is None


@pytest.mark.parametrize("key", ["domian", "grading_mod"])
async def test_a_stack_does_not_start_with_a_typo_unless_asked(key: str) -> None:
    environment = EnvironmentConfig(name="mcqa", overrides={f"{MCQA}.{key}": "math"})
    with pytest.raises(ConfigError) as raised:
        async with gymgate.acquire(stack_config(environment)):
            pass
    assert key in str(raised.value)
    asked = EnvironmentConfig(name="mcqa", overrides={f"+{MCQA}.{key}": "math", f"{MCQA}.domain": "math"})
    async with gymgate.acquire(stack_config(asked)) as stack:
        assert stack.agents


def test_documented_settings_are_taken() -> None:
    """Each in the first packaged config that has its server."""
    texts = [path.read_text() for path in (*DOCS.rglob("*.md"), *EXAMPLES.rglob("*.md"))]
    keys = {key for text in texts for key in re.findall(r"--set ([\w.]+)=", text)}
    catalog, root = open_catalog(runtime()), site("0.7.0")
    reader = ConfigReader([root])
    configs = [config for each in (*catalog.environments(), *catalog.agents()) for config in each.configs]
    tried = 0
    for key in sorted(keys):
        name = key.partition(".")[0]
        if key.endswith("KEY") or name in OWN:
            continue
        files = next((c.all_files for c in configs if name in {server.name for server in c.instances}), None)
        assert files is not None, key
        config = reader.read(*(path if path.is_absolute() else root / path for path in files))
        if (position := unknown_part(config, key)) is not None:
            assert refusal(config, key, position, root) is None
        tried += 1
    assert tried > 4
