"""Checks in processes of their own: an error of who is told of them, and signals that reach nobody else."""

from __future__ import annotations

import asyncio
import os
import subprocess
from typing import Any

import pytest

from gymgate.core.config import HTTPEndpoint
from gymgate.core.errors import DataError
from gymgate.quality import CheckRequest, parallel
from gymgate.quality.parallel import request_to_wire
from gymgate.quality.record.failure_cases import _Stopping


async def test_an_error_of_done_is_raised_as_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a disk that is full when the record is written."""

    async def check(request: CheckRequest, progress: Any) -> Any:
        return None

    def done(request: CheckRequest, outcome: Any) -> None:
        raise DataError("cannot write r.json: No space left on device", path="r.json")

    monkeypatch.setattr(parallel, "check_in_process", check)
    requests = [CheckRequest.model_validate({"environments": name}) for name in ("a", "b")]
    with pytest.raises(DataError, match=r"r\.json"):
        await parallel.check_all(requests, done=done)


async def test_a_check_that_hangs_says_that_it_goes_on_and_when_it_gives_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parallel, "module_command", lambda name: ("sleep", "600"))
    monkeypatch.setattr(parallel, "ALIVE_S", 0.01)
    request = CheckRequest.model_validate({"environments": "mcqa", "limits": {"timeout_s": 77}})
    told = asyncio.Queue[str]()
    check = asyncio.create_task(
        parallel.check_in_process(request, lambda _, message: told.put_nowait(message))
    )
    assert "77 s for a rollout" in await asyncio.wait_for(told.get(), 20)
    await asyncio.wait_for(told.get(), 20)
    check.cancel()
    await asyncio.gather(check, return_exceptions=True)


async def test_what_a_check_started_is_killed_by_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number may be another process's by then."""
    process = await asyncio.create_subprocess_exec(
        "sh", "-c", "sleep 600 & echo $!; wait", stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    below = int(await process.stdout.readline())
    descriptor = os.pidfd_open(below)
    kill = os.kill
    monkeypatch.setattr(os, "kill", lambda pid, number: kill(pid, number) if pid == process.pid else 1 / 0)
    await parallel._kill(process)
    asyncio.get_running_loop().add_reader(descriptor, (ended := asyncio.Event()).set)
    await asyncio.wait_for(ended.wait(), 20)
    asyncio.get_running_loop().remove_reader(descriptor)
    os.close(descriptor)


def test_servers_are_stopped_by_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """One has ended since its number was read."""
    sleeping = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    try:

        async def call_tool(request: dict[str, Any]) -> dict[str, Any]:
            return {"output": [{"type": "function_call"}]}

        with _Stopping(call_tool, [process.pid for process in sleeping]) as stopping:
            sleeping[0].kill()
            sleeping[0].wait()
            monkeypatch.setattr(os, "kill", None)
            asyncio.run(stopping({}))
            assert os.waitid(os.P_PID, sleeping[1].pid, os.WSTOPPED)
        assert os.waitid(os.P_PID, sleeping[1].pid, os.WCONTINUED)
    finally:
        monkeypatch.undo()
        for process in sleeping:
            process.kill()
            process.wait()


def test_a_request_crosses_whole_with_its_secrets() -> None:
    """And its settings stay the same, by which a record is known to be of this request."""
    model = HTTPEndpoint(
        base_url="http://h/v1", api_key="k", api_key_env="K", headers={"X": "x"}, sampling={"top_p": 1}
    )
    judges = {"a": HTTPEndpoint(base_url="http://j/v1", api_key_env="J", headers={"Y": "y"}), "b": "policy"}
    stack = {"environments": ("mcqa",), "models": judges}
    request = CheckRequest.model_validate({"stack": stack, "policy": model, "limits": {"timeout_s": 3600}})
    assert "**" in request.model_dump_json()
    read = CheckRequest.model_validate_json(request_to_wire(request))
    assert read == request
    assert read.settings == request.settings
