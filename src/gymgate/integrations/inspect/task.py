"""The task `gymgate/nemo_gym`: a sample per row of a NeMo Gym environment."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ChatMessage, ChatMessageUser, messages_from_openai_responses
from pydantic import ValidationError

from gymgate.core.config import validation_message
from gymgate.core.errors import ConfigError, printable
from gymgate.gym.open_needs import require_needs
from gymgate.integrations.eval_options import DEFAULT_DATA, DEFAULT_ENVIRONMENT, EvalOptions
from gymgate.integrations.eval_rows import EvalRow, eval_rows, json_safe
from gymgate.integrations.inspect.scorer import reward, target_of
from gymgate.integrations.inspect.solver import ROLLOUT_KEY, gym_agent
from gymgate.rollouts.row import input_items
from gymgate.rollouts.transcript import transcript
from gymgate.stack.sync import run_apart

_OWN = ("dialect",)
"""Settings that say nothing here: Inspect's bridge is asked in the Responses API only."""
_JUDGES = """-T models='{"NAME": "URL", ...}'"""


@task  # type: ignore[untyped-decorator]
def nemo_gym(env: str | list[str] = DEFAULT_ENVIRONMENT, data: str = DEFAULT_DATA, **options: Any) -> Task:
    """Rows of a NeMo Gym environment, run by its own agent and scored by its own servers.

    `env`, `data` and all further `-T` arguments are the settings that gymgate's evals share (docs/inspect.md lists them).
    Installs nemo-gym if it is not there. Raises, in one line, `ConfigError` or `DataError` for what cannot be loaded and
    `NeedMissingError` for a judge without an endpoint.
    """
    arguments = {"env": env, "data": data, **options}
    chosen = _checked(arguments)
    require_needs(chosen.run_spec().stack, chosen.find_environments(_show).values(), option=_JUDGES)
    rows = list(eval_rows(chosen, _show))
    return Task(
        dataset=MemoryDataset(run_apart(_samples(rows, chosen)), name=f"{chosen.name}: {data}"),
        solver=gym_agent(arguments),
        scorer=reward(),
        name=chosen.name,
        metadata={"nemo_gym": chosen.gym},
    )


def _checked(arguments: dict[str, Any]) -> EvalOptions:
    names = [name for name in EvalOptions.model_fields if name not in _OWN]
    if unknown := next((name for name in arguments if name not in names), None):
        raise ConfigError(f"-T {unknown}: no such argument; available: {', '.join(names)}")
    try:
        return EvalOptions.model_validate(arguments)
    except ValidationError as error:
        raise ConfigError(f"-T {validation_message(error)}") from None


async def _samples(rows: Sequence[EvalRow], chosen: EvalOptions) -> list[Sample]:
    samples = []
    for entry in rows:
        row = entry.row
        rollout = {
            "environment": entry.environment,
            "agent": row.agent or chosen.agent,
            "source": row.source,
            "line": row.line,
        }
        messages = await conversation_of(row.data["responses_create_params"])
        samples.append(
            Sample(
                id=entry.id,
                input=messages,
                target=target_of(row.data),
                metadata={ROLLOUT_KEY: rollout, "row": json_safe(row)},
            )
        )
    return samples


async def conversation_of(params: dict[str, Any]) -> list[ChatMessage]:
    """Return the messages that the agent opens with. What Inspect has no message for is shown as text."""
    try:
        messages: list[ChatMessage] = await messages_from_openai_responses(input_items(params))
        return messages
    except Exception:  # the row is run as it is; only this view of it is poorer
        entries = transcript({"responses_create_params": params})
        return [ChatMessageUser(content="\n\n".join(f"{role}: {text}" for role, text in entries))]


def _show(message: str) -> None:
    print(printable(message), file=sys.stderr, flush=True)
