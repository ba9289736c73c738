"""Owners of directories and containers, seen from the PID namespace that they live in and from another one."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from click.testing import CliRunner

from gymgate.cli import cli
from gymgate.core.config import StackConfig
from gymgate.doctor.machine import check_machine
from gymgate.gym.runtime.containers import labels_of, leftovers
from gymgate.stack.client.identity import identity_of
from gymgate.stack.paths import process_directory, ray_directory, salt
from support.namespaces import elsewhere, lives_elsewhere


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv("GYMGATE_CACHE", str(tmp_path / "cache"))
    with TemporaryDirectory(prefix="go-", dir="/tmp") as path:  # short enough for sockets
        monkeypatch.setenv("XDG_RUNTIME_DIR", path)
        yield Path(path) / "gymgate"


def test_a_start_in_another_pid_namespace_leaves_this_ones_directories(base: Path) -> None:
    own, ray = process_directory(), ray_directory()
    start = "process_directory(); ray_directory(); remove_ray_directories()"
    try:
        elsewhere(f"from gymgate.stack.paths import *; {start}")
        assert own.exists()
        assert ray.exists()
    finally:
        ray.rmdir()


def test_a_process_with_the_same_number_elsewhere_keeps_its_ray(base: Path) -> None:
    """The first process of each namespace has number 1."""
    with lives_elsewhere("from gymgate.stack.paths import *; print(ray_directory())") as line:
        ray = Path(line.strip())
        try:
            elsewhere("from gymgate.stack.paths import *; remove_ray_directories()")
            assert ray.exists()
        finally:
            ray.rmdir()


def test_a_shared_stack_has_another_socket_in_another_pid_namespace(base: Path) -> None:
    """Else a start there would replace the socket of the daemon here."""
    config = StackConfig(environments=("mcqa",), share="machine")
    program = f"""
from gymgate.core.config import StackConfig
from gymgate.stack.client.identity import identity_of
from gymgate.stack.paths import salt
print(identity_of(StackConfig.model_validate_json({config.model_dump_json()!r}), salt()))
"""
    here = identity_of(config, salt())
    there = elsewhere(program).strip()
    assert (len(there), there != here) == (len(here), True)


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory whose `docker` lists the containers in `ps` there, and appends what it is to remove to `removed`."""
    program = tmp_path / "docker"
    program.write_text(
        f'#!/bin/sh\ncase $1 in ps) cat {tmp_path}/ps ;; rm) echo "$@" >> {tmp_path}/removed ;; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path


def list_container(docker: Path, identifier: str, **labels: str) -> None:
    text = ",".join(f"{name}={value}" for name, value in {**labels_of("s", "s.1"), **labels}.items())
    line = {
        "ID": identifier,
        "Names": f"name-{identifier}",
        "Image": "image",
        "State": "running",
        "Labels": text,
    }
    with (docker / "ps").open("a") as file:
        file.write(json.dumps(line) + "\n")


def test_cleaning_in_another_pid_namespace_leaves_this_ones_containers(base: Path, docker: Path) -> None:
    list_container(docker, "live")
    told = elsewhere("from gymgate.cli import main; main(['cache', 'clean'])")
    assert not (docker / "removed").exists()
    assert "docker rm -f name-live" in told


def test_containers_of_another_boot_or_machine_are_named_and_stay(base: Path, docker: Path) -> None:
    from gymgate.gym.runtime.containers import PROCESS

    ended = subprocess.Popen(["true"])
    own = labels_of("s", "s.1")[PROCESS]
    list_container(docker, "live")
    list_container(docker, "dead", **{PROCESS: own.replace(str(os.getpid()), str(ended.pid))})
    list_container(docker, "far", **{PROCESS: own.replace(own[0], "a" if own[0] != "a" else "b", 1)})
    list_container(docker, "odd", **{PROCESS: ""})
    ended.wait(30)
    assert {each.id: each.is_certain for each in leftovers()} == {"dead": True, "far": False, "odd": False}
    certain, unjudged = [each.detail for each in check_machine() if each.name == "containers"]
    assert certain.endswith(": name-dead")
    assert unjudged.endswith("docker rm -f name-far name-odd")
    output = CliRunner().invoke(cli, ["cache", "clean"]).output
    assert "removed container dead" in output
    assert "docker rm -f name-far name-odd" in output
    assert (docker / "removed").read_text() == "rm -f dead\n"


def test_doctor_names_directories_that_it_cannot_judge(base: Path) -> None:
    left = elsewhere(
        "import os; from gymgate.stack.paths import *; print(process_directory(), flush=True); os._exit(0)"
    )
    process_directory()
    (finding,) = [each.detail for each in check_machine() if each.name == "stack directories"]
    assert left.strip() in finding
