"""The cache is cleaned while other processes use it, make environments, are killed. Nothing is downloaded."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(120)

USER = """
import os, sys
from pathlib import Path
from gymgate.core.config import RuntimeConfig
from gymgate.gym.runtime import Interpreter, find_runtime
from gymgate.gym.runtime.ensure import _recipe, runtimes_dir
from gymgate.gym.runtime.uv import run_uv
from gymgate.gym.runtime.venv import build_once

interpreter = Interpreter(Path(sys.executable), sys.version_info[:3])
root, behaviour, times = runtimes_dir(), sys.argv[1], int(sys.argv[2])
name = _recipe(RuntimeConfig(), ()).name(interpreter)

def make(path, held):
    run_uv("venv", "--clear", "--relocatable", "--python", interpreter.path, path, lock=held)
    if behaviour == "slow":
        print("making", flush=True)
        sys.stdin.readline()
    return {"site": "lib", "nemo_gym": "0.7.0", "python": interpreter.label,
            "requirements": [], "interpreter": {"path": sys.executable}}

def works():
    runtime = find_runtime(RuntimeConfig()) or build_once(root, name, make, lambda line: None) and find_runtime(RuntimeConfig())
    return runtime is not None and runtime.python.exists()

for _ in range(times):
    child = os.fork() if times > 1 else 0
    if child == 0:
        assert works(), "gone"
        if times > 1:
            os._exit(0)
    else:
        assert os.waitpid(child, 0)[1] == 0
print("using", flush=True)
sys.stdin.readline()
assert times > 1 or works(), "gone"
"""


@contextmanager
def user(cache: Path, behaviour: str = "plain", times: int = 1) -> Iterator[subprocess.Popen[str]]:
    """A process that has a runtime, makes one, or again and again; killed at the end if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-c", USER, behaviour, str(times)],
        env={**os.environ, "GYMGATE_CACHE": str(cache)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.stdout.close()


def says(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == f"{line}\n"


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def cleaning(cache: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "gymgate", "cache", "clean", "--all", *words],
        env={**os.environ, "GYMGATE_CACHE": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def cleaned(cache: Path, *words: str) -> str:
    process = cleaning(cache, *words)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out


def runtimes(cache: Path) -> list[str]:
    return [path.name for path in (cache / "runtimes").iterdir() if path.name != ".lock"]


def test_a_runtime_stays_while_a_process_has_it(tmp_path: Path) -> None:
    with user(tmp_path) as process:
        says(process, "using")
        [name] = runtimes(tmp_path)
        assert re.search(rf"kept runtime {name}: .* {process.pid}\b", cleaned(tmp_path))
        go_on(process)
        assert process.wait(timeout=20) == 0  # it worked, after the cleaning
    assert re.search(f"would remove .*{name}", cleaned(tmp_path, "--dry-run"))
    assert runtimes(tmp_path) == [name]
    assert f"removed runtime {name}" in cleaned(tmp_path)
    assert runtimes(tmp_path) == []


def test_a_killed_process_uses_nothing(tmp_path: Path) -> None:
    with user(tmp_path) as process:
        says(process, "using")
        process.kill()
        process.wait()
        assert "removed runtime" in cleaned(tmp_path)


def test_cleaning_waits_for_what_is_being_made(tmp_path: Path) -> None:
    with user(tmp_path, "slow") as process:
        says(process, "making")
        cleaner = cleaning(tmp_path)
        assert cleaner.stderr is not None
        told = cleaner.stderr.readline()
        assert f" {process.pid}" in told
        assert " nemo-gym-" in told
        go_on(process)
        out, _ = cleaner.communicate(timeout=60)
        assert f" {process.pid}" in out
        says(process, "using")
        assert len(runtimes(tmp_path)) == 1


def test_who_comes_while_it_is_cleaned_gets_another(tmp_path: Path) -> None:
    """Users that come and go, cleaners that never stop: each user has a whole runtime for as long as it lives."""
    removed = 0
    with user(tmp_path, times=25) as process:
        done = False
        while not done:
            removed += cleaned(tmp_path).count("removed runtime")
            done = ready(process)
        says(process, "using")
        removed += cleaned(tmp_path).count("removed runtime")
    assert removed


def ready(process: subprocess.Popen[str]) -> bool:
    assert process.stdout is not None
    return bool(select.select([process.stdout], [], [], 0)[0])
