"""Slurm scripts for a run: an array over shards or seeds, and a job that aggregates it.

Every argument is quoted here; nothing in the scripts is evaluated later.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import Field

from gymgate.core.config import Config
from gymgate.core.errors import ConfigError

_OPTION = re.compile(r"[a-z][a-z0-9-]*")
_RESERVED = frozenset({"array", "output", "job-name", "signal"})
WAIT_FOR_RESTART_S = 1800
"""Time for a policy server that died to be up again."""
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


class SlurmJob(Config):
    """The array to write scripts for."""

    arguments: tuple[str, ...]
    """Arguments of `gymgate run`, without `-o` and `--shard`."""
    output: Path
    """Directory of the run, on a file system that the nodes share."""
    shards: int | None = Field(default=None, ge=1)
    """Array tasks; each runs a part of the rollouts."""
    seeds: tuple[int, ...] | None = None
    """One array task per seed, instead of `--shards`: 4 is 0-3; or a list, 3,5,7-9."""
    name: str = "gymgate"
    """Job name."""
    at_once: int | None = Field(default=None, ge=1)
    """Array tasks that run at the same time. `None`: all."""
    time: str | None = None
    """Walltime; no rollout starts in its last `--drain` seconds."""
    drain_s: int = Field(default=600, ge=1)
    """Time before the end of the walltime in which running rollouts finish."""
    requeues: int = Field(default=3, ge=0)
    """Maximum requeues of a task that hits its time limit or is preempted."""
    options: dict[str, str | None] = Field(default_factory=dict)
    """Further sbatch options of the array: partition, account, gpus-per-node, ... With `dependency`, an array whose dependency
    can no longer be met is cancelled, unless `kill-on-invalid-dep` says otherwise."""
    setup: tuple[str, ...] = ()
    """Shell line to run first, e.g. `'source venv/bin/activate'`."""
    serve: tuple[str, ...] = ()
    """Arguments of `gymgate serve-policy`, which then runs in each task; none: the endpoint is elsewhere."""
    serves_policy: bool = True
    """Whether those servers include a policy; otherwise they are only a sandbox."""

    def __init__(self, **fields: Any) -> None:
        """Raises `ConfigError` for settings that do not fit one another."""
        super().__init__(**fields)
        if (self.shards is None) == (self.seeds is None):
            raise ConfigError(
                "give either --shards N or --seeds LIST: each array task runs one shard or one seed"
            )
        own = ["-o", "--output", "--shard", *(["--seeds"] if self.seeds is not None else [])]
        for argument in self.arguments:
            if is_option(argument, own):
                raise ConfigError(f"{argument} is set for each array task; leave it out")
        if self.serve and self.serves_policy and self._runs_with("-b", "--base-url"):
            raise ConfigError("-b is set from the servers that --serve starts; leave it out")
        for name in self.options:
            if not _OPTION.fullmatch(name) or name in _RESERVED:
                raise ConfigError(f"--sbatch {name!r} is not an option, or one that the script sets itself")
        if "dependency" in self.options and not self.options["dependency"]:
            raise ConfigError("--sbatch dependency needs a value, e.g. dependency=afterok:1234")
        nodes = self.options.get("nodes") or "1"
        if self.serve and nodes != "1" and "--slurm-nodes" not in self.serve:
            raise ConfigError(
                f"--sbatch nodes={nodes}: --serve starts servers on the first node only, and a server cannot span nodes; add "
                "--slurm-nodes to --serve for servers on every node, or leave nodes out"
            )
        if self.time is not None and seconds_of(self.time) <= self.drain_s:
            raise ConfigError(f"--time {self.time} leaves nothing after --drain of {self.drain_s} s")

    def _runs_with(self, *options: str) -> bool:
        return any(is_option(argument, options) for argument in self.arguments)

    @property
    def array(self) -> str:
        """The array's indices as Slurm writes them."""
        if self.seeds is None:
            return f"1-{self.shards}"
        return ",".join(map(str, sorted(self.seeds)))

    @property
    def runs(self) -> list[Path]:
        """Directories to aggregate."""
        output = self.output.absolute()
        return [output] if self.seeds is None else [output / f"seed-{seed}" for seed in sorted(self.seeds)]

    def command(self) -> str:
        """The command of a task as a line of bash, which evaluates nothing but the task's number."""
        run = ["gymgate", "run", *self.arguments]
        if self.serve and self.serves_policy:
            run += ["-b", "{urls}"]
            if not self._runs_with("--wait-for-policy"):
                run += ["--wait-for-policy", str(WAIT_FOR_RESTART_S)]
        line = shlex.join([*run, "-o", str(self.output.absolute())])
        number = "$SLURM_ARRAY_TASK_ID"
        share = f" --shard {number}/{self.shards}"
        if self.seeds is not None:
            share = f"/seed-{number} --seeds {number}-{number}"
        if not self.serve:
            return line + share
        split = self.serve.index("--") if "--" in self.serve else len(self.serve)
        logs = f"{shlex.quote(str(self.output.absolute()))}/logs/servers-{number}"
        serve = f"gymgate serve-policy {shlex.join(self.serve[:split])} --logs {logs}"
        return f'{serve} --run {shlex.quote(line)}"{share}" {shlex.join(self.serve[split:])}'.rstrip()


