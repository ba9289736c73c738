"""What is read of an environment's servers before they are started."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gymgate.config import EnvironmentConfig, Routing
from gymgate.errors import ConfigError
from gymgate.stack import gym_config, plan


def context(root: Path, agent: dict[str, Any]) -> Any:
    """A context whose parser answers with one agent and its resources server, which lie under `root`."""
    for kind, name in (("responses_api_agents", "own_agent"), ("resources_servers", "maths")):
        (root / kind / name).mkdir(parents=True)
        (root / kind / name / "app.py").touch()
    config = {
        "maths": {"resources_servers": {"maths": {"entrypoint": "app.py"}}},
        "solver": {"responses_api_agents": {"own_agent": {"entrypoint": "app.py", **agent}}},
    }

    async def parse(*_: Any, **__: Any) -> dict[str, Any]:
        return {"config": config, "urls": []}

    async def fork_server() -> Any:
        return SimpleNamespace(parse=parse)

    return SimpleNamespace(
        fork_server=fork_server,
        config=SimpleNamespace(component_roots=(), agent_processes=4),
        runtime=SimpleNamespace(version="9.9.9", site=root),
        directory=root,
    )


async def made(root: Path, agent: dict[str, Any], routing: Routing | None = None) -> plan.EnvironmentPlan:
    environment = EnvironmentConfig(name="e", routing=routing)
    return await plan.make_plan(environment, [root / "e.yaml"], context(root, agent), root)


async def test_source_is_read_beside_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    own = gym_config.uses_ray

    def uses_ray(directory: Path, entrypoint: str) -> bool:
        threads.append(threading.current_thread())
        return own(directory, entrypoint)

    monkeypatch.setattr(gym_config, "uses_ray", uses_ray)
    agent = {"model_server": {"type": "responses_api_models", "name": "policy_model"}}
    assert (await made(tmp_path, agent)).strategies == {"solver": "url"}
    assert len(threads) == 2
    assert threading.main_thread() not in threads


async def test_an_agent_of_ones_own_is_routed_as_its_environment_says(tmp_path: Path) -> None:
    agent = {"model_server": {"type": "responses_api_models", "name": "policy_model"}}
    assert (await made(tmp_path, agent, "process")).strategies == {"solver": "process"}


@pytest.mark.parametrize("routing", [None, "process"])
async def test_an_agent_whose_calls_go_elsewhere_is_refused_at_the_start(
    tmp_path: Path, routing: Routing | None
) -> None:
    """In one line; a process of its own would not help."""
    with pytest.raises(ConfigError, match=r"'solver'.*model of its own by a URL.*model_server") as refused:
        await made(tmp_path, {"base_url": "https://model.example.com/v1"}, routing)
    assert "\n" not in str(refused.value)
