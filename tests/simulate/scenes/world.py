"""One whole world: clients that come, are killed and come back; a daemon that crashes; agent and resources servers that die.

Client, RPC, daemon, gateway, restarts and rollouts are gymgate's. Servers and policies are small programs that speak HTTP.
"""

from __future__ import annotations

import asyncio
import signal
from typing import Any
from unittest import mock

import simloom
from invariants import Ledger, within
from parts import (
    GymgateError,
    HTTPEndpoint,
    RolloutLimits,
    Stack,
    StackLostError,
    StackStartError,
    daemon_module,
)
from universes import Scene

from scenes.daemons import Daemons
from scenes.faults import ended, happen, one_of, seconds
from scenes.gym import (
    BY_PROCESS,
    BY_URL,
    ENVIRONMENT,
    POLICY_PORT,
    Odds,
    Policy,
    Processes,
    SimulatedStack,
    config_of,
    machine,
    row_of,
)
from scenes.web import serve

CLIENTS, ROLLOUTS = 3, 3
TIMEOUT_S = 25.0
STOPS_S = 6.0
LINGER_S = 1.0


async def play(world: Any, ledger: Ledger) -> None:
    loop = asyncio.get_running_loop()
    config = config_of(
        agent_processes=2,
        share="machine",
        linger_s=LINGER_S * simloom.draw("lingers", 2),
        restart_window_s=60.0,
        start_timeout_s=20.0,
    )
    odds = Odds(dies_in_start=2, dies_in_a_call=2, dies_in_scoring=3, fails=3)
    machines: list[Processes] = []
    """Of each stack that a daemon started."""
    losses: list[float] = []
    """When daemons crashed."""
    tasks: dict[asyncio.Task[Any], Any] = {}

    class Machine(SimulatedStack):
        def __init__(self, *args: Any) -> None:
            self.processes = Processes(world, ledger, odds)
            machines.append(self.processes)
            super().__init__(*args)

    def deaths_since(began: float) -> int:
        return len([when for when in losses if when >= began]) + sum(
            each.deaths_since(began) for each in machines
        )

    async def roll_out(stack: Stack, own: str, number: int) -> None:
        name = f"{own}/{number}"
        await asyncio.sleep(seconds("start of a rollout", 4.0))
        ledger.asked.add(name)
        began = loop.time()
        is_function = simloom.sometimes("policy is a function", 40)
        endpoint = HTTPEndpoint(base_url=f"http://{own}-policy:{POLICY_PORT}/v1", model="m")
        try:
            with within(TIMEOUT_S, name):
                async with asyncio.timeout(None) as patience:
                    if simloom.sometimes("rollout given up", 10):
                        patience.reschedule(began + seconds("patience", 8.0))
                    rollout = await stack.run(
                        row_of(name),
                        policy=functions[own] if is_function else endpoint,
                        agent=one_of("agent", [BY_URL, BY_URL, BY_PROCESS]),
                        rollout_id=name,
                        limits=RolloutLimits(timeout_s=TIMEOUT_S),
                    )
        except TimeoutError:
            ledger.excuses[name] += 1
            return ledger.ended(name, failed="given up")
        except (StackLostError, StackStartError) as error:  # the latter of one that is to replace a lost one
            ledger.excuses[name] += len(losses)
            return ledger.ended(name, failed=str(error))
        if rollout.error is None:
            simloom.reached("scored")
        else:
            is_down = loop.time() - began >= TIMEOUT_S or any(
                stack.environments[ENVIRONMENT].state != "up" for stack in stacks() if stack.environments
            )
            ledger.excuses[name] += deaths_since(began) + is_down
        return ledger.ended(
            name, rollout.reward, failed=None if rollout.error is None else rollout.error.message
        )

    def stacks() -> list[Any]:
        return [daemon._stack for daemon in daemons.all if daemon._stack is not None]

    functions: dict[str, Any] = {}

    def speak(own: str) -> Any:
        policy = Policy(own, ledger)

        async def answer(request: dict[str, Any]) -> str:
            _, said = await policy.answer("", request)
            return str(said["choices"][0]["message"]["content"])

        functions[own] = answer
        return policy.answer

    async def use(own: str) -> None:
        await asyncio.sleep(seconds("start of a client", 6.0))
        try:
            stack = await daemons.open_stack(config)
        except GymgateError as error:
            if not (losses or isinstance(error, StackStartError)):
                raise
            return
        try:
            async with asyncio.TaskGroup() as rollouts:
                for number in range(ROLLOUTS):
                    rollouts.create_task(roll_out(stack, own, number))
        finally:
            await stack.close()

    def come(own: str) -> None:
        policy, client = world.host(f"{own}-policy"), world.host(own)
        answer = speak(own)
        policy.spawn(lambda: serve(policy.name, POLICY_PORT, answer))
        tasks[client.spawn(lambda: use(own))] = client

    def crash_client() -> None:
        alive = [host for task, host in tasks.items() if not task.done() and not host.crashed]
        if alive and len(tasks) < 2 * CLIENTS:
            host = one_of("which client", alive)
            for name in [name for name in ledger.asked if str(name).startswith(f"{host.name}/")]:
                ledger.asked.discard(name)
            host.crash()
            simloom.reached("client comes back")
            come(f"{host.name}.{len(tasks)}")

    def crash_daemon() -> None:
        if (latest := daemons.latest) is not None and not latest.host.crashed:
            losses.append(loop.time())
            if machines:
                machines[-1].crash()
            latest.host.crash()

    def kill_server() -> None:
        if machines and machines[-1].running:
            child = one_of("which server", sorted(machines[-1].running, key=lambda child: child.pid))
            machines[-1].die(child, "server killed", -signal.SIGKILL)

    with machine(world) as logs, mock.patch.object(daemon_module, "RunningStack", Machine):
        daemons = Daemons(world, logs)
        for number in range(CLIENTS):
            come(f"client{number}")
        await happen(
            {
                "a client is to be killed": crash_client,
                "daemon crash": crash_daemon,
                "a server is to be killed": kill_server,
            },
            most=3,
            over_s=15.0,
        )
        await ended(tasks)
        with within(LINGER_S + STOPS_S, "the end of the stack after the last lease"):
            await ended(daemons.serving)
    ledger.left |= {
        "servers": lambda: sum(len(each.running) for each in machines),
        "leases": lambda: daemons.leases,
        "routes": lambda: sum(
            len(daemon._stack.gateway.routes)
            for daemon in daemons.all
            if daemon._stack is not None and not daemon.host.crashed
        ),
    }
    for host in world.hosts:
        if host.name.endswith("-policy"):
            host.crash()


SCENE = Scene(
    "world",
    play,
    (
        *("client comes back", "daemon crash", "server killed", "died in start", "died in a call"),
        *("died in scoring", "server fails", "rollout given up", "scored", "policy is a function"),
    ),
    deadline_s=400,
    share=0.25,
)
