"""`gymgate run -o DIR` with real Gym servers: killed and resumed, refused, drained, sharded, and from Python."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

import gymgate
from gymgate.runs.stored.layout import FAILURES, ROLLOUTS
from gymgate.runs.stored.record import CollectedRollout, read_values
from support.json_output import read_output
from support.stacks import ROW, SIMPLE, runtime, stack_config
from support.upstream import Seen, answering, drop, upstream_in_thread

pytestmark = [pytest.mark.gym, pytest.mark.warm]
EARLIER = Path(__file__).parents[1] / "unit" / "earlier_run"
VLLM = Path(__file__).parents[1] / "socket" / "collect_vllm_program.py"


def gym_option() -> str:
    found = runtime()
    return f"{found.version}@{found.interpreter}" if found.interpreter else found.version


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "gymgate", "run", *map(str, arguments), "--gym", gym_option()]


def gymgate_run(*arguments: str | Path, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=timeout, check=False)


def identities(path: Path) -> Counter[Any]:
    return Counter(
        CollectedRollout.model_validate(value).identity for _, value in read_values(path / ROLLOUTS)
    )


def write_rows(path: Path, count: int) -> Path:
    rows = [{**ROW, "number": number} for number in range(count)]
    path.write_bytes(b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows))
    return path


def test_a_killed_command_goes_on_where_it_was(tmp_path: Path) -> None:
    arguments = (SIMPLE, "-o", tmp_path / "run", "-r", "40", "-c", "16", "--sync-every", "0")
    killed = 0
    with subprocess.Popen(command(*arguments), stderr=subprocess.DEVNULL) as process:
        log = tmp_path / "run" / ROLLOUTS
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if log.exists() and log.stat().st_size > 100_000:
                process.send_signal(signal.SIGKILL)
                killed += 1
                break
            time.sleep(0.005)
    assert killed == 1
    with log.open("ab") as file:
        file.write(b'{"row_key":"0123')
    done = gymgate_run(*arguments)
    assert done.returncode == 0, done.stderr
    assert "cut off 16 bytes" in done.stderr
    assert "resuming " in done.stderr
    found = identities(tmp_path / "run")
    assert len(found) == 200
    assert set(found.values()) == {1}
    again = gymgate_run(*arguments, "--json")
    summary = read_output("run", again.stdout)
    assert (summary["resumed"], summary["finished"]) == (200, 0)
    overall = summary["overall"]
    assert (overall["mean_reward"], overall["rollouts"], overall["scored"]) == (0.6, 200, 200)
    other = gymgate_run(*arguments[:-2], "--max-calls", "7")
    assert other.returncode == 1
    assert "(limits.max_calls: " in other.stderr
    assert len(other.stderr.splitlines()) == 2  # the first says that recorded answers are replayed


def test_a_table_over_more_than_was_asked_for_says_so(tmp_path: Path) -> None:
    for repeats, rollouts in (("2", "10 of 10"), ("1", "5 of 5"), ("2", "10 of 10")):
        done = gymgate_run(SIMPLE, "-o", tmp_path / "run", "-r", repeats)
        assert done.returncode == 0, done.stderr
        [line] = [line for line in done.stderr.splitlines() if line.startswith(f"{tmp_path / 'run'}: ")]
        assert rollouts in line
        assert ("5 older" in line) == (repeats == "1")


@pytest.mark.skipif(runtime().version != "0.7.0", reason="the earlier run is of nemo-gym 0.7.0")
def test_a_run_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    """Five rows, one of which names an unknown agent; a second repeat is added."""
    shutil.copytree(EARLIER, tmp_path, dirs_exist_ok=True)
    described = tmp_path / "run" / "run.json"
    described.write_text(described.read_text().replace("@DIRECTORY@", str(tmp_path)))
    arguments = ("rows.jsonl", "--env", SIMPLE, "--replay-file", "recordings.jsonl", "-o", "run", "-r", "2")
    done = subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path
    )
    assert done.returncode == 1, done.stderr  # the unknown agent fails again
    said = done.stderr.splitlines()
    assert said[0].startswith("policy: ")
    assert "replayed" in said[0]
    assert "4 of 10 rollouts" in done.stderr
    assert "1 failed" in done.stderr
    assert "gymgate report run" in said[-1]
    header, row, _ = done.stdout.splitlines()
    assert header.split()[:3] == ["environment", "rollouts", "failed"]
    assert row.split()[:3] == [SIMPLE, "10", "2"]
    assert row.split()[-1] == "replayed"
    found = identities(tmp_path / "run")
    assert (len(found), set(found.values())) == (8, {1})


@contextmanager
def useless_policy(*, hangs: bool) -> Iterator[str]:
    """Lists no models; calls end without an answer, at once or never."""

    async def script(seen: Seen) -> web.StreamResponse:
        if seen.request.method == "GET":
            return web.Response()
        if hangs:
            await asyncio.Event().wait()
        return await drop(seen)

    with upstream_in_thread(script) as serving:
        yield serving.url


def test_failures_are_kept_apart_and_run_again(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", 3)
    arguments = (rows, "--env", SIMPLE, "-o", tmp_path / "run", "-m", "m", "--retries", "0")
    with useless_policy(hangs=False) as url:
        first = gymgate_run(*arguments, "-b", url)
        assert first.returncode == 1, first.stderr
        assert "3 x PolicyError: " in first.stderr
        failures = [value for _, value in read_values(tmp_path / "run" / FAILURES)]
        assert {value["line"] for value in failures} == {1, 2, 3}
        assert "127.0.0.1" in failures[0]["error"]["message"]
        second = gymgate_run(*arguments, "-b", url)
        assert second.returncode == 1
        assert "3 failed permanently" in second.stderr
        assert gymgate_run(*arguments, "-b", url, "--rerun-failed").returncode == 1
        assert len(list(read_values(tmp_path / "run" / FAILURES))) == 6
    nowhere = gymgate_run(*arguments, "-b", "http://127.0.0.1:9/v1", "--rerun-failed")
    assert nowhere.returncode == 1
    assert "(http://127.0.0.1:9/v1: " in nowhere.stderr
    assert len(list(read_values(tmp_path / "run" / FAILURES))) == 6


@pytest.mark.heavy
def test_shards_make_one_run(tmp_path: Path) -> None:
    for shard in ("1/2", "2/2"):
        done = gymgate_run(SIMPLE, "-o", tmp_path / "run", "-r", "3", "--shard", shard)
        assert done.returncode == 0, done.stderr
    parts = [identities(tmp_path / "run" / f"shard-{part}-of-2") for part in (1, 2)]
    assert not set(parts[0]) & set(parts[1])
    assert len(parts[0] + parts[1]) == 15
    whole = gymgate_run(SIMPLE, "-o", tmp_path / "run", "-r", "3")
    assert whole.returncode == 1
    assert "shards" in whole.stderr


def test_a_signal_drains_it(tmp_path: Path) -> None:
    arguments = (SIMPLE, "-o", tmp_path / "run", "-r", "100", "-c", "4")
    with subprocess.Popen(command(*arguments), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        log = tmp_path / "run" / ROLLOUTS
        deadline = time.monotonic() + 60
        while not (log.exists() and log.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.005)
        process.send_signal(signal.SIGUSR1)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 75, said
    assert "SIGUSR1: " in said
    assert 1 <= len(identities(tmp_path / "run")) < 500


def test_a_signal_ends_the_wait_for_a_policy(tmp_path: Path) -> None:
    arguments = (SIMPLE, "-o", tmp_path / "run", "-b", "http://127.0.0.1:9/v1", "-m", "m")
    with subprocess.Popen(
        command(*arguments, "--wait-for-policy", "80"), stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert any("waiting for" in line for line in process.stderr)
        began = time.monotonic()
        process.send_signal(signal.SIGUSR1)
        said = process.stderr.read()
        assert process.wait(60) == 75, said
    assert time.monotonic() - began < 20


def until_written(path: Path, size: int) -> None:
    deadline = time.monotonic() + 60
    while _size(path) < size and time.monotonic() < deadline:
        time.sleep(0.005)


def test_a_killed_stack_is_started_again(tmp_path: Path) -> None:
    arguments = (SIMPLE, "-o", tmp_path / "run", "-r", "100", "-c", "8")
    with subprocess.Popen(command(*arguments), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        until_written(tmp_path / "run" / ROLLOUTS, 50_000)
        os.kill(_daemon_of(process.pid), signal.SIGKILL)
        _, said = process.communicate(timeout=90)
    assert process.returncode == 0, said
    assert "daemon" in said
    found = identities(tmp_path / "run")
    assert len(found) == 500
    assert set(found.values()) == {1}


def _daemon_of(pid: int) -> int:
    """The stack's daemon that a process started."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"gymgate.stack.daemon" in (path / "cmdline").read_bytes():
                return int(path.name)
    raise AssertionError("no daemon")


