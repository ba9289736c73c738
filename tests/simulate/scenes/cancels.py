"""Clients and rollouts that are cancelled at any of their awaits, or whose deadline comes at any time, among others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any
from unittest import mock

import simloom
from invariants import Ledger, within
from parts import HTTPEndpoint, LeaseHolder, RolloutLimits, Stack, daemon_module
from universes import Scene

from scenes.daemons import Daemons
from scenes.faults import ended, one_of, seconds
from scenes.gym import (
    BY_PROCESS,
    BY_URL,
    POLICY_PORT,
    Odds,
    Policy,
    Processes,
    SimulatedStack,
    config_of,
    machine,
    row_of,
)
from scenes.speech import question_in
from scenes.web import serve

CLIENTS, ROLLOUTS = 3, 3
TIMEOUT_S = 60.0
STOPS_S = 6.0
UNNOTICED_S = 0.5
"""For the end of a rollout to reach its agent."""
AWAITS = {"of a client": 5, "of a rollout": 4, "of a rollout in the daemon": 14, "of the start": 40}
"""About as many as each has."""


class Counted:
    """A coroutine that calls `act` in the loop's turn after its await number `at`."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], at: int, act: Callable[[], object]) -> None:
        self._coroutine = coroutine
        self._at = at
        self._act = act

    def __await__(self) -> Generator[Any, Any, Any]:
        awaits, send, error = 0, self._coroutine.send, None
        while True:
            try:
                awaited = send(None) if error is None else self._coroutine.throw(error)
            except StopIteration as end:
                return end.value
            awaits += 1
            if awaits == self._at:
                asyncio.get_running_loop().call_soon(self._act)
            error = None
            try:
                yield awaited
            except BaseException as raised:
                error = raised


async def until_cancelled(coroutine: Coroutine[Any, Any, Any], *, await_: str | None) -> bool:
    """Run a coroutine that is cancelled at one of its awaits, or from elsewhere if `await_` is `None`; return whether it was."""
    task = current_task()
    try:
        await (coroutine if await_ is None else Counted(coroutine, drawn(await_), task.cancel))
    except asyncio.CancelledError:
        task.uncancel()
        return True
    return bool(task.cancelling()) and not task.uncancel()


def drawn(await_: str) -> int:
    return 1 + simloom.draw(f"await {await_}", AWAITS[await_])


def current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


