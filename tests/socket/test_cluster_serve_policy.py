"""`gymgate serve-policy` with real processes; a small server answers in vLLM's place."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gymgate.cluster import supervisor
from gymgate.cluster.servers import Server
from gymgate.cluster.supervisor import ChildProcess, supervise
from gymgate.core.files import tail

PROGRAM = Path(__file__).with_name("collect_vllm_program.py")
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts the server on PATH as `vllm`; the directory of its notes."""
    programs, notes = tmp_path / "bin", tmp_path / "notes"
    for directory in (programs, notes):
        directory.mkdir()
    (programs / "vllm").write_text(f'#!/bin/sh\nexec {sys.executable} -S {PROGRAM} "$@"\n')
    (programs / "vllm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("VLLM_NOTES", str(notes))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    return notes


def argv(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "gymgate", "serve-policy", *map(str, arguments)]


def said(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv(*arguments), capture_output=True, text=True, timeout=50, check=False)


@contextmanager
def serving(*arguments: str | Path) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Running, and its addresses."""
    process = subprocess.Popen(argv(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        assert line, process.communicate()
        yield process, line.split(",")
    finally:
        process.terminate()
        process.communicate(timeout=30)


def notes(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in directory.glob("*.json")]


def pid_at(url: str) -> int:
    with urllib.request.urlopen(f"{url}/models", timeout=10) as answer:
        return int(json.load(answer)["pid"])


def until_gone(pid: int) -> None:
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and "Z" not in _state(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.02)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_replicas_have_addresses_and_gpus_of_their_own(vllm: Path) -> None:
    with serving("m", "--replicas", "2", "--tensor-parallel", "2", "--", "--max-model-len", "64") as (
        process,
        urls,
    ):
        assert len({pid_at(url) for url in urls}) == 2
        found = sorted(notes(vllm), key=lambda note: note["gpus"])
    assert [note["gpus"] for note in found] == ["4,5", "6,7"]
    for note in found:
        assert note["argv"][:3] == ["serve", "m", "--host"]
        assert note["argv"][-4:] == ["--tensor-parallel-size", "2", "--max-model-len", "64"]
        until_gone(note["pid"])
    assert process.returncode == 130


def test_data_parallel_is_vllms_own(vllm: Path) -> None:
    with serving("m", "--data-parallel", "4") as (_, urls):
        [note] = notes(vllm)
    assert len(urls) == 1
    assert note["argv"][-2:] == ["--data-parallel-size", "4"]
    assert note["gpus"] == "4,5,6,7"


def test_a_server_that_dies_is_started_again_and_not_for_ever(vllm: Path) -> None:
    with serving("m", "--restarts", "1") as (process, [url]):
        first = pid_at(url)
        os.kill(first, signal.SIGKILL)
        second = _other_than(first, url)
        os.kill(second, signal.SIGKILL)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert re.search(r"server-1 .*SIGKILL.*\(1 of 1\)", err)
    assert re.search("gymgate: server-1 .*SIGKILL.* 1 restarts", err)


def _other_than(pid: int, url: str) -> int:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            if (found := pid_at(url)) != pid:
                return found
        except OSError:
            time.sleep(0.05)
    raise AssertionError("it did not come back")


def test_a_server_that_does_not_start_is_not_tried_again(vllm: Path) -> None:
    done = said("broken", "--start-timeout", "20")
    assert done.returncode == 1
    assert re.search("gymgate: server-1 .*code 1 .*: ValueError: no such model: broken", done.stderr)
    assert len(notes(vllm)) == 1


def test_waiting_has_an_end(vllm: Path) -> None:
    done = said("slow", "--start-timeout", "1")
    assert done.returncode == 1
    assert re.search(r"gymgate: .* 1 s .*server-1 \(http://127\.0\.0\.1:", done.stderr)
    until_gone(notes(vllm)[0]["pid"])


def test_a_drain_before_the_servers_answer_leaves_all_of_it_for_later(vllm: Path) -> None:
    with subprocess.Popen(argv("slow", "--run", "echo {urls}"), stdout=subprocess.PIPE) as process:
        deadline = time.monotonic() + 30
        while not notes(vllm):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGUSR1)
        out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (75, b"")


def test_a_command_runs_with_the_addresses_and_ends_it(vllm: Path) -> None:
    script = f"{sys.executable} -c \"import os, sys; print(sys.argv[1], os.environ['GYMGATE_POLICY_URLS']); sys.exit(7)\""
    done = said("m", "--replicas", "2", "--run", f"{script} {{urls}}")
    assert done.returncode == 7
    given, in_environment = done.stdout.split()
    assert given == in_environment
    assert len(given.split(",")) == 2
    for note in notes(vllm):
        until_gone(note["pid"])


def test_a_command_gets_signals_and_is_ended_when_servers_fail(vllm: Path, tmp_path: Path) -> None:
    script = "trap 'exit 75' USR1; trap 'exit 9' TERM; echo up; while :; do sleep 0.05; done"
    (tmp_path / "run.sh").write_text(script)
    run = ("m", "--restarts", "0", "--run", f"bash {tmp_path / 'run.sh'}")
    with serving(*run) as (process, _):
        process.send_signal(signal.SIGUSR1)
        process.communicate(timeout=30)
    assert process.returncode == 75
    for note in notes(vllm):
        (vllm / f"{note['pid']}.json").unlink()
    with serving(*run) as (process, _):
        os.kill(notes(vllm)[0]["pid"], signal.SIGKILL)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert re.search("server-1 .*SIGKILL.* 0 restarts", err)


def test_a_killed_supervisor_leaves_nothing(vllm: Path) -> None:
    with serving("m") as (process, _):
        process.kill()
        process.wait()
    until_gone(notes(vllm)[0]["pid"])


def test_another_server_and_a_sandbox(vllm: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sandbox = f"{sys.executable} -m http.server {port} --bind 127.0.0.1 --directory {tmp_path}"
    script = "echo $GYMGATE_POLICY_URLS $NEMO_SKILLS_SANDBOX_HOST $NEMO_SKILLS_SANDBOX_PORT"
    beside = (
        "--sandbox-command",
        sandbox,
        "--sandbox-url",
        f"http://127.0.0.1:{port}/",
        "--run",
        f"sh -c '{script}'",
    )
    done = said("--command", "vllm serve m --host {host} --port {port}", *beside)
    assert done.returncode == 0, done.stderr
    url, *place = done.stdout.split()
    assert url.startswith("http://127.0.0.1:")
    assert place == ["127.0.0.1", str(port)]
    alone = said(*beside)
    assert alone.stdout.split() == ["127.0.0.1", str(port)]


def test_what_a_server_started_ends_with_it(tmp_path: Path) -> None:
    """Workers hold the GPU; this one is left behind by a server that ends at once when it is told to."""

    async def started_and_stopped() -> int:
        with (tmp_path / "log").open("w+b") as log:
            process = ChildProcess(["/bin/sh", "-c", "sleep 1000 & echo $!; exec sleep 1000"], {}, log)
            await process.start()
            while not (worker := tail(tmp_path / "log")):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await process.stop(20.0)
            return int(worker)

    until_gone(asyncio.run(started_and_stopped()))


def test_a_port_that_is_taken_is_named(vllm: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = said("m", "--port", str(port))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"gymgate: port {port} ")
    assert line.endswith("--port")


def test_no_vllm_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = said("m")
    assert done.returncode == 1
    assert "gymgate: server-1: cannot run 'vllm': No such file or directory" in done.stderr


async def test_a_restart_counts_only_for_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that dies once a month is kept up; here its restarts are forgotten at once."""
    monkeypatch.setattr(supervisor, "RESTART_WINDOW_S", 0.0)
    restarted: asyncio.Queue[str] = asyncio.Queue()
    server = Server("s", ("false",), "http://127.0.0.1:1/v1")
    async with (
        asyncio.timeout(30),
        supervise([server], tmp_path, restarts=1, progress=restarted.put_nowait) as supervised,
    ):
        watching = asyncio.create_task(supervised.watch())
        for _ in range(4):
            assert "restarting" in await restarted.get()
        watching.cancel()
        await asyncio.wait([watching])