def test_a_stall_says_what_is_waited_for(tmp_path: Path) -> None:
    """An endpoint that lists its models and answers nothing else."""
    with useless_policy(hangs=True) as url:
        arguments = (SIMPLE, "-o", tmp_path / "run", "-b", url, "-m", "m", "--stall-warning", "1")
        with subprocess.Popen(command(*arguments), stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            warning = next(line for line in process.stderr if "nothing finished" in line)
            process.send_signal(signal.SIGINT)
            process.stderr.read()
            assert process.wait(30) == 130
    assert "waiting for" in warning
    assert "example.jsonl:1" in warning
    assert "2 more" in warning
    assert "5 calls to policy_model" in warning


def test_servers_that_we_start_serve_a_collection(tmp_path: Path) -> None:
    """A program in vLLM's place, twice; one is killed in the middle of it."""
    programs, notes = tmp_path / "bin", tmp_path / "notes"
    for directory in (programs, notes):
        directory.mkdir()
    (programs / "vllm").write_text(f'#!/bin/sh\nexec {sys.executable} -S {VLLM} "$@"\n')
    (programs / "vllm").chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "VLLM_NOTES": str(notes)}
    collect = [*command(SIMPLE, "-o", tmp_path / "run", "-r", "40", "-c", "8"), "-b", "{urls}"]
    serve = [
        sys.executable,
        "-m",
        "gymgate",
        "serve-policy",
        "m",
        "--replicas",
        "2",
        "--run",
        shlex.join(collect),
    ]
    with subprocess.Popen(
        serve, env={**environment, "CUDA_VISIBLE_DEVICES": "0,1"}, stderr=subprocess.PIPE, text=True
    ) as process:
        until_written(tmp_path / "run" / ROLLOUTS, 50_000)
        os.kill(int(next(notes.glob("*.json")).stem), signal.SIGKILL)
        _, said = process.communicate(timeout=90)
    assert process.returncode == 0, said
    assert "SIGKILL" in said
    found = identities(tmp_path / "run")
    assert len(found) == 200
    assert set(found.values()) == {1}


