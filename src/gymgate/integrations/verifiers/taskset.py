"""The taskset: rows of NeMo Gym environments as verifiers tasks, read lazily."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import orjson
import verifiers.v1 as vf
from verifiers.v1.dialects import ChatDialect, ResponsesDialect

from gymgate.catalog import Catalog, Environment
from gymgate.config import EnvironmentConfig
from gymgate.dataset import Row, open_rows
from gymgate.errors import DataError, GymgateError
from gymgate.gateway.dialects import translate_request
from gymgate.integrations.verifiers.config import NeMoGymConfig
from gymgate.integrations.verifiers.leases import say
from gymgate.integrations.verifiers.task import GymRun, NeMoGymData, NeMoGymTask
from gymgate.runtime import ensure_runtime


class NeMoGymTaskset(vf.Taskset[NeMoGymTask, NeMoGymConfig]):
    """A task per row, in the order of the file."""

    def load(self) -> Iterator[NeMoGymTask]:
        """Yield the tasks; raises `ConfigError` or `DataError`, one line, for what cannot be loaded."""
        config = self.config
        stack, limits = config.stack_config(), config.limits()
        seen: Counter[str] = Counter()
        for environment, row in itertools.islice(_rows(config), config.tasks):
            seen[identity := f"{environment}/{row.key}"] += 1
            data = NeMoGymData(
                id=identity if seen[identity] == 1 else f"{identity}#{seen[identity]}",
                name=f"{environment}:{row.line}",
                prompt=_prompt(row, config.dialect),
                row=_json_safe(row),
                gym=GymRun(
                    environment=environment,
                    agent=row.agent or config.agent,
                    stack=stack,
                    limits=limits,
                    dialect=config.dialect,
                ),
            )
            yield NeMoGymTask(data, config.task)

    def select(self, config: vf.SelectConfig) -> Self:
        """The tasks of a run; one of the default environment's where nothing says which or how many."""
        view = super().select(config)
        asked = config.limit is not None or not config.include.empty
        return view if asked or not self.config.is_demonstration else view.take(1)


def find_environments(config: NeMoGymConfig) -> dict[str, Environment]:
    """The named environments, as the catalog knows them; `ConfigError` with near names for an unknown one."""
    stack = config.stack_config()
    runtime = ensure_runtime(stack.runtime, progress=say)
    catalog = Catalog(runtime.site, runtime.version, [Path(root) for root in stack.component_roots])
    return {item.name: catalog.find(item.name) for item in stack.environments}


def _rows(config: NeMoGymConfig) -> Iterator[tuple[str, Row]]:
    """Each row with the environment it goes to. Packaged data is read for every environment in turn."""
    environments = find_environments(config)
    homes = _homes(environments, config.stack_config().environments)
    blended = config.data.startswith("hf:") or os.sep in config.data or Path(config.data).exists()
    if len(environments) > 1 and blended:
        for row in open_rows(config.data, environment=None):
            yield _home(row, homes, environments), row
        return
    for name, environment in environments.items():
        for row in open_rows(config.data, environment=environment):
            yield (name if row.agent is None else _home(row, homes, environments)), row


def _homes(environments: Mapping[str, Environment], configs: tuple[EnvironmentConfig, ...]) -> dict[str, str]:
    """Agent instance name -> environment name."""
    chosen = {item.name: environments[item.name].config(item.config) for item in configs}
    return {agent.name: name for name, config in chosen.items() for agent in config.agents}


def _home(row: Row, homes: Mapping[str, str], environments: Mapping[str, Environment]) -> str:
    """The environment of the row's agent; `DataError` naming the config that has the agent, if one does."""
    if row.agent is None:
        raise _error(row, "has no agent_ref, so it could go to any of several environments")
    if row.agent in homes:
        return homes[row.agent]
    having = [
        config.name
        for environment in environments.values()
        for config in environment.configs
        if any(agent.name == row.agent for agent in config.agents)
    ]
    hint = f"it is in config {having[0]!r}" if having else f"there are {', '.join(sorted(homes))}"
    raise _error(row, f"agent {row.agent!r} is not in the stack; {hint}")


def _error(row: Row, reason: str) -> DataError:
    return DataError(f"{row.source}:{row.line}: {reason}", path=row.source, line=row.line)


def _prompt(row: Row, dialect: str) -> vf.Messages:
    """What the agent opens with, as verifiers will parse it from the first call in that dialect."""
    params = row.data["responses_create_params"]
    if dialect == "chat":
        try:
            body = translate_request({"model": "policy", **params}, "responses", "chat")
            return ChatDialect().parse_request(body).messages
        except GymgateError:  # the rollout will say so; reading other rows goes on
            pass
    return ResponsesDialect().parse_request(params).messages


def _json_safe(row: Row) -> dict[str, Any]:
    """The row as JSON would carry it: tasks cross processes and are saved with the run."""
    try:
        safe: dict[str, Any] = orjson.loads(orjson.dumps(row.data, option=orjson.OPT_SERIALIZE_NUMPY))
    except orjson.JSONEncodeError as error:
        raise _error(row, f"cannot be written as JSON: {error}") from None
    return safe
