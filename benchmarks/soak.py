"""Mixed environments under random faults for as long as you like: what is lost, what grows.

    python -m benchmarks soak --minutes 30

Every rollout that is planned has to complete: one that a fault failed is run again, by the kind of its error, and one that
neither ends by its deadline nor fails with a typed error is lost. Meanwhile servers, the fork server and the daemon are
killed or stopped for a moment, rollouts are cancelled, and the policy answers 500, nothing, or half. Exits with 1 if
anything was lost, or is left of the stack at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from benchmarks.machine import describe, pss_mb
from benchmarks.scripted_policy import responses_answer
from gymgate.config import HTTPEndpoint, RolloutLimits, RuntimeConfig, StackConfig
from gymgate.errors import StackLostError, StackStartError
from gymgate.runtime import ensure_runtime
from gymgate.stack import Stack, acquire
from gymgate.stack.forkserver import descendants

ENVIRONMENTS = ("example_single_tool_call", "example_session_state_mgmt", "example_multi_step", "mcqa")
LIMITS = RolloutLimits(timeout_s=30.0)
LATE_S = 30.0
"""Beyond its deadline and the wait for a restart, after which a rollout counts as lost."""
ATTEMPTS = 50
SAMPLE_S = 5.0
FAULTS = {
    "kill a server": 8,
    "stop a server for 2 s": 6,
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
    lost: list[str] = field(default_factory=list)
    samples: list[dict[str, float]] = field(default_factory=list)
    stacks: int = 0
    restarts: int = 0


class Policy:
    """Answers calls; one in `every` in a way that it should not."""

    def __init__(self, chance: random.Random, every: int) -> None:
        self._chance = chance
        self._every = every
        self.faults: Counter[str] = Counter()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        body = json.loads(await request.content.read())
        await asyncio.sleep(self._chance.lognormvariate(-3, 1))
        if self._chance.randrange(self._every):
            return web.json_response(responses_answer(body))
        fault = self._chance.choice(("500", "429", "reset", "garbage", "silence"))
        self.faults[fault] += 1
        if fault == "reset" and request.transport is not None:
            request.transport.abort()
        if fault == "silence":
            await asyncio.sleep(60)
        status = int(fault) if fault.isdigit() else 200
        return web.Response(status=status, text="on purpose", headers={"Retry-After": "0.1"})


class Soak:
    """Workers, a saboteur and a bookkeeper on one config."""

    def __init__(self, minutes: float, workers: int, seed: int) -> None:
        self.chance = random.Random(seed)
        self.tally = Tally()
        self.policy = Policy(self.chance, 40)
        self.workers = workers
        self.ends = time.monotonic() + minutes * 60
        self.config = StackConfig(
            environments=ENVIRONMENTS, runtime=RuntimeConfig(), max_restarts=1_000_000, start_timeout_s=120
        )
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.endpoint = HTTPEndpoint(base_url="http://127.0.0.1:1/v1")
        self.status: dict[str, Any] = {}
        self.running: set[asyncio.Task[Any]] = set()

    async def run(self) -> Tally:
        """Until the time is up, and then until every rollout under way has completed."""
        site = (await asyncio.to_thread(ensure_runtime, self.config.runtime)).site
        for name in ENVIRONMENTS:
            text = (site / "resources_servers" / name / "data" / "example.jsonl").read_text()
            self.rows[name] = [json.loads(line) for line in text.splitlines()]
        server = web.Server(self.policy.handle, handler_cancellation=True, access_log=None)
        listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0, backlog=512)
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/v1"
        self.endpoint = HTTPEndpoint(base_url=url, dialect="responses", timeout_s=5, max_retries=1)
        others = [asyncio.create_task(self.sabotage()), asyncio.create_task(self.keep_books())]
        try:
            await asyncio.gather(*(self.work(number) for number in range(self.workers)))
        finally:
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            listener.close()
            await server.shutdown(0.2)
        return self.tally

    async def work(self, number: int) -> None:
        """Complete one rollout after another, on whatever stack there is."""
        count = 0
        while time.monotonic() < self.ends:
            name = self.chance.choice(ENVIRONMENTS)
            await self.complete(name, self.chance.choice(self.rows[name]), f"{number}-{count}")
            count += 1

    async def complete(self, name: str, row: dict[str, Any], identity: str) -> None:
        """Run a row until it completes."""
        for attempt in range(ATTEMPTS):
            task = asyncio.create_task(self.attempt(name, row, f"{identity}-{attempt}"))
            self.running.add(task)
            try:
                async with asyncio.timeout(LIMITS.timeout_s + LATE_S + self.config.start_timeout_s):
                    if await task:
                        self.tally.completed[name] += 1
                        return
            except asyncio.CancelledError:
                self.tally.failures["cancelled"] += 1
            except TimeoutError:
                self.tally.lost.append(f"{identity} of {name}: no end")
                return
            except (StackLostError, StackStartError) as error:
                self.tally.failures[type(error).__name__] += 1
            except Exception as error:
                self.tally.lost.append(f"{identity} of {name}: {type(error).__name__}: {error}")
                return
            finally:
                self.running.discard(task)
        self.tally.lost.append(f"{identity} of {name}: {ATTEMPTS} attempts")

    async def attempt(self, name: str, row: dict[str, Any], identity: str) -> bool:
        async with acquire(self.config) as stack:
            rollout = await stack.run(
                row, policy=self.endpoint, environment=name, limits=LIMITS, rollout_id=identity
            )
        if rollout.error is None and rollout.reward is not None:
            return True
        kind = f"{rollout.error.kind} {rollout.error.type}" if rollout.error else "no reward, no error"
        self.tally.failures[kind] += 1
        if rollout.error is None or rollout.reward is not None:
            self.tally.lost.append(f"{identity} of {name}: {rollout.status} without an error")
        return False

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
            "kill the fork server": self.status["fork_servers"],
        }
        pid = self.chance.choice(victims.get(fault, servers) or [self.status["pid"]])
        if pid not in descendants(os.getpid()):  # it has ended meanwhile, and its number may be another's
            return
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP if fault.startswith("stop") else signal.SIGKILL)
            await asyncio.sleep(2.0)
            os.kill(pid, signal.SIGCONT)


def files_of(pid: int) -> int:
    """Open descriptors; 0 if the process is gone."""
    try:
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return 0


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
    options = parser.parse_args()
    soak = Soak(options.minutes, options.workers, options.seed)
    tally = asyncio.run(soak.run())
    print(describe())
    print(
        f"{options.minutes:g} minutes, {options.workers} at once, seed {options.seed}, {tally.stacks} stacks"
    )
    print("completed", sum(tally.completed.values()), dict(tally.completed))
    print("faults", dict(tally.faults), "in the policy", dict(soak.policy.faults))
    print("attempts that failed and were run again", dict(tally.failures))
    for name, (first, last) in growth(tally.samples).items():
        print(f"{name:15} {first:8.1f} -> {last:8.1f}")
    time.sleep(3)
    left = descendants(os.getpid())
    print("lost", len(tally.lost), tally.lost[:10], "left", left)
    raise SystemExit(bool(tally.lost or left))


if __name__ == "__main__":
    main()
