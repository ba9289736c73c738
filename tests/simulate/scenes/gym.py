"""A stack whose gateway, restarts, agent processes and rollouts are gymgate's, and whose servers are scripted.

The servers are small programs on hosts of their own that speak NeMo Gym's HTTP: an agent that carries its rollout's key in
URLs, one that has a process for each rollout, and a resources server. What a fork server does, `Processes` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import os
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import simloom
from invariants import Ledger
from parts import (
    Child,
    EnvironmentPlan,
    HTTPClient,
    HTTPFailure,
    Request,
    RunningEnvironment,
    RunningStack,
    ServerCode,
    StackConfig,
    codec,
    gym_modules,
)

from scenes.faults import seconds
from scenes.speech import answer_in, answer_of, question_in
from scenes.web import serve

ENVIRONMENT = "mcqa"
BY_URL, BY_PROCESS, RESOURCES = "agent_by_url", "agent_by_process", "resources"
LOOPBACK = "127.0.0.1"
POLICY_PORT = 8000
TURNS = 3
RESENDS = 2
UNNOTICED_S = 0.1
"""For a death to be noticed."""
CONFIG: dict[str, Any] = {
    "policy_model": {"responses_api_models": {"vllm_model": {"entrypoint": "app.py"}}},
    RESOURCES: {"resources_servers": {"mcqa": {"entrypoint": "app.py"}}},
    **{
        name: {
            "responses_api_agents": {
                type_: {
                    "entrypoint": "app.py",
                    "resources_server": {"type": "resources_servers", "name": RESOURCES},
                    "model_server": {"type": "responses_api_models", "name": "policy_model"},
                }
            }
        }
        for name, type_ in ((BY_URL, "simple_agent"), (BY_PROCESS, "harbor_agent_general"))
    },
}


@dataclass
class Odds:
    """Percent of the times in which each fault of the servers happens."""

    dies_in_start: int = 0
    dies_in_a_call: int = 0
    dies_in_scoring: int = 0
    fails: int = 0
    """A tool or the verifier answers with status 500."""


@dataclass
class Processes:
    """In place of the fork servers: starts servers on hosts of their own, and ends them."""

    world: Any
    ledger: Ledger
    odds: Odds
    deaths: list[float] = field(default_factory=list)
    """When servers died that gymgate did not end."""
    running: dict[Any, Any] = field(default_factory=dict)
    """Each child's host."""
    outside: contextvars.Context = field(default_factory=contextvars.copy_context)
    """Without a host: else servers would crash with the host of whoever starts them."""

    async def client(self, python: Path) -> Processes:
        return self

    async def close(self) -> None:
        await asyncio.sleep(seconds("end of the fork server", 0.2))
        for child in [*self.running]:
            self.kill(child, signal.SIGKILL)

    async def ray_address(self, progress: Any) -> None:
        raise AssertionError("no server uses Ray")

    async def serve(self, name: str, log: Path, *, instance: str, config: dict[str, Any], **_: Any) -> Child:
        await asyncio.sleep(seconds("fork", 0.1))
        number = len(self.world.hosts) + 1
        child = Child(name, number, log, asyncio.get_running_loop().create_future(), self)
        host = self.running[child] = self.world.host(f"{name} {number}")
        self.outside.run(host.spawn, lambda: self._run(child, instance, config))
        return child

    def kill(self, child: Any, signal_number: int) -> None:
        """End a child a little later, unless it is an INT that it does not hear."""
        if child in self.running and (signal_number == signal.SIGKILL or simloom.draw("heeds INT", 2)):
            delay = seconds("until it is dead", 0.3)
            later = asyncio.get_running_loop().call_later
            self.outside.run(later, delay, self._gone, child, -signal_number)

    def die(self, child: Any, what: str, status: int = 1) -> None:
        """Let a child die by itself, or by somebody else."""
        simloom.reached(what)
        self.deaths.append(asyncio.get_running_loop().time())
        self._gone(child, status)

    def deaths_since(self, began: float) -> int:
        """Return how many servers may have been seen to die since then."""
        return sum(when >= began - UNNOTICED_S for when in self.deaths)

    def crash(self) -> None:
        """End all with the daemon that started them."""
        for child in [*self.running]:
            self._gone(child, None)

    def _gone(self, child: Any, status: int | None) -> None:
        if (host := self.running.pop(child, None)) is not None:
            host.crash()
            self.outside.run(asyncio.get_running_loop().call_soon, child.exited.set_result, status)

    async def _run(self, child: Any, instance: str, config: dict[str, Any]) -> None:
        await asyncio.sleep(seconds("start of a server", 1.0))
        if simloom.sometimes("a server dies in start", self.odds.dies_in_start):
            return self.die(child, "died in start")
        (block,) = next(iter(config[instance].values())).values()
        server = Server(self, child, config)
        answer = server.answer_resources if instance == RESOURCES else server.answer_agent
        await serve(LOOPBACK, block["port"], answer)
        return None