@pytest.mark.parametrize(
    ("content", "reason"),
    [("", "rows.jsonl"), ('{"question": 1}\n', "rows.jsonl:1: ")],
)
def test_a_file_without_rows_is_refused(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / "rows.jsonl").write_text(content)
    done = gymgate_run(
        tmp_path / "rows.jsonl",
        "--env",
        SIMPLE,
        "-o",
        tmp_path / "run",
    )
    assert done.returncode == 1
    assert reason in done.stderr
    assert len(done.stderr.splitlines()) == 2  # the first says that recorded answers are replayed
    assert not (tmp_path / "run").exists()


def test_rows_whose_agent_is_in_two_environments_need_one_named(tmp_path: Path) -> None:
    row = {"responses_create_params": {"input": "x"}, "agent_ref": {"name": "calendar_simple_agent"}}
    (tmp_path / "rows.jsonl").write_bytes(orjson.dumps(row) + b"\n")
    arguments = (tmp_path / "rows.jsonl", "-o", tmp_path / "run", "-m", "m")
    with upstream_in_thread(answering({"/v1/models": {"data": [{"id": "m"}]}})) as policy:
        done = gymgate_run(*arguments, "-b", policy.url)
    assert done.returncode == 1
    assert "calendar, calendar_v2" in done.stderr


async def test_rollouts_come_one_by_one_in_python(tmp_path: Path) -> None:
    wanted: dict[str, Any] = {
        "output": tmp_path / "run",
        "repeats": 4,
        "concurrency": 4,
        "runtime": runtime(),
    }
    policy = _policy
    seen = []
    async with contextlib.aclosing(gymgate.collect(SIMPLE, policy=policy, **wanted)) as rollouts:
        async for rollout in rollouts:
            seen.append(rollout.identity)
            if len(seen) == 3:
                break
    on_disk = identities(tmp_path / "run")
    assert set(seen) <= set(on_disk)
    assert len(on_disk) < 20
    whole = [rollout async for rollout in gymgate.collect(SIMPLE, policy=policy, **wanted)]
    assert len(whole) == len({rollout.identity for rollout in whole}) == 20
    assert {rollout.reward for rollout in whole} == {1.0}
    rows = [rollout async for rollout in gymgate.collect(stack_config(), [ROW], policy=policy, repeats=2)]
    assert [rollout.reward for rollout in rows] == [1.0, 1.0]


