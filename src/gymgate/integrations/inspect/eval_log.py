"""Collected rollouts written as a log of Inspect's, for `inspect view` and its analysis functions."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any
from uuid import uuid4

from inspect_ai.log import (
    EvalConfig,
    EvalDataset,
    EvalError,
    EvalLog,
    EvalSample,
    EvalSpec,
    EvalStats,
    recompute_metrics,
    write_eval_log,
)
from inspect_ai.model import ChatMessage, ChatMessageAssistant, ModelOutput, ModelUsage

from gymgate.core.config import POLICY
from gymgate.core.files import writing_to
from gymgate.integrations.failures import failure_of
from gymgate.integrations.inspect.scorer import score_of, target_of
from gymgate.integrations.inspect.solver import ROLLOUT_KEY, record_of
from gymgate.integrations.inspect.task import conversation_of
from gymgate.results.tables import checked_table
from gymgate.rollouts.answers import answer_of
from gymgate.rollouts.transcript import items_of
from gymgate.runs.counted.account import Account
from gymgate.runs.counted.aggregate import RunTable
from gymgate.runs.counted.costs import UsageCounts
from gymgate.runs.stored.record import CollectedRollout
from gymgate.runs.stored.rows import RowReader
from gymgate.runs.stored.tokens import TOKENS, Tokens, tokens_of

SCORER = "reward"
_STOPS = {
    "stop": "stop",
    "length": "max_tokens",
    "tool_calls": "tool_calls",
    "content_filter": "content_filter",
}


def export_log(table: RunTable, output: Path) -> int:
    """Write one sample per finished rollout, and one with an error per rollout given up; returns how many.

    The log is of a cancelled eval if rollouts are missing. Its tokens are those of all attempts, failed ones included.
    Repeats of a row are the epochs of one sample. All of it is in memory at once. Raises `ConfigError` for another suffix
    than .eval or .json, `DataError` if the file cannot be written.
    """
    checked_table(output, (".eval", ".json"))
    log = asyncio.run(_log_of(table))
    recompute_metrics(log)
    with writing_to(output), tempfile.TemporaryDirectory(dir=output.parent) as scratch:
        written = Path(scratch) / output.name
        write_eval_log(log, str(written))
        written.replace(output)
    return len(log.samples)


async def _log_of(table: RunTable) -> EvalLog:
    policy, settings = table.policy or {}, table.runs[0].settings
    model = _model_of(policy)
    rollouts = sorted(
        (attempt.rollout() for attempt in table.rollouts(failed=True)),
        key=lambda rollout: (
            *(rollout.environment, rollout.task, rollout.occurrence, rollout.repeat),
            -1 if rollout.seed is None else rollout.seed,
        ),
    )
    epochs: Counter[str] = Counter()
    samples, rows = [], RowReader()
    for rollout in rollouts:
        epochs[_sample_id(rollout)] += 1
        samples.append(await _sample(rollout, epochs[_sample_id(rollout)], model, rows))
    environments = ", ".join(sorted({rollout.environment for rollout in rollouts}))
    finished = [rollout.finished for rollout in rollouts]
    begun = [rollout.finished - rollout.timing.total_s for rollout in rollouts]
    return EvalLog(
        status="cancelled" if table.missing else "success",
        eval=EvalSpec(
            created=_time(max(finished, default=0.0)),
            eval_id=uuid4().hex,
            run_id=uuid4().hex,
            task=environments,
            task_id=uuid4().hex,
            task_display_name=environments,
            dataset=EvalDataset(name=environments, samples=len(epochs), sample_ids=list(epochs)),
            model=model,
            config=EvalConfig(epochs=max(epochs.values(), default=1)),
            packages={name: metadata.version(name) for name in ("gymgate", "inspect-ai")},
            metadata={
                "nemo_gym": settings.get("nemo_gym"),
                "runs": [str(run.path) for run in table.runs],
                "account": str(Account.of(table.tasks.ordered(), table.tasks)),
            },
            scorers=[  # names, as its eval writes them: Inspect has no public class for these
                {"name": SCORER, "metrics": [{"name": "inspect_ai/mean"}, {"name": "inspect_ai/stderr"}]}
            ],
        ),
        stats=EvalStats(
            started_at=_time(min(begun, default=0.0)),
            completed_at=_time(max(finished, default=0.0)),
            model_usage=_usage(model, _total(table.tasks.usage)),
        ),
        samples=samples,
    )


def _model_of(policy: Mapping[str, Any]) -> str:
    """Return the policy's model under the provider of Inspect's that is never asked: a run does not say whose endpoint it was."""
    return f"none/{policy.get('model') or policy.get('type') or 'unknown'}"


async def _sample(rollout: CollectedRollout, epoch: int, model: str, rows: RowReader) -> EvalSample:
    result = rollout.result or {}
    row = rows.read_if_there(rollout) if answer_of(result) is None else {}
    opening, answered = items_of(result)
    messages = await conversation_of({"input": [*opening, *answered]})
    output = _output(messages, rollout, model)
    failure = failure_of(rollout)
    tokens = tokens_of(rollout)
    own = tokens.pop(POLICY, None)
    return EvalSample(
        id=_sample_id(rollout),
        epoch=epoch,
        input=await conversation_of({"input": opening}),
        target=target_of(result, row),
        messages=messages,
        output=output,
        scores=None if failure else {SCORER: score_of(record_of(rollout), output.completion, row)},
        error=failure and EvalError(message=failure, traceback=failure, traceback_ansi=failure),
        metadata={
            ROLLOUT_KEY: rollout.model_dump(
                include={"environment", "agent", "source", "line", "repeat", "seed", "attempt"}
            )
        },
        store={ROLLOUT_KEY: record_of(rollout)},
        model_usage=_usage(model, own),
        role_usage={
            name: usage for server in tokens for name, usage in _usage(server, tokens[server]).items()
        },
        started_at=_time(rollout.finished - rollout.timing.total_s),
        completed_at=_time(rollout.finished),
        total_time=rollout.timing.total_s,
        working_time=rollout.timing.total_s,
        uuid=rollout.id,
    )


def _output(messages: list[ChatMessage], rollout: CollectedRollout, model: str) -> ModelOutput:
    """Return the agent's last message as the model's output; an empty one if the conversation ends otherwise."""
    if not messages or not isinstance(messages[-1], ChatMessageAssistant):
        return ModelOutput(model=model)
    reasons = [call.finish_reason for call in rollout.policy_calls]
    stop = _STOPS.get((reasons[-1] if reasons else None) or "stop", "unknown")
    return ModelOutput.from_message(messages[-1], stop_reason=stop).model_copy(update={"model": model})


def _usage(name: str, tokens: Tokens | None) -> dict[str, ModelUsage]:
    """Return token counts under a name; nothing if they are unknown, or of no call."""
    if tokens is None or not tokens["calls"]:
        return {}
    read, cached, sampled = (
        tokens[count] or 0 for count in ("input_tokens", "cached_tokens", "output_tokens")
    )
    return {
        name: ModelUsage(
            input_tokens=max(read - cached, 0),
            input_tokens_cache_read=cached or None,
            output_tokens=sampled,
            total_tokens=read + sampled,
            reasoning_tokens=tokens["reasoning_tokens"] or None,
        )
    }


def _total(used: UsageCounts) -> Tokens | None:
    """Return the tokens of all attempts; `None` if those of one are unknown, as the sum would be too low."""
    usage = used.of_policy({})
    if usage is None or usage.counted < usage.rollouts:
        return None
    return {name: getattr(usage, name) for name in ("calls", *TOKENS)}


def _sample_id(rollout: CollectedRollout) -> str:
    """Return the id that the task `gymgate/nemo_gym` gives the row."""
    return str(rollout.task_key)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
