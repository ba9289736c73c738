"""SDK processes with leases on one stack, whose daemon and connections are real and whose servers are scripted.

Five come once, and some crash; in `visits` any is killed at any time and comes back as another process.
"""

from __future__ import annotations

import asyncio
import functools
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

import simloom
from invariants import Ledger, within
from parts import (
    GymgateError,
    LeaseHolder,
    Reply,
    RolloutLimits,
    StackConfig,
    StackLostError,
    StackStartError,
    codec,
    daemon_module,
    endpoint_from_wire,
)
from universes import Scene

from scenes.daemons import Daemons
from scenes.faults import ended, happen, one_of, seconds, split

CLIENTS, ROLLOUTS = 5, 3
TIMEOUT_S = 20.0
ROW = {"responses_create_params": {"input": "hi"}}
LINGER_S = 1.0
STOPS_S = 5.0
"""For a daemon to stop its stack."""


class ScriptedStack:
    """What a daemon starts and stops."""

    up = 0
    """How many run."""

    def __init__(self, config: StackConfig, directory: Path, progress: Any) -> None:
        self.config = config
        self.progress = progress
        self.is_up = False

    async def start(self) -> None:
        self.progress("starting")
        await asyncio.sleep(seconds("start of the stack", 3.0))
        if simloom.sometimes("start fails", 10):
            raise StackStartError("no luck", log_tail="")
        self.is_up = True
        ScriptedStack.up += 1

    async def stop(self) -> None:
        await asyncio.sleep(seconds("stop of the stack", 2.0))
        ScriptedStack.up -= self.is_up
        self.is_up = False

    def describe(self) -> dict[str, Any]:
        return {"agents": {}, "names": {}, "settings": {}}

    def summary(self) -> dict[str, Any]:
        return {}


async def play(world: Any, ledger: Ledger, *, come_back: bool = False) -> None:
    loop = asyncio.get_running_loop()
    config = StackConfig(
        environments=("mcqa",), share="machine", linger_s=LINGER_S * simloom.draw("lingers", 2)
    )
    clients = [world.host(f"client{n}") for n in range(CLIENTS)]
    conversations: defaultdict[str, list[int]] = defaultdict(list)
    happened: list[str] = []
    ScriptedStack.up = 0

    async def run(holder: LeaseHolder, message: dict[str, Any], row: bytes) -> Reply:
        """Let the policy take some turns; the reward is the sum of what it said."""
        name, began = message["rollout_id"], loop.time()
        policy, said = holder._reachable(endpoint_from_wire(message["policy"])), []
        ledger.paid[name] += 1
        assert holder.daemon.running.config.environments == config.environments
        if simloom.sometimes("rollout hangs", 5):
            ledger.excuses[name] += 1
            await asyncio.Event().wait()
        for _ in range(1 + simloom.draw("turns", 3)):
            answer = await policy.call({"model": "m", "messages": [{"role": "user", "content": name}]})
            said.append(int(answer.body["choices"][0]["message"]["content"]))
            await asyncio.sleep(seconds("tool", 1.0))
        record = {
            "id": name,
            "environment": "mcqa",
            "agent": "a",
            "status": "completed",
            "reward": float(sum(said)),
        }
        timing = {"total_s": loop.time() - began, "model_s": 0.0, "judge_s": 0.0}
        return Reply(None, codec.dumps({**record, "calls": [], "requests": [], "timing": timing}))

    async def use(own: str) -> None:
        async def policy(request: dict[str, Any]) -> str:
            name = request["messages"][-1]["content"]
            ledger.reached(name.partition("/")[0], own)
            await asyncio.sleep(seconds("policy", 1.0))
            number = simloom.draw("said", 100)
            conversations[name].append(number)
            ledger.deserved[name] = float(sum(conversations[name]))
            return str(number)

        async def roll_out(number: int) -> None:
            name = f"{own}/{number}"
            ledger.asked.add(name)
            try:
                with within(TIMEOUT_S, name):
                    async with asyncio.timeout(None) as patience:
                        if simloom.sometimes("rollout given up", 15):
                            patience.reschedule(loop.time() + seconds("patience", 3.0))
                        limits = RolloutLimits(timeout_s=TIMEOUT_S)
                        rollout = await stack.run(
                            ROW, policy=policy, environment="mcqa", rollout_id=name, limits=limits
                        )
            except TimeoutError:
                ledger.excuses[name] += 1
                return ledger.ended(name, failed="given up")
            except StackLostError as error:
                ledger.excuses[name] += len(happened)
                return ledger.ended(name, failed=str(error))
            if rollout.error is not None:
                ledger.excuses[name] += len(happened)
            return ledger.ended(
                name, rollout.reward, failed=None if rollout.error is None else rollout.error.message
            )

        await asyncio.sleep(seconds("start of a client", 8.0))
        try:
            stack = await daemons.open_stack(config)
        except GymgateError as error:
            if not happened and not isinstance(error, StackStartError):
                raise
            return
        try:
            async with asyncio.TaskGroup() as rollouts:
                for number in range(ROLLOUTS):
                    rollouts.create_task(roll_out(number))
        finally:
            await stack.close()

    def crash_client() -> None:
        host = clients[0]
        if come_back:
            there = [client for client in tasks.values() if not client.crashed]
            host = one_of("which client", there)
            next_one = world.host(f"{host.name}.{len(tasks)}")
            tasks[next_one.spawn(lambda: use(next_one.name))] = next_one
        for name in [name for name in ledger.asked if str(name).startswith(f"{host.name}/")]:
            ledger.asked.discard(name)
        host.crash()

    def crash_daemon() -> None:
        if (latest := daemons.latest) is not None and not latest.host.crashed:
            happened.append("crash")
            stack: Any = latest._stack
            ScriptedStack.up -= stack is not None and stack.is_up
            latest.host.crash()

    def part() -> None:
        if (latest := daemons.latest) is not None:
            happened.append("partition")
            split(world, latest.host, clients[1], for_s=seconds("partition", 30.0))

    daemons = Daemons(world, run=run)
    with mock.patch.object(daemon_module, "RunningStack", ScriptedStack):
        tasks = {host.spawn(lambda own=host.name: use(own)): host for host in clients}
        await happen(
            {"client crash": crash_client, "daemon crash": crash_daemon, "partition": part},
            most=8 if come_back else 3,
            over_s=15.0,
        )
        await ended(tasks)
        world.net.heal()
        world.host("repairs").crash()
        with within(LINGER_S + STOPS_S, "the end of the stack after the last lease"):
            await ended(daemons.serving)
    ledger.left |= {
        "stacks": lambda: ScriptedStack.up,
        "leases": lambda: daemons.leases,
    }


FAULTS = ("start fails", "rollout hangs", "rollout given up", "client crash", "daemon crash", "partition")
SCENE = Scene(
    "leases",
    play,
    FAULTS,
    deadline_s=300,
    # A daemon stopped by a caller that never said hello kept the timer that waits for one; simloom itself (`seams`).
    seeds=(300750, 500155),
)
VISITS = Scene("visits", functools.partial(play, come_back=True), (*FAULTS, "came too late"), deadline_s=400)