async def test_what_failed_comes_too_once_with_its_error(tmp_path: Path) -> None:
    """A policy that raises loses no rollout: now, and when the same call reads the run from its directory."""
    calls, broken = Counter[str](), asyncio.Event()
    broken.set()

    async def policy(body: dict[str, Any]) -> dict[str, Any]:
        calls["all"] += 1
        if broken.is_set():
            raise gymgate.PolicyError("weights are gone", retryable=True)
        return await _policy(body)

    async def collected(**fields: Any) -> list[CollectedRollout]:
        pace = gymgate.Pace(4, budgets={"policy": 1})
        fields |= {"limit": 2, "pace": pace, "runtime": runtime(), "output": tmp_path / "run"}
        return [rollout async for rollout in gymgate.collect(SIMPLE, policy=policy, **fields)]

    for _ in range(2):
        rollouts = await collected()
        assert calls["all"] == 4
        assert len({rollout.identity for rollout in rollouts}) == len(rollouts) == 2
        for rollout in rollouts:
            assert (rollout.status, rollout.reward, rollout.environment) == ("failed", None, SIMPLE)
            assert rollout.error is not None
            assert (rollout.error.type, rollout.attempt) == ("PolicyError", 2)
            assert "weights are gone" in rollout.error.message
    assert await collected(include_finished=False) == []
    broken.clear()
    assert [rollout.reward for rollout in await collected(rerun_failed=True)] == [1.0, 1.0]
    assert [rollout.reward for rollout in await collected()] == [1.0, 1.0]


async def _policy(body: dict[str, Any]) -> dict[str, Any]:
    """A chat policy: the weather tool first, then a text."""
    asked = any(message["role"] == "tool" for message in body["messages"])
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "sf"}'},
    }
    message = (
        {"role": "assistant", "content": "cold"}
        if asked
        else {"role": "assistant", "content": None, "tool_calls": [call]}
    )
    reason = "stop" if asked else "tool_calls"
    return {
        "id": "c",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
    }


@pytest.mark.heavy
@pytest.mark.timeout(1800)
def test_twenty_kills_change_nothing(tmp_path: Path) -> None:
    """10,000 rollouts of real servers, killed 20 times, are those of a run that was left alone; memory stays flat."""
    dice, kills = random.Random(11), 0
    arguments = (SIMPLE, "-r", "2000", "-c", "64", "-o")
    log = tmp_path / "killed" / ROLLOUTS
    started = time.monotonic()
    while kills < 20:
        before = _size(log)
        with subprocess.Popen(command(*arguments, tmp_path / "killed"), stderr=subprocess.DEVNULL) as process:
            wanted = before + dice.randrange(1, 2_000_000)
            while process.poll() is None and _size(log) < wanted:
                time.sleep(dice.uniform(0, 0.01))
            assert process.poll() is None, "it ended before it was killed"
            process.send_signal(signal.SIGKILL)
            kills += 1
    left = gymgate_run(*arguments, tmp_path / "killed", timeout=900)
    assert left.returncode == 0, left.stderr
    sizes, log = [], tmp_path / "whole" / ROLLOUTS
    with subprocess.Popen(command(*arguments, tmp_path / "whole"), stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            if _size(log) > 2_000_000 and (resident := _resident(process.pid)):
                sizes.append(resident)
            time.sleep(0.2)
    assert process.returncode == 0
    killed, whole = (_outcomes(tmp_path / name) for name in ("killed", "whole"))
    print(f"{time.monotonic() - started:.0f} s, {sizes[0]:.0f} MiB at first, {max(sizes):.0f} MiB at most")
    assert len(whole) == 10_000
    assert set(killed.values()) == {1}
    assert killed == whole
    assert max(sizes) - sizes[0] < 30


def _resident(pid: int) -> float:
    """MiB; 0 when it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
    return 0.0


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_a_thousand_at_once(tmp_path: Path) -> None:
    """With 20,000 open files allowed; with fewer, fewer at once, and said."""
    collect = command(SIMPLE, "-c", "1000", "-o", tmp_path / "run", "-r", "600")
    started = time.monotonic()
    done = subprocess.run(
        ["bash", "-c", 'ulimit -n 20000; exec "$@"', "-", *collect],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    print(f"{time.monotonic() - started:.0f} s")
    assert done.returncode == 0, done.stderr
    assert "concurrency lowered" not in done.stderr
    assert set(_outcomes(tmp_path / "run").values()) == {1}
    assert len(_outcomes(tmp_path / "run")) == 3000
    assert not list(read_values(tmp_path / "run" / FAILURES))
    collect = command(SIMPLE, "-c", "1000", "-o", tmp_path / "few", "-r", "100")
    few = subprocess.run(
        ["bash", "-c", 'ulimit -n 1256; exec "$@"', "-", *collect],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert few.returncode == 0, few.stderr
    assert "from 1000 to 397" in few.stderr
    assert len(_outcomes(tmp_path / "few")) == 500


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _outcomes(path: Path) -> Counter[Any]:
    found = (CollectedRollout.model_validate(value) for _, value in read_values(path / ROLLOUTS))
    return Counter((rollout.identity, rollout.reward) for rollout in found)
