"""Environments made once: real processes that race, are killed, are interrupted, fill the disk. Nothing is downloaded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gymgate.core.errors import SetupError
from gymgate.gym.runtime.venv import MARKER, build_once, read_runtime

BUILD = """
import json, os, sys, time
from pathlib import Path
from gymgate.gym.runtime.uv import run_uv
from gymgate.gym.runtime.venv import build_once
root, behaviour = Path(sys.argv[1]), sys.argv[2]
version = "%d.%d.%d" % sys.version_info[:3]

def make(path, held):
    with (root / "builds").open("a") as log:
        log.write("x")
    run_uv("venv", "--clear", "--relocatable", "--python", sys.executable, path, lock=held)
    if behaviour == "hang":
        print("making", flush=True)
        time.sleep(100)
    if behaviour == "orphan":
        import subprocess
        subprocess.Popen(["sh", "-c", "read line; :"], stdin=sys.stdin, pass_fds=(held,))
        print("making", flush=True)
        time.sleep(100)
    if behaviour == "big":
        (path / "big").write_bytes(bytes(50_000_000))
    return {"site": "lib", "nemo_gym": "0", "python": version, "requirements": [], "interpreter": {"path": sys.executable}}

if behaviour == "twenty":
    children = []
    while len(children) < 20 and (child := os.fork()):
        children.append(child)
    if children and child:
        sys.exit(max(os.waitpid(child, 0)[1] for child in children))
try:
    place = build_once(root, "tiny", make, lambda line: os.write(2, f"{line}\\n".encode()))
    os.write(1, f"{place}\\n".encode())  # one write a line: twenty share the pipe
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


def start(root: Path, behaviour: str = "plain", **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILD, str(root), behaviour]
    return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


@contextmanager
def making(root: Path, behaviour: str) -> Iterator[subprocess.Popen[str]]:
    """A process that is in the middle of making the environment; killed at the end if it still runs."""
    process = start(root, behaviour, stdin=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "making\n"
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            assert stream is not None
            stream.close()


def succeeds(process: subprocess.Popen[str], root: Path) -> None:
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out.strip()) == (0, str(root / "tiny")), err
    assert works(root / "tiny")
    assert not list(root.glob("*.tmp-*"))


def works(place: Path) -> bool:
    """Whether its interpreter runs, and is where it says it is, after the directory was renamed."""
    code = "import sys; print(sys.prefix)"
    done = subprocess.run(
        [place / "bin" / "python", "-I", "-c", code], capture_output=True, text=True, check=True
    )
    return done.stdout.strip() == str(place)


def test_twenty_at_once_make_it_once(tmp_path: Path) -> None:
    """Forked from one process that has imported everything, so that they truly start at once."""
    out, err = start(tmp_path, "twenty").communicate(timeout=60)
    assert out.split() == [str(tmp_path / "tiny")] * 20, err
    assert (tmp_path / "builds").read_text() == "x"
    assert works(tmp_path / "tiny")
    assert not list(tmp_path.glob("*.tmp-*"))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_an_ended_build_does_not_count(tmp_path: Path, how: signal.Signals) -> None:
    with making(tmp_path, "hang") as process:
        process.send_signal(how)
        process.wait(timeout=20)
    assert read_runtime(tmp_path / "tiny") is None
    if how == signal.SIGINT:
        assert not list(tmp_path.glob("tiny*"))
    succeeds(start(tmp_path), tmp_path)
    assert (tmp_path / "builds").read_text() == "xx"


def test_the_lock_is_held_while_an_orphaned_installer_runs(tmp_path: Path) -> None:
    with making(tmp_path, "orphan") as process:
        process.kill()
        process.wait()
        follower = start(tmp_path)
        assert follower.stderr is not None
        assert f" {process.pid}" in follower.stderr.readline()
        assert (tmp_path / "builds").read_text() == "x"
        assert process.stdin is not None
        process.stdin.close()
        succeeds(follower, tmp_path)


def test_a_vanished_interpreter_means_a_new_build(tmp_path: Path) -> None:
    succeeds(start(tmp_path), tmp_path)
    python = tmp_path / "tiny" / "bin" / "python"
    python.unlink()
    python.symlink_to(tmp_path / "gone")
    assert read_runtime(tmp_path / "tiny") is None
    succeeds(start(tmp_path), tmp_path)


def test_another_minor_version_in_its_place_means_a_new_build(tmp_path: Path) -> None:
    """As after an upgrade of a Linux distribution, whose `python3` is then a link to another interpreter."""
    succeeds(start(tmp_path), tmp_path)
    python = tmp_path / "tiny" / "bin" / "python"
    python.unlink()
    (tmp_path / "python3.99").symlink_to("python3.98")
    (tmp_path / "python3.98").write_text("")
    (tmp_path / "python3.98").chmod(0o755)
    python.symlink_to(tmp_path / "python3.99")
    assert read_runtime(tmp_path / "tiny") is None
    succeeds(start(tmp_path), tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"site": 1}'])
def test_a_damaged_marker_does_not_count(tmp_path: Path, content: str) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / MARKER).write_text(content)
    assert read_runtime(tmp_path / "tiny") is None


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match=r"file/runtimes: Not a directory.*GYMGATE_CACHE"):
        build_once(tmp_path / "file" / "runtimes", "tiny", lambda path, held: {}, print)


def test_a_full_disk(tmp_path: Path) -> None:
    """On a real file system of 8 MB, where this user may mount one."""
    own = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
    mount = 'mount -t tmpfs -o size=8m none "$1" || exit 77; shift; "$@"; code=$?; ls "$GYMGATE_TEST_ROOT"; exit $code'
    command = [*own, "sh", "-c", mount, "sh", tmp_path, sys.executable, "-c", BUILD, tmp_path, "big"]
    environment = {**os.environ, "GYMGATE_TEST_ROOT": str(tmp_path)}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, env=environment, check=False
        )
    except FileNotFoundError:
        pytest.skip("no unshare here")
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("this user may not mount a file system")
    assert done.returncode == 1
    assert done.stderr.startswith("SetupError: "), done.stderr
    assert str(tmp_path) in done.stderr
    assert "set GYMGATE_CACHE" in done.stderr
    assert done.stdout.split() == ["builds"]
