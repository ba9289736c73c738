"""A collection on a real Slurm: slurmctld and slurmd of Debian's packages, as root, on this machine alone."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from gymgate.cluster.slurm_nodes import expand
from gymgate.runs.stored.layout import ROLLOUTS, run_directories
from gymgate.runs.stored.record import CollectedRollout, read_values
from support.stacks import SIMPLE, runtime

pytestmark = [pytest.mark.gym, pytest.mark.heavy, pytest.mark.timeout(900)]
VLLM = Path(__file__).parents[1] / "socket" / "collect_vllm_program.py"
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "squeue", "scancel", "sinfo")
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SchedulerParameters=sched_interval=1,batch_sched_delay=0
KillWait=5
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=debug Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def until(true: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not in {seconds:g} s: {what}"
        time.sleep(0.1)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cluster of one node; the directory of its logs."""
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:/usr/sbin")
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        pytest.skip(f"no {missing[0]} on PATH")
    if os.geteuid() != 0:
        pytest.skip("slurmd runs as root")
    home, host = tmp_path / "slurm", socket.gethostname().partition(".")[0]
    for name in ("state", "spool"):
        (home / name).mkdir(parents=True)
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1], other.getsockname()[1]]
    (home / "slurm.conf").write_text(CONF.format(host=host, home=home, ports=ports))
    monkeypatch.setenv("SLURM_CONF", str(home / "slurm.conf"))
    daemons = []
    try:
        for arguments in (["slurmctld", "-D"], ["slurmd", "-D", "-N", host]):
            log = (home / f"{arguments[0]}.log").open("wb")
            daemons.append(subprocess.Popen(arguments, stdout=log, stderr=log))
            log.close()
        until(lambda: "idle" in said("sinfo", "-h", "-o", "%t"), 60, "a node that is idle")
        yield home
    finally:
        said("scancel", "--full", "--signal=KILL", "-u", "root")
        said("scancel", "-u", "root")
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(30)


def said(*arguments: str) -> str:
    return subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False).stdout


