"""What is told of a server that died or was killed, and what its death leaves to others."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gymgate.stack.daemon.children import Child, reason_in, until_listening
from gymgate.stack.daemon.running_environment import RunningEnvironment

PYDANTIC = """Traceback (most recent call last):
  File "app.py", line 1, in <module>
    Server.run_webserver()
pydantic_core._pydantic_core.ValidationError: 1 validation error for HaystackAgentConfig
pipeline_yaml
  Field required [type=missing, input_value={}, input_type=dict]
    For further information visit https://errors.pydantic.dev/2.14/v/missing
"""


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (
            PYDANTIC,
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for HaystackAgentConfig pipeline_yaml "
            "Field required [type=missing, input_value={}, input_type=dict]",
        ),
        ("ValueError: first\n  File x\nRuntimeError: no such luck\n", "RuntimeError: no such luck"),
        (
            'Traceback (most recent call last):\n  File "run.py", line 3, in <module>\n  File "/own/app.py", line 7\n'
            "    def f(:\n          ^\nSyntaxError: invalid syntax\n",
            "/own/app.py:7: SyntaxError: invalid syntax",
        ),
        ("starting\n\nsegmentation fault\n", "segmentation fault"),
        ("", ""),
    ],
    ids=["pydantic", "the last of two", "syntax", "no exception", "nothing"],
)
def test_reason(log: str, reason: str) -> None:
    assert reason_in(log) == reason


class Kills:
    """Takes the place of a fork server."""

    def kill(self, child: Child, number: int) -> None:
        """Nothing runs."""


async def child(log: Path) -> Child:
    kills: Any = Kills()
    return Child("s", 1, log, asyncio.get_running_loop().create_future(), kills)


async def test_the_first_reason_for_which_a_server_was_killed_stays(tmp_path: Path) -> None:
    """After it was found hung, the others of its environment are ended, and it once more."""
    server = await child(tmp_path / "log")
    for reason in ("hung", None, "stopped"):
        server.kill(reason=reason)
    assert server.exit_reason == "hung"


async def test_a_server_that_listens_is_not_the_one_that_is_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def listens(pid: int, port: int) -> bool:
        return port == 1

    monkeypatch.setattr("gymgate.stack.daemon.children.listens", listens)
    up, late = await child(tmp_path / "up"), await child(tmp_path / "late")
    await until_listening(up, 1, "e")
    assert (up.listens, late.listens) == (True, False)


def test_rollouts_go_to_the_worker_that_is_least_busy() -> None:
    """One whose rollouts have ended is as idle as one that had none."""
    environment = object.__new__(RunningEnvironment)
    held: Any = [SimpleNamespace(number=number) for number in (1, 2)]
    environment._ports, environment._rollouts = {"a": held}, Counter()
    with environment.server_port("a") as first, environment.server_port("a") as second:
        assert (first, second) == (1, 2)
    for _ in range(2):
        with environment.server_port("a") as port:
            assert port == 1


def test_what_nemo_gym_says_of_the_open_files_is_no_agents_last_word(tmp_path: Path) -> None:
    environment: Any = RunningEnvironment.__new__(RunningEnvironment)
    environment.spec, environment._plan, environment._logs = SimpleNamespace(), None, tmp_path
    environment.spec.scores_without_policy = False
    said = "Found ulimit of %s and failed to automatically increase with error %s. Consider 1024"
    for log, reason in ((said, "no error"), (f"{said}\nValueError: it failed\n{said}", "it failed")):
        (tmp_path / "solver.log").write_text(log)
        error = environment.never_asked_error("solver", {"status": "completed"}, [])
        assert reason in error.message
        assert "Found" not in error.message
