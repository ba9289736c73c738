"""Mixed environments under random faults for as long as you like: what is lost, late, wrong, and what grows.

    python -m benchmarks soak --minutes 30

Every planned rollout has an outcome that is known beforehand: the reward of its row, as measured before the first fault, or the
error that its policy is there to cause (answers nested too deeply, half characters, a callable that raises SystemExit, a policy
that loops or is silent). One that a fault from outside failed is run again. Meanwhile servers, the fork server and the daemon are
killed or stopped for a moment, rollouts are cancelled, the policy answers 500, nothing, or half, and requests without a key
arrive, large and compressed. With `--engine` most of the rollouts that should get a reward ask a real engine, at temperature 0;
start it with one request at a time, so that its answers do not depend on their neighbours:

    ./dev engine python -m benchmarks.engine.server --port 8000 --max-num-seqs 1
    ./dev python -m benchmarks soak --minutes 30 --workers 4 --engine http://127.0.0.1:8000

Counted are rollouts that come back later than `LATE_S` after their deadline, that have another outcome, or none. Exits with 1 if
there is one, or if anything of the stack, or a request in the engine, is left at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import statistics
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.request import urlopen

from aiohttp import web

from benchmarks.machine import descendants, describe, files_of, pss_mb
from benchmarks.soak_work import ENGINE, Policies, Work, strange_requests
from gymgate.core.config import RuntimeConfig, StackConfig
from gymgate.core.errors import StackLostError, StackStartError
from gymgate.gym.runtime import ensure_runtime
from gymgate.stack import Stack, acquire

WITH_TOOLS = ("example_single_tool_call", "example_session_state_mgmt", "example_multi_step")
ENVIRONMENTS = (*WITH_TOOLS, "mcqa")
LATE_S = 2.0
"""After its deadline, when a rollout counts as late."""
ATTEMPTS = 50
SAMPLE_S = 5.0
FAULTS = {
    "kill a server": 8,
    "stop a server for 2 s": 6,
    "stop the daemon for 2 s": 2,
    "kill the fork server": 3,
    "kill the daemon": 1,
    "cancel a rollout": 10,
    "nothing": 4,
}


@dataclass
class Tally:
    """What happened."""

    completed: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    strangers: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    latest_s: float = 0.0
    samples: list[dict[str, float]] = field(default_factory=list)
    stacks: int = 0
    restarts: int = 0


class Soak:
    """Workers, a saboteur and a bookkeeper on one config."""

    def __init__(self, minutes: float, workers: int, seed: int, engine: str | None = None) -> None:
        self.chance = random.Random(seed)
        self.tally = Tally()
        self.policies = Policies(self.chance, 40, engine)
        self.engine = engine
        self.workers = workers
        self.ends = time.monotonic() + minutes * 60
        self.config = StackConfig(
            environments=ENVIRONMENTS,
            runtime=RuntimeConfig(),
            max_restarts=1_000_000,
            restart_window_s=1.0,
            start_timeout_s=120,
        )
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.measured: dict[tuple[str, str, int], tuple[str, float | None]] = {}
        """Status and reward of each policy and row, as measured before the first fault."""
        self.gateway = ""
        self.status: dict[str, Any] = {}
        self.running: set[asyncio.Task[Any]] = set()

    async def run(self) -> Tally:
        """Until the time is up, and then until every rollout under way has completed."""
        site = (await asyncio.to_thread(ensure_runtime, self.config.runtime)).site
        for name in ENVIRONMENTS:
            text = (site / "resources_servers" / name / "data" / "example.jsonl").read_text()
            self.rows[name] = [json.loads(line) for line in text.splitlines()]
        server = web.Server(self.policies.handle, handler_cancellation=True, access_log=None)
        listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0, backlog=512)
        self.policies.at(listener.sockets[0].getsockname()[1])
        await self.measure()
        others = [asyncio.create_task(work) for work in (self.sabotage(), self.keep_books(), self.knock())]
        try:
            await asyncio.gather(*(self.work(number) for number in range(self.workers)))
        finally:
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            listener.close()
            await server.shutdown(0.2)
        return self.tally

    async def measure(self) -> None:
        """Each row once with each policy, while nothing goes wrong."""
        faces = {"reward": "good", **({"engine": "engine"} if self.engine else {})}
        async with acquire(self.config) as stack:
            for name, rows in self.rows.items():
                for (kind, face), (index, row) in itertools.product(faces.items(), enumerate(rows)):
                    policy = self.policies.endpoint(face)
                    rollout = await stack.run(row, policy=policy, environment=name, limits=ENGINE)
                    assert rollout.error is None, rollout.error
                    self.measured[kind, name, index] = (rollout.status, rollout.reward)

    async def work(self, number: int) -> None:
        """Complete one rollout after another, on whatever stack there is."""
        count = 0
        while time.monotonic() < self.ends:
            work = self.policies.choose()
            name = self.chance.choice(ENVIRONMENTS if work.kind != "loops" else WITH_TOOLS)
            index = self.chance.randrange(len(self.rows[name]))
            await self.complete(work, name, index, f"{number}-{count}")
            count += 1

    async def complete(self, work: Work, name: str, index: int, identity: str) -> None:
        """Run a row until it comes to its right end."""
        said = f"{identity} of {name} ({work.kind})"
        for attempt in range(ATTEMPTS):
            task = asyncio.create_task(self.attempt(work, name, index, f"{identity}-{attempt}"))
            self.running.add(task)
            try:
                async with asyncio.timeout(work.limits.timeout_s + 2 * self.config.start_timeout_s):
                    if await task:
                        self.tally.completed[work.kind] += 1
                        return
            except asyncio.CancelledError:
                self.tally.failures["cancelled"] += 1
            except TimeoutError:
                self.tally.lost.append(f"{said}: no end")
                return
            except (StackLostError, StackStartError) as error:
                self.tally.failures[type(error).__name__] += 1
            except Exception as error:
                self.tally.lost.append(f"{said}: {type(error).__name__}: {error}")
                return
            finally:
                self.running.discard(task)
        self.tally.lost.append(f"{said}: {ATTEMPTS} attempts")

    async def attempt(self, work: Work, name: str, index: int, identity: str) -> bool:
        async with acquire(self.config) as stack:
            self.gateway = stack.gateway_url
            started = time.monotonic()
            try:
                rollout = await stack.run(
                    self.rows[name][index],
                    policy=work.policy,
                    environment=name,
                    limits=work.limits,
                    rollout_id=identity,
                )
            finally:
                late_s = time.monotonic() - started - work.limits.timeout_s
                self.tally.latest_s = max(self.tally.latest_s, late_s)
                if late_s > LATE_S:
                    self.tally.late.append(f"{identity} ({work.kind}): {late_s:.1f} s")
        if fault := work.fault_of(rollout, self.measured.get((work.kind, name, index))):
            self.tally.wrong.append(f"{identity} of {name} ({work.kind}): {fault}")
            return True
        if rollout.error is not None:
            self.tally.failures[f"{rollout.error.kind} {rollout.error.type}"] += 1
        return work.came_true(rollout)

    async def knock(self) -> None:
        """Requests of strangers, a few every second."""
        while True:
            await asyncio.sleep(self.chance.uniform(0.2, 2))
            if self.gateway:
                await strange_requests(self.gateway, self.chance, self.tally.strangers)

    async def keep_books(self) -> None:
        """Hold a lease, so that the stack stays between rollouts; sample what may grow."""
        while True:
            with suppress(StackLostError, StackStartError):
                async with acquire(self.config) as stack:
                    self.tally.stacks += 1
                    while True:
                        await self.sample(stack)
                        await asyncio.sleep(SAMPLE_S)

    async def sample(self, stack: Stack) -> None:
        status = self.status = await stack.status()
        environments = status["environments"].values()
        self.tally.restarts = max(self.tally.restarts, sum(place["restarts"] for place in environments))
        if any(place["state"] != "up" for place in environments):
            return
        daemon, own = status["pid"], os.getpid()
        self.tally.samples.append(
            {
                "daemon MB": pss_mb(daemon),
                "SDK MB": pss_mb(own),
                "fork server MB": sum(pss_mb(pid) for pid in status["fork_servers"]),
                "daemon fds": files_of(daemon),
                "SDK fds": files_of(own),
                "processes": len(descendants(own)),
                "routes": status["rollouts"],
            }
        )

    async def sabotage(self) -> None:
        """A fault every few seconds."""
        while True:
            await asyncio.sleep(self.chance.uniform(1, 8))
            fault = self.chance.choices(list(FAULTS), list(FAULTS.values()))[0]
            self.tally.faults[fault] += 1
            if fault == "cancel a rollout" and self.running:
                self.chance.choice(list(self.running)).cancel()
            elif fault.startswith(("kill", "stop")) and self.status:
                await self.strike(fault)

    async def strike(self, fault: str) -> None:
        servers = [
            server["pid"]
            for place in self.status["environments"].values()
            for server in place["servers"].values()
        ]
        victims = {
            "kill the daemon": [self.status["pid"]],
            "stop the daemon for 2 s": [self.status["pid"]],
            "kill the fork server": self.status["fork_servers"],
        }
        pid = self.chance.choice(victims.get(fault, servers) or [self.status["pid"]])
        if pid not in descendants(os.getpid()):  # it has ended meanwhile, and its number may be another's
            return
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP if fault.startswith("stop") else signal.SIGKILL)
            await asyncio.sleep(2.0)
            os.kill(pid, signal.SIGCONT)


def unfinished(engine: str) -> list[str]:
    """Requests that a vLLM server still has, as its own figures say."""
    with urlopen(f"{engine}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    wanted = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    return [line for line in lines if line.startswith(wanted) and float(line.split()[-1])]


def growth(samples: list[dict[str, float]]) -> dict[str, tuple[float, float]]:
    """Of each figure, the median in the first quarter of the samples and in the last."""
    quarter = max(1, len(samples) // 4)
    parts = samples[:quarter], samples[-quarter:]
    return {
        name: (
            statistics.median(one[name] for one in parts[0]),
            statistics.median(one[name] for one in parts[1]),
        )
        for name in samples[0]
    }


def main() -> None:
    """Soak, and tell."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--workers", type=int, default=12, help="rollouts at once")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--engine",
        metavar="URL",
        help="a vLLM server, which is asked by four fifths of the rollouts that get a reward",
    )
    options = parser.parse_args()
    soak = Soak(options.minutes, options.workers, options.seed, options.engine)
    tally = asyncio.run(soak.run())
    print(describe())
    print(
        f"{options.minutes:g} minutes, {options.workers} at once, seed {options.seed}, {tally.stacks} stacks"
    )
    print("came to their right end", sum(tally.completed.values()), dict(tally.completed))
    print("faults", dict(tally.faults), "in the policy", dict(soak.policies.faults))
    print("requests without a key", dict(tally.strangers))
    print("attempts that failed", dict(tally.failures))
    print(f"latest {tally.latest_s:.2f} s after its deadline")
    for name, (first, last) in growth(tally.samples).items():
        print(f"{name:15} {first:8.1f} -> {last:8.1f}")
    time.sleep(3)
    left: list[Any] = [*descendants(os.getpid()), *(unfinished(options.engine) if options.engine else [])]
    for what in ("lost", "late", "wrong"):
        found = getattr(tally, what)
        print(what, len(found), found[:10])
    print("left", left)
    raise SystemExit(bool(tally.lost or tally.late or tally.wrong or left))


if __name__ == "__main__":
    main()