def is_option(argument: str, options: Collection[str]) -> bool:
    """Whether an argument of a command is one of these options, also with its value: `--base-url=URL`, `-bURL`."""
    name = argument.partition("=")[0] if argument.startswith("--") else argument[:2]
    return name in options


def array_script(job: SlurmJob) -> str:
    """The sbatch script of the array. A task exits with an error if rollouts failed permanently."""
    array = job.array + (f"%{job.at_once}" if job.at_once else "")
    logs = job.output.absolute() / "logs"
    options: dict[str, str | None] = {
        "job-name": job.name,
        "array": array,
        "chdir": str(Path.cwd()),  # where the run's relative paths lead, wherever it is submitted
        "output": f"{logs}/%A_%a.log",
        "open-mode": "append",
        "requeue": None,
        **({"time": job.time, "signal": f"B:USR1@{job.drain_s}"} if job.time else {}),
        **({"kill-on-invalid-dep": "yes"} if "dependency" in job.options else {}),
        **job.options,
    }
    return _script("array.sh", options, job.setup, command=job.command(), requeues=str(job.requeues))


def aggregate_script(job: SlurmJob) -> str:
    """The sbatch script that aggregates the array's runs; submit it with a dependency on the array. It waits for what the
    array depends on too, because it begins after the array."""
    output = job.output.absolute()
    carried = {name: value for name, value in job.options.items() if name in ("account", "partition", "qos")}
    options = {"job-name": f"{job.name}-aggregate", "output": f"{output}/logs/aggregate_%j.log", **carried}
    files = [f"-o{output}/tasks.jsonl", f"-o{output}/tasks.csv", f"--summary={output}/summary.jsonl"]
    runs = [*map(str, job.runs)]
    return _script(
        "aggregate.sh",
        options,
        job.setup,
        aggregate=shlex.join([*runs, *files, "--complete"]),
        report=shlex.join([*runs, "-o", str(output / "report.html")]),
    )


def submit_script(array: Path, aggregate: Path) -> str:
    """The shell script that submits both: the second job runs when every task of the array has ended, well or not."""
    return _script("submit.sh", array=shlex.quote(str(array)), aggregate=shlex.quote(str(aggregate)))


def seconds_of(text: str) -> int:
    """Seconds of a Slurm walltime: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS. Raises `ConfigError`."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise ConfigError(f"--time {text!r}: write minutes, HH:MM:SS or D-HH:MM:SS")
    days, first, second, third = match.groups()
    if days is not None:
        return int(days) * 86400 + int(first) * 3600 + int(second or 0) * 60 + int(third or 0)
    if third is not None:
        return int(first) * 3600 + int(second) * 60 + int(third)
    return int(first) * 60 + int(second or 0)


def _script(
    template: str, options: Mapping[str, str | None] | None = None, setup: Sequence[str] = (), **values: str
) -> str:
    """Fill in a template of this directory: `@sbatch@` and `@setup@` are lines, the others what `values` has."""
    values |= {"sbatch": "\n".join(_sbatch(options or {})), "setup": "\n".join(setup)}
    text = resources.files(__package__).joinpath(template).read_text()
    return re.sub(r"@(\w+)@", lambda match: values[match[1]], text)


def _sbatch(options: Mapping[str, str | None]) -> list[str]:
    for name, value in options.items():
        if value is not None and ("\n" in value or '"' in value):
            raise ConfigError(f"--sbatch {name}={value!r}: a value must be one line without quotes")
    quoted = {name: f'"{value}"' if value and " " in value else value for name, value in options.items()}
    return [f"#SBATCH --{name}" + ("" if value is None else f"={value}") for name, value in quoted.items()]
