"""What is read of an environment's servers before they are started."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gymgate.core.config import EnvironmentConfig, Routing, StackConfig
from gymgate.core.errors import ConfigError, ServerDiedError, StackStartError
from gymgate.gym.inside.resolve import ServerInstance
from gymgate.gym.server_code import ServerCode
from gymgate.stack.daemon import plan, running_stack
from gymgate.stack.daemon.plan import EnvironmentPlan
from gymgate.stack.daemon.running_environment import RunningEnvironment, StackContext
from gymgate.stack.daemon.running_stack import RunningStack


def context(root: Path, agent: dict[str, Any]) -> StackContext:
    """A context whose parser answers with one agent and its resources server, which lie under `root`."""
    for kind, name in (("responses_api_agents", "own_agent"), ("resources_servers", "maths")):
        (root / kind / name).mkdir(parents=True)
        (root / kind / name / "app.py").touch()
    config = {
        "maths": {"resources_servers": {"maths": {"entrypoint": "app.py"}}},
        "solver": {"responses_api_agents": {"own_agent": {"entrypoint": "app.py", **agent}}},
    }

    async def parse(*_: Any, **__: Any) -> dict[str, Any]:
        return {"config": config, "urls": [], "added": []}

    async def client(python: Path) -> Any:
        return SimpleNamespace(parse=parse)

    fork_servers: Any = SimpleNamespace(client=client)
    nothing: Any = None
    stack = StackConfig(environments=("e",))
    return StackContext(stack, root, nothing, fork_servers, nothing, lambda _: None)


async def made(root: Path, agent: dict[str, Any], routing: Routing | None = None) -> EnvironmentPlan:
    spec = EnvironmentConfig(name="e", routing=routing)
    runtime: Any = SimpleNamespace(version="9.9.9", site=root, python=root)
    return await RunningEnvironment(spec, [root / "e.yaml"], runtime, context(root, agent))._read_plan()


def test_environments_whose_names_are_alike_have_logs_of_their_own(tmp_path: Path) -> None:
    nothing: Any = None
    names = ("a/b.yaml", "a_b.yaml", "a:b.yaml")
    stack = StackContext(StackConfig(environments=names), tmp_path, nothing, nothing, nothing, lambda _: None)
    made = [RunningEnvironment(EnvironmentConfig(name=name), [], nothing, stack) for name in names]
    assert [environment._logs.name for environment in made] == ["a_b.yaml", "a_b.yaml-2", "a_b.yaml-3"]


async def test_source_is_read_beside_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    read = plan.read_code

    def read_code(server: ServerInstance, roots: Sequence[Path]) -> ServerCode:
        threads.append(threading.current_thread())
        return read(server, roots)

    monkeypatch.setattr(plan, "read_code", read_code)
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
    with pytest.raises(ConfigError, match=r"'solver'.*model_server") as refused:
        await made(tmp_path, {"base_url": "https://model.example.com/v1"}, routing)
    assert "\n" not in str(refused.value)


async def test_rows_for_an_environment_whose_config_was_not_read_get_the_reason(tmp_path: Path) -> None:
    """While others of its stack serve; a parser that ends early is no mistake of the caller."""

    async def client(python: Path) -> Any:
        raise StackStartError("the fork server is gone")

    stack = RunningStack(StackConfig(environments=("e",)), tmp_path, lambda _: None)
    shared = replace(context(tmp_path, {}), fork_servers=SimpleNamespace(client=client))
    runtime: Any = SimpleNamespace(version="9.9.9", site=tmp_path, python=tmp_path)
    environment = RunningEnvironment(EnvironmentConfig(name="e"), [tmp_path / "e.yaml"], runtime, shared)
    stack.environments["e"] = environment
    with pytest.raises(StackStartError):
        await environment.start()
    with pytest.raises(ServerDiedError, match="the fork server is gone"):
        stack.choose("e", None)


@pytest.mark.parametrize(("bad", "up"), [(["a"], True), (["a", "b"], False)])
async def test_an_environment_that_does_not_start_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: list[str], up: bool
) -> None:
    class Scripted:
        judges: frozenset[str] = frozenset()
        files_per_rollout = 5

        def __init__(self, spec: EnvironmentConfig, *_: Any) -> None:
            self.name = spec.name

        async def start(self) -> None:
            if self.name in bad:
                raise StackStartError(f"server of {self.name} died")

    told: list[str] = []
    stack = RunningStack(StackConfig(environments=("a", "b"), hang_timeout_s=None), tmp_path, told.append)
    monkeypatch.setattr(running_stack, "RunningEnvironment", Scripted)
    monkeypatch.setattr(stack, "_resolve", lambda: [(spec, (), None) for spec in stack.config.environments])
    async with stack._exits:
        if up:
            await stack.start()
            assert ["server of a died" in line for line in told] == [True]
        else:
            with pytest.raises(StackStartError, match="server of a died"):
                await stack.start()