async def play(world: Any, ledger: Ledger) -> None:
    loop = asyncio.get_running_loop()
    config = config_of(agent_processes=2, share="machine", linger_s=float(simloom.draw("lingers", 2)))
    over: dict[str, float] = {}
    """When a rollout ended for its caller."""
    machines: list[Processes] = []
    leaving: dict[str, asyncio.Task[Any]] = {}
    """Rollouts that are cancelled when they are at an await in the daemon, and clients that leave while a stack starts."""

    class Machine(SimulatedStack):
        def __init__(self, *args: Any) -> None:
            self.processes = Processes(world, ledger, Odds())
            machines.append(self.processes)
            super().__init__(*args)

        async def start(self) -> None:
            await Counted(super().start(), drawn("of the start"), leave)

    def leave() -> None:
        for name in [name for name in leaving if "/" not in name]:
            simloom.reached("client leaves during the start")
            leaving.pop(name).cancel()

    async def run_in_daemon(holder: LeaseHolder, message: dict[str, Any], row: bytes) -> Any:
        name = message["rollout_id"]

        def give_up() -> None:
            if name in leaving:
                leaving.pop(name).cancel()

        if name not in leaving:
            return await holder.run(message, row)
        return await Counted(holder.run(message, row), drawn("of a rollout in the daemon"), give_up)

    class Watched(Policy):
        async def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
            name = question_in(body, "chat").rpartition("/")[0]
            if loop.time() > over.get(name, loop.time()) + UNNOTICED_S:
                ledger.wrong.append(f"{name} went on after its end")
            return await super().answer(path, body)

    async def run(stack: Stack, name: str, timeout_s: float) -> None:
        ledger.asked.add(name)
        own = name.partition("/")[0]
        try:
            with within(timeout_s, name):
                rollout = await stack.run(
                    row_of(name),
                    policy=HTTPEndpoint(base_url=f"http://{own}-policy:{POLICY_PORT}/v1", model="m"),
                    agent=one_of("agent", [BY_URL, BY_URL, BY_PROCESS]),
                    rollout_id=name,
                    limits=RolloutLimits(timeout_s=timeout_s),
                )
        except asyncio.CancelledError:
            ledger.excuses[name] += 1
            ledger.ended(name, failed="cancelled")
            raise
        finally:
            over[name] = loop.time()
        if rollout.error is None:
            simloom.reached("scored")
        else:
            ledger.excuses[name] += rollout.error.kind == "timeout" and timeout_s < TIMEOUT_S
        ledger.ended(name, rollout.reward, failed=None if rollout.error is None else rollout.error.message)

    async def roll_out(stack: Stack, name: str) -> None:
        await asyncio.sleep(seconds("start of a rollout", 2.0))
        if simloom.sometimes("deadline", 25):
            await run(stack, name, 0.01 + seconds("timeout", 8.0))
        elif simloom.sometimes("rollout to be cancelled", 60):
            await_ = one_of("await of", [None, None, None, "of a rollout"])
            if await_ is None:
                leaving[name] = current_task()
            if await until_cancelled(run(stack, name, TIMEOUT_S), await_=await_):
                simloom.reached(f"rollout cancelled at an await {await_ or 'of a rollout in the daemon'}")
            leaving.pop(name, None)
        else:
            await run(stack, name, TIMEOUT_S)

    async def use(own: str) -> None:
        stack = await daemons.open_stack(config)
        try:
            async with asyncio.TaskGroup() as rollouts:
                for number in range(ROLLOUTS):
                    rollouts.create_task(roll_out(stack, f"{own}/{number}"))
        finally:
            await stack.close()

    async def come(own: str) -> None:
        await asyncio.sleep(seconds("start of a client", 3.0))
        if simloom.sometimes("client to be cancelled", 60):
            await_ = one_of("await of", [None, None, "of a client"])
            if await_ is None:
                leaving[own] = current_task()
            if await until_cancelled(use(own), await_=await_):
                simloom.reached("client cancelled")
            leaving.pop(own, None)
        else:
            await use(own)

    with machine(world) as logs, mock.patch.object(daemon_module, "RunningStack", Machine):
        daemons, tasks = Daemons(world, logs, run_in_daemon), dict[asyncio.Task[Any], Any]()
        policies = []
        for number in range(CLIENTS):
            own = f"client{number}"
            policy, client = world.host(f"{own}-policy"), world.host(own)
            policies.append(policy)
            policy.spawn(
                lambda policy=policy, own=own: serve(policy.name, POLICY_PORT, Watched(own, ledger).answer)
            )
            tasks[client.spawn(lambda own=own: come(own))] = client
        await ended(tasks)
        # Where each client was cancelled before it connected, the daemon waits for a first one.
        unasked = any(daemon._start is None and not daemon.is_retired for daemon in daemons.all)
        stops_s = daemon_module.HELLO_TIMEOUT_S if unasked else config.linger_s + STOPS_S
        with within(stops_s, "the end of the stack after the last lease"):
            await ended(daemons.serving)
    ledger.left |= {
        "servers": lambda: sum(len(each.running) for each in machines),
        "leases": lambda: daemons.leases,
        "routes": lambda: sum(len(daemon._stack.gateway.routes) for daemon in daemons.all if daemon._stack),
    }
    for policy in policies:
        policy.crash()


SCENE = Scene(
    "cancels",
    play,
    (
        *("deadline", "client cancelled", "client leaves during the start", "scored"),
        "rollout cancelled at an await of a rollout",
        "rollout cancelled at an await of a rollout in the daemon",
    ),
    deadline_s=400,
    share=0.5,
    seeds=(
        600241,  # a rollout cancelled twice while its agent's process started gave that on before its server was gone
        21114,  # nobody connected to the daemon that a cancelled client had started
    ),
)