def submit(output: Path, *collect: str, slurm: Sequence[str] = (), setup: str = "true") -> None:
    """`gymgate slurm`, as a user would call it."""
    bin_directory = Path(sys.executable).parent
    found = runtime()
    gym = f"{found.version}@{found.interpreter}" if found.interpreter else found.version
    arguments = ["-o", str(output), *(slurm or ("--shards", "4", "--time", "30", "--drain", "60"))]
    arguments += [
        *("--setup", setup),
        *("--setup", f"export PATH={shlex.quote(str(bin_directory))}:$PATH"),
        "--",
        SIMPLE,
        "--gym",
        gym,
        *collect,
    ]
    done = subprocess.run(
        [sys.executable, "-m", "gymgate", "slurm", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def outcomes(path: Path) -> Counter[Any]:
    found = [
        CollectedRollout.model_validate(value)
        for directory in run_directories(path)
        for _, value in read_values(directory / ROLLOUTS)
    ]
    return Counter((rollout.identity, rollout.reward) for rollout in found)


def test_an_array_of_four_with_one_task_killed(slurm: Path, tmp_path: Path) -> None:
    collect = ("-r", "80", "-c", "8")
    output = tmp_path / "run"
    submit(output, *collect)
    log = output / "shard-2-of-4" / ROLLOUTS
    until(lambda: log.exists() and log.stat().st_size > 50_000, 120, "rollouts of shard 2")
    holder = (log.parent / ".lock").read_text().split()[1]
    os.kill(int(holder), signal.SIGKILL)
    until(lambda: not said("squeue", "-h"), 300, "an empty queue")
    first = len(outcomes(output))
    assert first < 400
    logs = "".join(path.read_text() for path in (output / "logs").glob("aggregate_*.log"))
    assert "shard-2-of-4" in logs
    assert " missing" in logs
    submit(output, *collect)
    until(lambda: not said("squeue", "-h"), 300, "an empty queue")
    found = outcomes(output)
    assert set(found.values()) == {1}
    assert len(found) == 400
    summary = orjson.loads((output / "summary.jsonl").read_bytes())
    assert (summary["rollouts"], summary["tasks"], summary["failed"]) == (400, 5, 0)
    assert (output / "report.html").exists()
    single = tmp_path / "single"
    found_runtime = runtime()
    gym = (
        f"{found_runtime.version}@{found_runtime.interpreter}"
        if found_runtime.interpreter
        else found_runtime.version
    )
    command = [sys.executable, "-m", "gymgate", "run", SIMPLE, "--gym", gym, *collect, "-o", str(single)]
    subprocess.run(command, check=True, capture_output=True, timeout=200)
    assert outcomes(single) == found


def test_servers_in_the_job_and_the_end_of_its_walltime(slurm: Path, tmp_path: Path) -> None:
    """A task with servers of its own, started with srun, drains before its walltime ends, is requeued and goes on.

    It drains 40 s after its start, in which its servers and its stack must have started: no test for a busy machine.
    """
    programs, notes = tmp_path / "bin", tmp_path / "notes"
    for directory in (programs, notes):
        directory.mkdir()
    (programs / "vllm").write_text(f'#!/bin/sh\nexec {sys.executable} -S {VLLM} "$@"\n')
    (programs / "vllm").chmod(0o755)
    output = tmp_path / "run"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve = f"m --slurm-nodes --port {port} --start-timeout 60"
    started = time.monotonic()
    submit(
        output,
        *("-r", "100", "-c", "1", "-m", "m"),
        slurm=("--shards", "1", "--time", "2", "--drain", "80", "--requeues", "50", "--serve", serve),
        setup=f"export VLLM_NOTES={notes} PATH={programs}:$PATH",
    )
    until(lambda: not said("squeue", "-h"), 800, "an empty queue")
    logs = "".join(path.read_text() for path in sorted((output / "logs").glob("*.log")))
    print(f"{time.monotonic() - started:.0f} s, {logs.count('SIGUSR1: starting nothing more')} drains")
    assert "SIGUSR1: " in logs, logs
    assert "resuming " in logs
    found = outcomes(output)
    assert set(found.values()) == {1}
    assert len(found) == 500
    summary = orjson.loads((output / "summary.jsonl").read_bytes())
    assert (summary["rollouts"], summary["failed"]) == (500, 0)
    assert len(list(notes.glob("*.json"))) > 1


@pytest.mark.parametrize(("before", "rollouts"), [("true", 10), ("false", 0)])
def test_an_array_that_depends_on_another_job(
    slurm: Path, tmp_path: Path, before: str, rollouts: int
) -> None:
    """It runs once that job has succeeded, and is cancelled if it failed; the aggregation follows in both cases."""
    first = said("sbatch", "--parsable", "--hold", "-o", "/dev/null", "--wrap", before).strip()
    output = tmp_path / "run"
    depends = ("--sbatch", f"dependency=afterok:{first}")
    submit(output, *("-r", "2", "-c", "2"), slurm=("--shards", "1", *depends))
    reasons = ["Dependency", "Dependency", "JobHeldUser"]  # None until the scheduler has looked at a job
    until(
        lambda: sorted(said("squeue", "-h", "-o", "%r").split()) == reasons, 30, "two jobs that wait for one"
    )
    said("scontrol", "release", first)
    until(lambda: not said("squeue", "-h"), 300, "an empty queue")
    logs = "".join(path.read_text() for path in (output / "logs").glob("aggregate_*.log"))
    assert sum(outcomes(output).values()) == rollouts
    assert ("no run" in logs) is (rollouts == 0), logs


def test_node_lists_are_expanded_as_slurm_does(slurm: Path) -> None:
    for text in ("n1", "a,b", "node[01-03,7],login", "n[098-101]", "r[1-2]n[0-1]", "n[8-11]"):
        assert expand(text) == said("scontrol", "show", "hostnames", text).split()
