"""verifiers' eval with its own parser, directory and results; and the metrics of its episodes."""

from __future__ import annotations

import asyncio
import contextlib
import math
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError, model_validator
from pydantic_config import ConfigFileError, cli  # type: ignore[import-untyped]
from verifiers.v1.cli.eval.runner import run_eval
from verifiers.v1.cli.output import create_attempt_log_dir, output_path, write_config
from verifiers.v1.cli.resolve import narrow_config, plugin_errors, with_positional_taskset
from verifiers.v1.configs.cli.eval import EvalConfig
from verifiers.v1.episode import Episode
from verifiers.v1.trace import Timing
from verifiers.v1.utils.interrupt import install_interrupt
from verifiers.v1.utils.logging import setup_logging
from verifiers.v1.utils.trace_store import TRACES_FILE

from gymgate.core.config import validation_message
from gymgate.core.errors import ConfigError
from gymgate.gym.runtime.command import Progress
from gymgate.integrations.verifiers import PLUGIN_ID
from gymgate.integrations.verifiers.taskset import NeMoGymConfig, add_episode
from gymgate.runs.counted.metrics import summary_rows
from gymgate.runs.counted.tasks import CollectedTasks

PROGRESS_S = 10.0
TASKSET_CLIENT = {"api_key_var": "OPENAI_API_KEY"}
"""Settings of the client for our taskset that differ from verifiers' defaults, which are for its hosted models."""


class Settings(EvalConfig):
    """verifiers' settings with our defaults, and without a run's name: it holds the model's."""

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, data: Any) -> Any:
        if _taskset_of(data) == PLUGIN_ID:
            data["client"] = {**TASKSET_CLIENT, **data.get("client", {})}
        return data

    @model_validator(mode="after")
    def auto_setup_run_name(self) -> EvalConfig:
        """Leave it to `complete`, when the model is known."""
        return self


def _taskset_of(data: Any) -> str:
    """Return the id of the taskset in unparsed settings."""
    with contextlib.suppress(AttributeError):
        return str(data.get("env", {}).get("taskset", {}).get("id")).replace("_", "-")
    return ""


def parse_settings(
    argv: Sequence[str], concurrency: int, sampling: Mapping[str, Any] = MappingProxyType({})
) -> EvalConfig:
    """Parse a command line and the config files in it, as `vf-eval` does. Raises `ConfigError` for what is wrong.

    `concurrency` holds where nothing else sets it, and the fields of `sampling` override a file's.
    """
    # verifiers reads them from there, too: to show an error, and to save the config files with the run.
    sys.argv = [sys.argv[0], *with_positional_taskset([*argv])]
    try:
        with plugin_errors():
            narrowed = narrow_config(Settings, sys.argv[1:])
            default = narrowed.model_construct({"max_concurrent"}, max_concurrent=concurrency)
            config: EvalConfig = cli(narrowed, args=sys.argv[1:], default=default)
    except ConfigFileError as error:  # a title, then for each option its name and an indented text
        title, _, text = str(error).partition(f" for {Settings.__name__}\n")
        text = (text or title).replace("\n  ", ": ").replace("\n", "; ")
        raise ConfigError(" ".join(text.split())) from None
    except SystemExit as error:
        cause = error.__cause__
        text = validation_message(cause) if isinstance(cause, ValidationError) else str(cause or error.code)
        raise ConfigError(text.rstrip(".")) from None
    if sampling:  # a flag would make a text of a list
        fields = {**config.sampling.model_dump(exclude_unset=True), **sampling}
        try:
            config.sampling = type(config.sampling).model_validate(fields)
        except ValidationError as error:
            raise ConfigError(f"--sampling: {validation_message(error)}") from None
    return config


def taskset_of(config: EvalConfig) -> NeMoGymConfig | None:
    """Return the settings of our taskset; `None` for another."""
    taskset = config.env.taskset
    return taskset if isinstance(taskset, NeMoGymConfig) else None


