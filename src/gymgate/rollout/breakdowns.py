"""How agents report that they broke down while they give a reward all the same. Pure functions over their results.

NeMo Gym's collector knows a few keys that any agent may set. Everything else differs from agent to agent; the table is
from reading the agents of nemo-gym 0.7.0, and is in docs/outcomes.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

Result = Mapping[str, Any]
MAX_REASON = 400
_REASONS = (
    "failure_reason",
    "_ng_failure_message",
    "error_message",
    "error",
    "agent_error",
    "grading_notes",
)


def breakdown(
    result: Result, agent_type: str | None = None, row: Mapping[str, Any] | None = None
) -> str | None:
    """Return what an agent's result says about its own breakdown, in one line; `None` if it reports none.

    `row` is what was run: results repeat its fields, which say nothing about this rollout.
    """
    reason = _by_collector_keys(result, row or {})
    if reason is None and (reader := AGENTS.get(agent_type or "")) is not None:
        reason = reader(result)
    return None if reason is None else " ".join(reason.split())[:MAX_REASON]


def is_masked(result: Result) -> bool:
    """Whether Gym says that the reward measures nothing: at the top level, or in `instance_config` (older releases)."""
    return bool(result.get("mask_sample")) or bool(_at(result, "instance_config.mask_sample"))


def _by_collector_keys(result: Result, row: Mapping[str, Any]) -> str | None:
    """Keys of NeMo Gym's collector, which keeps no reward of such a rollout."""
    if (kind := result.get("_ng_failure_class")) and row.get("_ng_failure_class") != kind:
        return f"{kind}: {_why(result)}"
    if (dropped := result.get("_ng_no_persist")) and row.get("_ng_no_persist") != dropped:
        return _why(result)
    if is_masked(result) and (kind := result.get("failure_kind")):
        return f"{kind}: {_why(result)}"
    return None


def _why(result: Result) -> str:
    return str(next((result[name] for name in _REASONS if result.get(name)), "the agent gives no reason"))


def _at(result: Result, path: str) -> Any:
    """Return the value at a dotted path; `None` if there is none."""
    value: Any = result
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _field(path: str) -> Callable[[Result], str | None]:
    """Return a reader of a field that is set only after a breakdown."""
    return lambda result: str(value) if (value := _at(result, path)) else None


def _nothing_ran(result: Result) -> str | None:
    """mini_swe_agent and harbor_agent give no report and no output for a run that raised."""
    empty = not _at(result, "metadata") and not _at(result, "response.output")
    return "its run raised (see its log)" if empty else None


def _harbor(result: Result) -> str | None:
    if (reason := _nothing_ran(result)) is not None or _at(result, "metadata.verifier_result"):
        return reason
    kind, message = (_at(result, f"metadata.exception_info.exception_{name}") for name in ("type", "message"))
    return f"no verifier result: {kind}: {message}" if kind else "no verifier result"


def _cvdp(result: Result) -> str | None:
    broken = _at(result, "response.id") == "cvdp-agent-error"
    return str(result.get("container_stderr") or "the agent gives no reason") if broken else None


def _finance(result: Result) -> str | None:
    broken = _at(result, "response.metadata.stop_reason") == "error"
    return (
        "stop_reason is error: a model call, a tool or the verification failed (see its log)"
        if broken
        else None
    )


def _gdp_pdf(result: Result) -> str | None:
    """A document that does not fit the model scores 0; failed calls and verifications are breakdowns."""
    limit = str(_at(result, "document_delivery.limit") or "")
    return limit if limit.startswith(("unclassified_", "verify_failed_")) else None


def _vcqa(result: Result) -> str | None:
    """An empty answer scores 0, with a note in the same field."""
    return None if result.get("error") == "empty model answer" else _field("error")(result)


def _pinchbench(result: Result) -> str | None:
    status = result.get("status")
    return f"status is {status}: {_why(result)}" if status in ("error", "missing_task") else None


AGENTS: Mapping[str, Callable[[Result], str | None]] = MappingProxyType(
    {
        "browsecomp_agent": _field("agent_error"),
        "cvdp_agent": _cvdp,
        "finance_agent": _finance,
        "gdp_pdf_agent": _gdp_pdf,
        "harbor_agent": _harbor,
        "mini_swe_agent": _nothing_ran,
        "mini_swe_agent_2": lambda result: _field("metadata.error")(result) or _nothing_ran(result),
        "pinchbench": _pinchbench,
        "stirrup_agent": _field("error_message"),
        "vcqa_agent": _vcqa,
    }
)
"""Agent type -> reader of what its result says about its own breakdown."""
