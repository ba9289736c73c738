"""mini_swe_agent_2 on a row as SWE-bench's: commands in the row's container, which SWE-bench's scoring then runs the tests in.

The agent works in a Ray task, and its installation has SWE-bench: one stack serves all of the rollouts.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from gymgate import acquire
from gymgate.core.config import EnvironmentConfig
from gymgate.stack.client.stack import Stack
from support.sandboxes import EXAMPLE, REPAIRED, chat, containers, no_containers, stack_config

pytestmark = [
    pytest.mark.gym,
    pytest.mark.heavy,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]

IMAGE = "gymgate-test-swebench"
ROW = json.loads((EXAMPLE / "swebench" / "rows.jsonl").read_text()) | {"image_name": IMAGE}
SUBMIT = (
    "git diff -- intervals.py > patch.txt",
    "cat patch.txt",
    "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat patch.txt",
)
REPAIR = (
    "cat intervals.py",
    "python3 -m unittest -q 2>&1 | tail -3",
    f"cat > intervals.py <<'END'\n{REPAIRED}END",
    "python3 -m unittest -q && hostname",
)


@pytest.fixture(scope="module")
def image(docker: str) -> str:
    base = ["--network", "none", "--build-arg", f"BASE={docker}"]
    command = ["docker", "build", "-q", *base, "-t", IMAGE, str(EXAMPLE / "swebench")]
    made = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if made.returncode != 0:
        pytest.skip(f"no image can be made from {docker!r}: {made.stderr.strip()[-300:]}")
    return IMAGE


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(image: str) -> AsyncIterator[Stack]:
    assert image
    environment = EnvironmentConfig(
        name=str(EXAMPLE / "agents" / "mini_swe.yaml"),
        sandbox="docker",
        overrides=(("sandbox.docker.create.network", "none"),),
    )
    async with acquire(stack_config(environment)) as stack:
        yield stack


class Scripted:
    """A policy that calls `bash` with each command in turn, and keeps what the commands gave."""

    def __init__(self, *commands: str) -> None:
        self.commands = commands
        self.outputs: list[str] = []

    async def __call__(self, body: dict[str, Any]) -> dict[str, Any]:
        self.outputs = [str(message["content"]) for message in body["messages"] if message["role"] == "tool"]
        return chat(self.commands[len(self.outputs)])


async def test_rewards_are_those_of_the_tests_run_in_the_container(stack: Stack) -> None:
    repairing = Scripted(*REPAIR, *SUBMIT)
    solved = await stack.run(ROW, policy=repairing)
    given_up = await stack.run(ROW, policy=Scripted(REPAIR[0], *SUBMIT))
    assert (solved.status, solved.reward) == ("completed", 1.0), solved.error
    assert (given_up.status, given_up.reward) == ("completed", 0.0), given_up.error
    assert len(repairing.outputs) == len(REPAIR) + len(SUBMIT) - 1
    assert "FAILED (failures=3)" in repairing.outputs[1]

    missing = await stack.run(ROW | {"image_name": "gymgate-has-no-such-image"}, policy=repairing)
    assert (missing.status, missing.reward) == ("failed", None)
    assert missing.error is not None
    assert "gymgate-has-no-such-image" in missing.error.message
    assert await no_containers() is not None


async def test_a_scoring_that_did_not_run_to_its_end_is_no_score(stack: Stack) -> None:
    """A test ends the container. SWE-bench's report then names no test, and the agent gives 0."""
    patch = ROW["test_patch"].replace("merge([(1, 2), (4, 5)])", "__import__('os').kill(1, 15) or input()")
    assert patch != ROW["test_patch"]
    rollout = await stack.run(ROW | {"test_patch": patch}, policy=Scripted(*REPAIR, *SUBMIT))
    assert (rollout.status, rollout.reward) == ("failed", None)
    assert rollout.error is not None
    assert "no test" in rollout.error.message
    assert await no_containers() is not None


async def test_the_container_of_a_cancelled_rollout_goes_in_the_middle_of_a_command(stack: Stack) -> None:
    """The other rollout of the same row is in such a command too, and its container stays."""
    rollouts = [asyncio.create_task(stack.run(ROW, policy=Scripted(f"sleep 30{each}"))) for each in (1, 2)]
    cancelled, kept = await asyncio.gather(*(container_that_runs(f"sleep 30{each}") for each in (1, 2)))
    assert cancelled != kept
    rollouts[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollouts[0]
    assert await no_containers(but=[kept]) is not None
    assert await asyncio.to_thread(containers) == [kept]
    rollouts[1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollouts[1]
    assert await no_containers() is not None


async def container_that_runs(command: str) -> str:
    """The id of the container that has a process with this command; waits until there is one."""
    while True:
        for container in await asyncio.to_thread(containers):
            top = ["docker", "top", container, "-eo", "pid,args"]
            found = await asyncio.to_thread(
                subprocess.run, top, capture_output=True, text=True, timeout=30, check=False
            )
            if any(line.endswith(command) for line in found.stdout.splitlines()):
                return container
        await asyncio.sleep(0.2)