def policy_of(config: EvalConfig) -> dict[str, Any]:
    """Return what the settings say of the policy, as arguments of `check_policy`."""
    client = config.client
    return {
        "url": client.base_url if "base_url" in client.model_fields_set else None,
        "model": config.model if "model" in config.model_fields_set else None,
        "key_variable": client.api_key_var,
        "ask": not (client.headers or client.headers_from_env),  # which may hold the key
    }


def complete(config: EvalConfig, policy: tuple[str, str, str] | None) -> Path:
    """Set the policy, if there is one (address, variable with the key, model), and the run's name; return its directory."""
    if policy is not None:
        config.client.base_url, config.client.api_key_var, config.model = policy
    EvalConfig.auto_setup_run_name(config)  # type: ignore[operator]
    return output_path(config)


def evaluate(config: EvalConfig, path: Path, log: Progress) -> list[Episode[Any, Any, Any]]:
    """Run an eval in its directory; return its episodes, those that a resumed run kept included.

    With `dry_run` it only writes the settings. Raises `ConfigError` for a directory that has results already.
    """
    if config.clean and not config.resume and path.exists():
        if config.output_dir.resolve() not in path.resolve().parents:
            raise ConfigError(f"--clean: {path} is not below {config.output_dir}, and is not deleted")
        shutil.rmtree(path)
    traces = path / TRACES_FILE
    if not config.resume and traces.exists() and traces.stat().st_size:
        raise ConfigError(f"{path} already holds a run: --resume {path}, --clean or another --run.name")
    if config.dry_run:
        log(f"settings: {write_config(config, path)}")
        return []
    log_file = create_attempt_log_dir(path) / "eval.log"
    setup_logging("DEBUG" if config.verbose else "INFO", log_file=str(log_file), console=config.rich is None)
    install_interrupt()
    return asyncio.run(_run(config, traces, log))


async def _run(config: EvalConfig, traces: Path, log: Progress) -> list[Episode[Any, Any, Any]]:
    """Run an eval; away from a terminal, report every ten seconds how many rollouts are finished."""

    async def report_progress() -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            log(f"{await asyncio.to_thread(_lines, traces)} rollouts finished")

    progress = None if sys.stdout.isatty() else asyncio.create_task(report_progress())
    try:
        return await run_eval(config)
    finally:
        if progress is not None:
            progress.cancel()


def _lines(path: Path) -> int:
    if not path.exists():
        return 0
    with path.open("rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))


@dataclass
class Rate:
    """When rollouts of this eval ran; those that a resumed run kept are left out."""

    start: float = math.inf
    end: float = 0.0
    rollouts: int = 0

    def add(self, timing: Timing) -> None:
        spans = (timing.boot, timing.setup, timing.agent, timing.finalize, timing.scoring)
        self.rollouts += 1
        self.start = min(self.start, timing.start)
        self.end = max(self.end, *(span.end for span in spans))

    @property
    def per_s(self) -> float | None:
        """Rollouts per second from the first one's start to the last one's end."""
        return self.rollouts / (self.end - self.start) if self.end > self.start else None


def closing_rows(
    episodes: Iterable[Episode[Any, Any, Any]],
    ks: Sequence[int] | None,
    since: float,
    failed_as: float | None = None,
) -> tuple[list[dict[str, Any]], CollectedTasks]:
    """Return the metrics of each environment, with its rate since a time, and the tasks that they are made of."""
    tasks, rates = metrics_of(episodes, since)
    tasks.count_failed_as(failed_as)
    per_s = {name: rate.per_s for name, rate in rates.items()}
    rows = [{**row, "rollouts_per_s": per_s.get(row["environment"])} for row in summary_rows(tasks, ks)]
    return rows, tasks


def metrics_of(
    episodes: Iterable[Episode[Any, Any, Any]], since: float = 0.0
) -> tuple[CollectedTasks, dict[str, Rate]]:
    """Return the tasks, and the rate of each environment's rollouts that began after `since`."""
    tasks, rates = CollectedTasks(), defaultdict[str, Rate](Rate)
    for episode in episodes:
        name = add_episode(tasks, episode)
        for trace in episode.traces:
            if trace.timing.start > since:
                rates[name].add(trace.timing)
    return tasks, rates
