"""What is read of an environment's servers before they are started."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gymgate.config import EnvironmentConfig
from gymgate.errors import ConfigError
from gymgate.stack import gym_config, plan

BY_URL = {"body": "url", "switches": ["observability", "capture"], "plain": True, "client": True}
NOTHING = {"body": None, "switches": [], "plain": False, "client": False}


def context(root: Path, agent: dict[str, Any], forwarding: dict[str, Any]) -> Any:
    """A context whose parser answers with one agent and its resources server, which lie under `root`."""
    for kind, name in (("responses_api_agents", "own_agent"), ("resources_servers", "maths")):
        (root / kind / name).mkdir(parents=True)
        (root / kind / name / "app.py").write_text("self.url_path_for_run('/v1/responses', body)\n")
    config = {
        "maths": {"resources_servers": {"maths": {"entrypoint": "app.py"}}},
        "solver": {"responses_api_agents": {"own_agent": {"entrypoint": "app.py", **agent}}},
    }

    async def parse(*_: Any, **__: Any) -> dict[str, Any]:
        return {"config": config, "urls": [], "forwarding": forwarding}

    async def fork_server() -> Any:
        return SimpleNamespace(parse=parse)

    return SimpleNamespace(
        fork_server=fork_server,
        config=SimpleNamespace(component_roots=(), agent_processes=4),
        runtime=SimpleNamespace(version="9.9.9", site=root),
        directory=root,
    )


async def made(root: Path, agent: dict[str, Any], forwarding: dict[str, Any]) -> plan.EnvironmentPlan:
    return await plan.make_plan(
        EnvironmentConfig(name="e"), [root / "e.yaml"], context(root, agent, forwarding), root
    )


async def test_source_is_read_beside_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    own = gym_config.uses_ray

    def uses_ray(directory: Path, entrypoint: str) -> bool:
        threads.append(threading.current_thread())
        return own(directory, entrypoint)

    monkeypatch.setattr(gym_config, "uses_ray", uses_ray)
    agent = {"model_server": {"type": "responses_api_models", "name": "policy_model"}}
    assert (await made(tmp_path, agent, BY_URL)).strategies == {"solver": "url"}
    assert len(threads) == 2
    assert threading.main_thread() not in threads


async def test_a_release_that_hands_nothing_on_gives_each_rollout_a_process(tmp_path: Path) -> None:
    agent = {"model_server": {"type": "responses_api_models", "name": "policy_model"}}
    assert (await made(tmp_path, agent, NOTHING)).strategies == {"solver": "process"}


@pytest.mark.parametrize("forwarding", [BY_URL, NOTHING])
async def test_an_agent_whose_calls_go_elsewhere_is_refused_at_the_start(
    tmp_path: Path, forwarding: dict[str, Any]
) -> None:
    """In one line; a process of its own would not help."""
    with pytest.raises(ConfigError, match=r"'solver'.*model of its own by a URL.*model_server") as refused:
        await made(tmp_path, {"base_url": "https://model.example.com/v1"}, forwarding)
    assert "\n" not in str(refused.value)
