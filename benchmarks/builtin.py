"""verifiers' own NeMo Gym taskset, started for one rollout of each of some environments, as its user has to.

A `vf-eval` takes one taskset, and that taskset one resources server, so N environments are N programs: one after another,
or all at once. Each imports verifiers, starts a tool server (verifiers again), the resources server (nemo-gym 0.4.0, in an
environment that uv makes for verifiers' script) and, for the rollout, the harness's program. No Gym agent and no model
server is among them.

They run with a home directory of their own, so the first of a home finds no script environment; those made are removed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from benchmarks.gym_collector import uv_cache
from benchmarks.trees import Trees
from gymgate.gym.runtime import open_catalog
from gymgate.gym.runtime.interpreters import find_interpreters
from gymgate.gym.runtime.uv import find_uv
from gymgate.gym.runtime.variables import installer_env

if TYPE_CHECKING:
    from gymgate.integrations.verifiers.evaluation import Rate
    from gymgate.runs.counted.counts import RolloutCounts

Order = Literal["one after another", "all at once"]

SERVERS = {
    "example_single_tool_call": "SimpleWeatherResourcesServer",
    "example_session_state_mgmt": "StatefulCounterResourcesServer",
    "example_multi_step": "ExampleMultiStepResourcesServer",
    "workplace_assistant": "WorkbenchResourcesServer",
    "circle_click": "CircleClickResourcesServer",
    "circle_count": "CircleCountResourcesServer",
    "example_tool_call_multireward": "ToolCallMultiRewardResourcesServer",
    "equivalence_rule": "EquivalenceRuleResourcesServer",
}
"""Class in `resources_servers.<environment>.app` of nemo-gym 0.4.0. Servers that import a module beside their own, such as
calendar, cannot be among them: the taskset does not put their directory on the path."""


class Start(NamedTuple):
    """`first_s`: from the first program's start until the last environment's rollout was scored; the rest as `Trees`."""

    first_s: float
    wall_s: float
    peak_mb: float
    programs_mb: float
    processes: int


BUILTIN = [
    *("builtin-nemo-gym", "-n", "1", "--env.agent.runtime.type", "subprocess"),
    *("--env.agent.harness.id", "null", "--env.taskset.dataset"),
]


def eval_command(
    arguments: list[str], base_url: str, rollouts: int, concurrency: int, output: str
) -> list[str]:
    """One `vf-eval`, its traces in `output`/run; for PYTHONPATH it needs the directory of this file."""
    return [
        *(sys.executable, "-c", "from verifiers.v1.cli.eval.main import main; main()"),
        *arguments,
        *("-r", str(rollouts), "-c", str(concurrency), "-m", "scripted", "-o", output, "--run.name", "run"),
        *("--client.base-url", base_url, "--client.api-key-var", "NO_KEY", "--no-push", "--no-rich"),
    ]


class BuiltinHome:
    """A home directory for `vf-eval`; `close` removes it and the script environments that uv made for it."""

    def __init__(self) -> None:
        self._uv_cache = uv_cache()
        self._directory = tempfile.TemporaryDirectory(prefix="gymgate-bench-", ignore_cleanup_errors=True)
        self.path = Path(self._directory.name)

    @cached_property
    def environment(self) -> dict[str, str]:
        """uv and this Python's programs first on PATH; UV_PYTHON, if there is one that nemo-gym 0.4.0's script takes."""
        programs = [str(Path(sys.executable).parent), str(find_uv().parent), os.environ.get("PATH", "")]
        fitting = [each.path for each in find_interpreters() if (3, 12) <= each.version[:2] < (3, 14)]
        return installer_env() | {
            "HOME": str(self.path),
            "PATH": os.pathsep.join(programs),
            "PYTHONPATH": str(Path(__file__).parent),
            "UV_CACHE_DIR": str(self._uv_cache),
            **({"UV_PYTHON": str(fitting[0])} if fitting else {}),
        }

    def close(self) -> None:
        for script in self.path.glob(".cache/verifiers/runtimes/scripts/*.py"):
            command = [str(find_uv()), "python", "find", "--script", str(script), "--no-config"]
            done = subprocess.run(
                command, env=self.environment, capture_output=True, text=True, timeout=60, check=False
            )
            made = Path(done.stdout.strip()).parent.parent
            if made.is_relative_to(self._uv_cache / "environments-v2"):
                shutil.rmtree(made, ignore_errors=True)
        self._directory.cleanup()


def start_builtin(
    home: BuiltinHome, url: str, environments: Sequence[str], order: Order, limit_s: float
) -> Start:
    """One rollout of each environment's first row. Raises TimeoutError after `limit_s`, RuntimeError if one failed."""
    trees, deadline, variables = Trees(), time.monotonic() + limit_s, home.environment
    with tempfile.TemporaryDirectory(prefix="gymgate-bench-") as name:
        outputs = [Path(name) / str(number) for number in range(len(environments))]
        commands = [
            eval_command(arguments(environment), url, 1, 1, str(output))
            for environment, output in zip(environments, outputs, strict=True)
        ]
        batches = [commands] if order == "all at once" else [[command] for command in commands]
        started = time.time()
        printed = [text for batch in batches for text in trees.run(batch, variables, deadline)]
        ends = [
            _scored_at(output / "run") if not text else None
            for output, text in zip(outputs, printed, strict=True)
        ]
    scored = [end for end in ends if end is not None]
    if len(scored) < len(environments):
        raise RuntimeError(
            "\n".join([f"{len(scored)} of {len(environments)} had a rollout", *filter(None, printed)])
        )
    return Start(max(scored) - started, trees.wall_s, trees.peak_mb, trees.programs_mb, trees.processes)


def arguments(environment: str) -> list[str]:
    rows = str(open_catalog().find(environment).data_file().path)
    server = f"resources_servers.{environment}.app:{SERVERS[environment]}"
    return [*BUILTIN, rows, "--env.taskset.server", server]


def _scored_at(run: Path) -> float | None:
    """Unix time at which the one rollout ended; None if it failed."""
    counts, rate = read_metrics(run)
    return rate.end if counts.scored else None


def read_metrics(run: Path) -> tuple[RolloutCounts, Rate]:
    """Read the outcomes of a run of one environment that `vf-eval` saved, and its rate."""
    from verifiers.v1.utils.trace_store import read_episodes

    from gymgate.integrations.verifiers.evaluation import metrics_of
    from gymgate.integrations.verifiers.traces import WireTrace

    tasks, rates = metrics_of(read_episodes(run, WireTrace))
    (rate,) = rates.values()
    return tasks.counts, rate
