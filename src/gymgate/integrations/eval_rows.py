"""The rows that an eval runs: of packaged data or a file, each with the environment that runs it and an id."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple, NoReturn

from gymgate.core import codec
from gymgate.gym.catalog import Environment
from gymgate.gym.records import answer_warning, missing_answer
from gymgate.gym.row_sources import open_sources
from gymgate.gym.runtime.command import Progress
from gymgate.integrations.eval_options import EvalOptions
from gymgate.rollouts import Row
from gymgate.rollouts.row import TaskKey, row_error


class EvalRow(NamedTuple):
    """A row and where it runs."""

    id: str
    """The text of its `TaskKey`."""
    environment: str
    row: Row

    @property
    def name(self) -> str:
        """`ENVIRONMENT:LINE`, for people."""
        return f"{self.environment}:{self.row.line}"


def eval_rows(options: EvalOptions, progress: Progress) -> Iterator[EvalRow]:
    """Yield the rows that the options name; raises `ConfigError` or `DataError`, one line, for what cannot be loaded.

    The first row of an environment without the answer that scoring reads is warned of.
    """
    seen: Counter[tuple[str, str]] = Counter()
    unanswered: set[str] = set()
    for environment, row in _rows(options, progress):
        field = None if environment in unanswered else missing_answer(environment, row)
        if field is not None:
            unanswered.add(environment)
            progress(f"warning: {answer_warning(environment, field, row)}")
        yield EvalRow(str(TaskKey(environment, row.key, seen[environment, row.key])), environment, row)
        seen[environment, row.key] += 1


def json_safe(row: Row) -> dict[str, Any]:
    """Return the row as JSON would carry it: it crosses processes and is saved with the run. Raises `DataError`."""
    try:
        safe: dict[str, Any] = codec.loads(codec.dumps(row.data))
    except ValueError as error:
        raise row_error(f"cannot be written as JSON: {error}", row.source, row.line) from None
    return safe


def _rows(options: EvalOptions, progress: Progress) -> Iterator[tuple[str, Row]]:
    """Yield each row with the environment that runs it. Packaged data is read for each environment in turn."""
    environments = options.find_environments(progress)
    agents = {
        agent: name
        for name, environment in environments.items()
        for agent in environment.config(options.config).row_targets
    }
    sources = open_sources(options.data, environments, options.rows)
    for source, name in zip(sources, environments, strict=False):  # one source for all, or one of each
        own = None if source.environment is None else name
        for row in islice(source.rows, source.limit):
            target = own if row.agent is None else agents.get(row.agent)
            yield target or _refuse(row, environments, agents), row


def _refuse(row: Row, environments: Mapping[str, Environment], agents: Mapping[str, str]) -> NoReturn:
    """Raise `DataError` for a row whose agent the stack does not have; names a config that has it, if there is one."""
    if row.agent is None:
        reason = "has no agent_ref, so it could go to any of several environments"
        raise row_error(reason, row.source, row.line)
    others = (
        config.name
        for environment in environments.values()
        for config in environment.configs
        if row.agent in config.row_targets
    )
    other = next(others, None)
    hint = f"it is in config {other!r}" if other else f"the stack has {', '.join(sorted(agents))}"
    raise row_error(f"agent {row.agent!r} is not in the stack; {hint}", row.source, row.line)
