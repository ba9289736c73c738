"""Slurm scripts for a collection: an array over shards, a step that aggregates, and what each job waits for.

The scripts hold plain words only: every argument is quoted here, and nothing in them is evaluated later.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gymgate.errors import ConfigError

_OPTION = re.compile(r"[a-z][a-z0-9-]*")
_RESERVED = frozenset({"array", "dependency", "output", "job-name", "signal", "kill-on-invalid-dep"})
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


@dataclass(frozen=True)
class SlurmJob:
    """What is to be written."""

    collect: Sequence[str]
    """Arguments of `gymgate collect`, without `-o` and `--shard`."""
    output: Path
    shards: int
    name: str = "gymgate"
    at_once: int | None = None
    """Array tasks that may run at the same time; `None`: all."""
    time: str | None = None
    """Walltime as Slurm writes it; no rollout is started in its last `drain_s` seconds."""
    drain_s: int = 600
    requeues: int = 3
    """Times that a task which ran out of time, or was preempted, goes on in a new one."""
    options: Mapping[str, str | None] = field(default_factory=dict)
    """Further sbatch options of the array: partition, account, gpus-per-node, ..."""
    setup: Sequence[str] = ()
    """Shell lines to run first, as they are."""
    server: Sequence[str] = ()
    """Command of a policy server in the same job; none: the endpoint is elsewhere."""
    server_url: str | None = None
    """Where that server answers, up to /v1."""
    server_wait_s: int = 1800
    """Seconds until it must."""

    def __post_init__(self) -> None:
        if self.shards < 1:
            raise ConfigError(f"there must be at least one shard, not {self.shards}")
        for argument in self.collect:
            if argument.split("=")[0] in ("-o", "--output", "--shard"):
                raise ConfigError(f"{argument} is set for each array task; leave it out")
        if bool(self.server) != bool(self.server_url):
            raise ConfigError("--server and --server-url belong together: a command, and where it answers")
        if self.server and any(argument in ("-b", "--base-url") for argument in self.collect):
            raise ConfigError("-b is set from --server-url; leave it out")
        for name in self.options:
            if not _OPTION.fullmatch(name) or name in _RESERVED:
                raise ConfigError(f"--sbatch {name!r} is not an option, or one that the script sets itself")
        if self.time is not None and seconds_of(self.time) <= self.drain_s:
            raise ConfigError(f"--time {self.time} leaves nothing after --drain of {self.drain_s} s")


def array_script(job: SlurmJob) -> str:
    """The sbatch script of the array. A task exits with an error if any part of it failed for good."""
    array = f"1-{job.shards}" + (f"%{job.at_once}" if job.at_once else "")
    logs = job.output.absolute() / "logs"
    options: dict[str, str | None] = {
        "job-name": job.name,
        "array": array,
        "output": f"{logs}/%A_%a.log",
        "open-mode": "append",
        "requeue": None,
        **({"time": job.time, "signal": f"B:USR1@{job.drain_s}"} if job.time else {}),
        **job.options,
    }
    collect = [*job.collect, "-o", str(job.output.absolute())]
    if job.server_url is not None:
        collect += ["-b", job.server_url]
    lines = [
        "#!/bin/bash",
        *_sbatch(options),
        "set -euo pipefail",
        *job.setup,
        *(_server_lines(job) if job.server else ()),
        "# The batch step gets SIGUSR1 before the walltime ends: no new rollouts, those under way are finished.",
        f'gymgate collect {shlex.join(collect)} --shard "$SLURM_ARRAY_TASK_ID/{job.shards}" &',
        "collector=$!",
        "trap 'kill -USR1 \"$collector\" 2>/dev/null || true' USR1",
        "trap 'kill -TERM \"$collector\" 2>/dev/null || true' TERM",
        # A signal ends `wait`, not the collector; bash keeps the status that it ended with.
        'while kill -0 "$collector" 2>/dev/null; do wait "$collector" || true; done',
        "code=0",
        'wait "$collector" || code=$?',
        f'if [ "$code" -eq 75 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {job.requeues} ]; then',
        '  scontrol requeue "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"',
        "  sleep 60  # Slurm ends this step",
        "fi",
        'exit "$code"',
        "",
    ]
    return "\n".join(lines)


def aggregate_script(job: SlurmJob) -> str:
    """The sbatch script that merges the shards, to be submitted with a dependency on the array."""
    output = job.output.absolute()
    carried = {name: value for name, value in job.options.items() if name in ("account", "partition", "qos")}
    options = {"job-name": f"{job.name}-aggregate", "output": f"{output}/logs/aggregate_%j.log", **carried}
    files = [
        "-o",
        str(output / "tasks.jsonl"),
        "-o",
        str(output / "tasks.csv"),
        "--summary",
        str(output / "summary.jsonl"),
    ]
    lines = [
        "#!/bin/bash",
        *_sbatch(options),
        "set -euo pipefail",
        *job.setup,
        f"gymgate aggregate {shlex.join([str(output), *files])}",
        f"gymgate report {shlex.join([str(output)])}",
        "",
    ]
    return "\n".join(lines)


def submit_script(array: Path, aggregate: Path) -> str:
    """Submits both: the second runs when every task of the first has ended, well or not, and says what is missing."""
    return "\n".join(
        [
            "#!/bin/bash",
            "set -euo pipefail",
            f"id=$(sbatch --parsable {shlex.quote(str(array))})",
            "id=${id%%;*}",
            f'sbatch --parsable --dependency="afterany:$id" {shlex.quote(str(aggregate))}',
            'echo "array $id" >&2',
            "",
        ]
    )


def seconds_of(text: str) -> int:
    """Slurm's walltime: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS. Raises `ConfigError`."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise ConfigError(f"--time {text!r}: write minutes, HH:MM:SS or D-HH:MM:SS")
    days, first, second, third = match.groups()
    if days is not None:
        return int(days) * 86400 + int(first) * 3600 + int(second or 0) * 60 + int(third or 0)
    if third is not None:
        return int(first) * 3600 + int(second) * 60 + int(third)
    return int(first) * 60 + int(second or 0)


def _server_lines(job: SlurmJob) -> list[str]:
    """Start the server and wait, with a bound and for its death, until it lists its models."""
    assert job.server_url is not None
    url = shlex.quote(job.server_url.rstrip("/") + "/models")
    return [
        f"{shlex.join(job.server)} &",
        "server=$!",
        "trap 'kill \"$server\" 2>/dev/null || true' EXIT",
        f"deadline=$((SECONDS + {job.server_wait_s}))",
        f"until curl -sf -o /dev/null --max-time 10 {url}; do",
        "  if ! kill -0 \"$server\" 2>/dev/null; then echo 'the policy server died' >&2; exit 1; fi",
        f'  if [ "$SECONDS" -ge "$deadline" ]; then echo \'no policy server after {job.server_wait_s} s\' >&2; exit 1; fi',
        "  sleep 5",
        "done",
    ]


def _sbatch(options: Mapping[str, str | None]) -> list[str]:
    for name, value in options.items():
        if value is not None and ("\n" in value or '"' in value):
            raise ConfigError(f"--sbatch {name}={value!r}: a value must be one line without quotes")
    return [
        f"#SBATCH --{name}"
        if value is None
        else f'#SBATCH --{name}="{value}"'
        if " " in value
        else f"#SBATCH --{name}={value}"
        for name, value in options.items()
    ]