@dataclass
class Server:
    """What a server does, agent or resources server."""

    processes: Processes
    child: Any
    config: dict[str, Any]

    async def answer_resources(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path == "/seed_session":
            return 200, {}
        odds, ledger, name = self.processes.odds, self.processes.ledger, body["name"]
        await asyncio.sleep(seconds("resources server", 1.0))
        is_verify = path == "/verify"
        if is_verify and simloom.sometimes("a server dies in scoring", odds.dies_in_scoring):
            self.processes.die(self.child, "died in scoring")
            await asyncio.Event().wait()
        if simloom.sometimes("server fails", odds.fails):
            ledger.excuses[name] += 1
            return 500, {"detail": "no luck"}
        if is_verify:
            ledger.deserved[name] = float(sum(body["said"]))
            return 200, {**body, "reward": float(sum(body["said"]))}
        return 200, {}

    async def answer_agent(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path != "/run":
            return 404, {}
        async with HTTPClient() as client:
            params = body["responses_create_params"]
            name, said = params["input"][0]["content"], []
            key = body.get("_ng_rollout_id") if "by_url" in self.child.name else None
            await self._post(client, RESOURCES, "/seed_session", {})
            for turn in range(TURNS):
                if simloom.sometimes("a server dies in a call", self.processes.odds.dies_in_a_call):
                    self.processes.die(self.child, "died in a call")
                    await asyncio.Event().wait()
                question = {**params, "input": [{"role": "user", "content": f"{name}/{turn}"}]}
                prefix = f"/ng-rollout/{key}" if key else ""
                status, answer = await self._post(client, "policy_model", f"{prefix}/v1/responses", question)
                if status != 200:
                    return 500, {"detail": codec.dumps(answer).decode()}
                text = answer_in(codec.dumps(answer), "responses")
                assert text is not None
                said.append(int(text))
                if turn < TURNS - 1:
                    status, _ = await self._post(client, RESOURCES, "/tool", {"name": name})
                    if status != 200:
                        return 500, {"detail": "a tool failed"}
            scored = {"name": name, "said": said, "response": answer}
            status, result = await self._post(client, RESOURCES, "/verify", scored)
            if status != 200:
                return 500, {"detail": "scoring failed"}
            return 200, {"responses_create_params": params, **result}

    async def _post(
        self, client: HTTPClient, server: str, path: str, body: dict[str, Any]
    ) -> tuple[int, dict[str, Any]]:
        """Ask another server as NeMo Gym's client does, which sends a request again when its connection breaks."""
        (block,) = next(iter(self.config[server].values())).values()
        request = Request(f"http://{block['host']}:{block['port']}{path}")
        for _ in range(RESENDS):
            with contextlib.suppress(HTTPFailure):
                response = await client.send(request, codec.dumps(body), timeout_s=60.0)
                return response.status, codec.loads_own(response.body)
            await asyncio.sleep(0.5)
        return 500, {"detail": "no connection"}


class SimulatedStack(RunningStack):
    """A stack of one environment, whose config is here and whose servers `processes` starts."""

    processes: Processes

    def _resolve(self) -> Any:
        self._fork_servers = self.processes  # type: ignore[assignment]
        self._names = {ENVIRONMENT: ENVIRONMENT}
        self._settings = {"environments": [{"name": ENVIRONMENT}], "nemo_gym": "0.7.0"}
        runtime = SimpleNamespace(python=Path("/python"), site=Path("/site"), version="0.7.0")
        return [(self.config.environments[0], (), runtime)]


async def read_plan(environment: RunningEnvironment) -> EnvironmentPlan:
    """Return the plan that NeMo Gym's parser and the servers' code would decide."""
    await asyncio.sleep(seconds("reading of the config", 0.5))
    code = {name: ServerCode(Path("/nowhere/servers/code")) for name in (RESOURCES, BY_URL, BY_PROCESS)}
    return EnvironmentPlan(environment.spec, environment._stack.config, "0.7.0", CONFIG, code)


@contextlib.contextmanager
def machine(world: Any) -> Iterator[Path]:
    """Replace what asks the machine's processes, and return a directory for logs."""
    ports = itertools.count(30_000)

    def hold_port() -> Any:
        return SimpleNamespace(number=next(ports), close=lambda: None)

    async def listens(number: int, port: int) -> bool:
        await asyncio.sleep(0)
        listening = world.net._listeners.get((LOOPBACK, port))
        return listening is not None and listening.owner.name.endswith(f" {number}")

    world.net.set_latency(0, 0)
    with contextlib.ExitStack() as patches, tempfile.TemporaryDirectory(prefix="gymgate-simulated-") as logs:
        for where, name, new in (
            (gym_modules.running_environment, "HeldPort", hold_port),
            (gym_modules.agent_processes, "HeldPort", hold_port),
            (gym_modules.children, "listens", listens),
            (gym_modules.handler, "user_of", lambda _: os.getuid()),
            (gym_modules.newcomers, "user_of", lambda _: os.getuid()),
            (gym_modules.running_stack, "remove_ray_directories", lambda: None),
            (gym_modules.running_stack.forkserver, "descendants", lambda _: []),
            (RunningEnvironment, "_read_plan", read_plan),
        ):
            patches.enter_context(mock.patch.object(where, name, new))
        yield Path(logs)


class Policy:
    """An endpoint that says numbers, and notes what it said to each rollout."""

    def __init__(self, name: str, ledger: Ledger) -> None:
        self.name = name
        self.ledger = ledger

    async def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        question = question_in(body, "chat")
        self.ledger.reached(question.partition("/")[0], self.name)
        self.ledger.paid[question] += 1
        await asyncio.sleep(seconds("policy", 1.0))
        return 200, answer_of(str(simloom.draw("said", 100)), "chat")


def row_of(name: str) -> dict[str, Any]:
    """Return a rollout's row; its agent is the one or the other by its name."""
    return {"responses_create_params": {"input": [{"role": "user", "content": name}]}}


def config_of(**settings: Any) -> StackConfig:
    return StackConfig(environments=(ENVIRONMENT,), hang_timeout_s=None, **settings)
