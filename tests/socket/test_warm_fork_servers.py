"""The tests' own warm fork servers: forked for stacks with the same interpreter and variables, each with its own of the rest."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gymgate.gym.inside import forkserver
from support.warm import DIRECTORY, WarmForkServers
from support.warm.from_warm import Forked, start

SERVER = """
import json, os

PR_SET_CHILD_SUBREAPER = 36
IMPORTED = []

def prctl(option, value): pass

def preload():
    IMPORTED.append(os.getpid())

class ForkServer:
    def __init__(self, control):
        self.control = control

    def run(self):
        seen = {"env": dict(os.environ), "cwd": os.getcwd(), "imported": IMPORTED, "pid": os.getpid()}
        self.control.sendall(json.dumps(seen).encode() + b"\\n")
        print("logged", flush=True)
        self.control.recv(1)

    def kill_all(self): pass
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A fork server that sends what it sees, and lives until its control socket ends."""
    home = tmp_path / "forkserver"
    home.mkdir()
    (tmp_path / "__init__.py").touch()  # the package that the program loads
    shutil.copy(Path(forkserver.__file__).with_name("__main__.py"), home)
    (home / "__init__.py").touch()
    (home / "forking.py").write_text(SERVER)
    return home / "__main__.py"


def begin(program: Path, log: Path, **variables: str) -> tuple[Any, socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs, log.open("ab") as sink:
        process = start(
            [sys.executable, str(program), str(theirs.fileno())],
            env={"LANG": "C", **variables},
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            pass_fds=[theirs.fileno()],
        )
    return process, ours


def test_the_third_is_forked_with_variables_of_its_own(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm = WarmForkServers()
    monkeypatch.setenv(DIRECTORY, warm.variables[DIRECTORY])
    for number in range(2):
        process, control = begin(program, tmp_path / "cold.log", PATH=str(number))
        assert isinstance(process, subprocess.Popen)
        with process:
            control.close()
        warm.start_wanted()
    seen = []
    for number in range(2):
        (home := tmp_path / str(number)).mkdir()
        process, control = begin(program, home / "log", PATH=str(number), RAY_AUTH_TOKEN=f"secret{number}")
        assert isinstance(process, Forked)
        with control:
            seen.append(json.loads(control.makefile().readline()))
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.01)
        assert process.wait(10) == 0
        assert seen[-1]["env"] == {"LANG": "C", "PATH": str(number), "RAY_AUTH_TOKEN": f"secret{number}"}
        assert (seen[-1]["cwd"], seen[-1]["pid"]) == (str(home), process.pid)
        assert (home / "log").read_text() == "logged\n"
    [imported] = {tuple(each["imported"]) for each in seen}
    assert imported not in [(each["pid"],) for each in seen]
    process, control = begin(program, tmp_path / "other.log", PATH="0", LANG="de_DE")
    assert isinstance(process, subprocess.Popen), "imports may have read LANG"
    with process:
        control.close()
    warm.close()
    with pytest.raises(ProcessLookupError):
        os.kill(imported[0], 0)
