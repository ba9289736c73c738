"""A stack whose servers die in start, in a call, in scoring, and at any other time, while rollouts run on it."""

from __future__ import annotations

import asyncio
import signal
from types import SimpleNamespace
from typing import Any

import simloom
from invariants import Ledger, Violation, within
from parts import (
    GymgateError,
    HTTPEndpoint,
    LeaseHolder,
    RolloutLimits,
    codec,
    endpoint_to_wire,
    unpack_rollout,
)
from universes import Scene

from scenes.faults import happen, one_of, seconds
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

ROLLOUTS = 5
TIMEOUT_S = 30.0
PROCESSES = 2
"""Of the agent with a process for each rollout."""
MOST_RESTARTS = 3
WINDOW_S = 60.0
STOPS_S = 4.0


async def play(world: Any, ledger: Ledger) -> None:
    loop = asyncio.get_running_loop()
    odds = Odds(
        dies_in_start=one_of("dying starts", [0, 10, 25]), dies_in_a_call=4, dies_in_scoring=8, fails=3
    )
    processes = Processes(world, ledger, odds)
    policy = world.host("policy")
    policy.spawn(lambda: serve("policy", POLICY_PORT, Policy("rollout", ledger).answer))
    config = config_of(
        agent_processes=PROCESSES,
        max_restarts=MOST_RESTARTS,
        restart_window_s=WINDOW_S,
        start_timeout_s=20.0,
    )

    async def roll_out(holder: LeaseHolder, number: int) -> None:
        name = f"rollout/{number}"
        await asyncio.sleep(seconds("start of a rollout", 12.0))
        began = loop.time()
        ledger.asked.add(name)
        with within(TIMEOUT_S, name):
            rollout = await run_one(holder, name, one_of("agent", [BY_URL, BY_URL, BY_PROCESS]))
        if rollout.error is None:
            simloom.reached("scored")
        else:
            # Those that wait for a restart end with the reason that it failed for, or at their deadline.
            is_down = stack.environments[ENVIRONMENT].state != "up" or loop.time() - began >= TIMEOUT_S
            ledger.excuses[name] += processes.deaths_since(began) + is_down
        ledger.ended(name, rollout.reward, failed=None if rollout.error is None else rollout.error.message)

    async def run_all() -> None:
        try:
            await stack.start()
        except GymgateError:
            if not processes.deaths:
                raise
            simloom.reached("does not start")
            return
        holder = LeaseHolder(SimpleNamespace(running=stack))  # type: ignore[arg-type]
        async with asyncio.TaskGroup() as rollouts:
            for number in range(ROLLOUTS):
                rollouts.create_task(roll_out(holder, number))
        await faults
        processes.odds = Odds()
        await check_that_all_serve(holder)

    async def check_that_all_serve(holder: LeaseHolder) -> None:
        """Once no server dies any more, each agent runs a rollout, unless the environment has died too often."""
        environment = stack.environments[ENVIRONMENT]
        await asyncio.sleep(WINDOW_S)
        if environment.state == "down":
            if len(processes.deaths) <= MOST_RESTARTS:
                raise Violation(f"the environment is down after {len(processes.deaths)} deaths of servers")
            simloom.reached("is down")
            return
        for number, agent in enumerate((BY_URL, BY_PROCESS, BY_PROCESS)):
            rollout = await run_one(holder, f"rollout/after all {number}", agent)
            if rollout.error is not None:
                raise Violation(f"all servers are up, and {agent} fails: {rollout.error.message}")
        left = {
            "routes": len(stack.gateway.routes),
            "calls": sum(stack.gateway.in_flight.values()),
            "places in the queue": places - stack.unheard._value,
            "rollouts on servers": len(environment._servers.rollouts) + environment._rollouts.total(),
            "processes that are held": PROCESSES - environment.agent_processes[BY_PROCESS]._free._value,
        }
        await asyncio.sleep(1.0)  # for the last process to settle
        left["processes that are held"] = PROCESSES - environment.agent_processes[BY_PROCESS]._free._value
        if any(left.values()):
            raise Violation(f"left: {left}")

    def kill_one() -> None:
        if processes.running:
            child = one_of("which server", sorted(processes.running, key=lambda child: child.pid))
            processes.die(child, "server killed", -signal.SIGKILL)

    with machine(world) as logs:
        stack_host = world.host("daemon")
        SimulatedStack.processes = processes
        stack = SimulatedStack(config, logs, lambda _: None)
        places = stack.unheard._value
        faults = asyncio.create_task(happen({"a server is to be killed": kill_one}, most=3, over_s=15.0))
        running = stack_host.spawn(run_all)
        await asyncio.wait([running])
        with within(STOPS_S, "the end of the stack"):
            await stack_host.spawn(stack.stop)
        await faults
        running.result()
    ledger.left["servers"] = lambda: len(processes.running)
    policy.crash()


async def run_one(holder: LeaseHolder, name: str, agent: str) -> Any:
    """Run a rollout of a lease, and return its record."""
    endpoint = HTTPEndpoint(base_url=f"http://policy:{POLICY_PORT}/v1", model="m")
    message = {
        "environment": ENVIRONMENT,
        "agent": agent,
        "policy": endpoint_to_wire(endpoint),
        "rollout_id": name,
        "limits": RolloutLimits(timeout_s=TIMEOUT_S).model_dump(),
        "record_bodies": False,
    }
    return unpack_rollout(await holder.run(message, codec.dumps(row_of(name))))


SCENE = Scene(
    "restarts",
    play,
    (
        *("died in start", "died in a call", "died in scoring", "server fails", "server killed", "scored"),
        *("does not start", "is down"),
    ),
    deadline_s=400,
    share=0.5,
)
