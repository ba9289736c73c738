"""How agents say that they broke down while they give a reward all the same. Pure functions over their results.

NeMo Gym's collector knows a few keys that any agent may set. The other ways are each agent's own; the table is
from reading the agents of nemo-gym 0.7.0, and stands in docs/reliability.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

Result = Mapping[str, Any]
FAILURE_CLASS, NOT_KEPT = "_ng_failure_class", "_ng_no_persist"
LONGEST = 400


def breakdown(
    result: Result, agent_type: str | None = None, row: Mapping[str, Any] | None = None
) -> str | None:
    """What an agent's result says about its own breakdown, in one line; `None` if it says nothing of one.

    `row` is what was run: results repeat its fields, which say nothing about this rollout.
    """
    told = _by_collector_keys(result, row or {})
    if told is None and (reader := AGENTS.get(agent_type or "")) is not None:
        told = reader(result)
    return None if told is None else " ".join(told.split())[:LONGEST]


def _by_collector_keys(result: Result, row: Mapping[str, Any]) -> str | None:
    """Keys of NeMo Gym's collector, which keeps no reward of such a rollout."""
    for key in (FAILURE_CLASS, NOT_KEPT):
        if (value := result.get(key)) and row.get(key) != value:
            return f"{value}: {_why(result)}" if key == FAILURE_CLASS else _why(result)
    if is_masked(result) and (kind := result.get("failure_kind")):
        return f"{kind}: {_why(result)}"
    return None


def _why(result: Result) -> str:
    names = (
        "failure_reason",
        "_ng_failure_message",
        "error_message",
        "error",
        "agent_error",
        "grading_notes",
    )
    return str(next((result[name] for name in names if result.get(name)), "the agent gives no reason"))


def is_masked(result: Result) -> bool:
    """Whether Gym says that the reward is no measurement: at the top level, or (older) in `instance_config`."""
    return bool(result.get("mask_sample")) or bool(_at(result, "instance_config.mask_sample"))


def _at(result: Result, path: str) -> Any:
    """The value at a dotted path; `None` where there is none."""
    value: Any = result
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _field(path: str) -> Callable[[Result], str | None]:
    """A field that is set where the agent broke down."""
    return lambda result: str(value) if (value := _at(result, path)) else None


def _nothing_ran(result: Result) -> str | None:
    """mini_swe_agent and harbor_agent give no report and no output for a run that raised."""
    empty = not _at(result, "metadata") and not _at(result, "response.output")
    return "its run raised (see its log)" if empty else None


def _mini_swe_2(result: Result) -> str | None:
    return _field("metadata.error")(result) or _nothing_ran(result)


def _harbor(result: Result) -> str | None:
    if (told := _nothing_ran(result)) is not None or _at(result, "metadata.verifier_result"):
        return told
    kind, message = (_at(result, f"metadata.exception_info.exception_{name}") for name in ("type", "message"))
    return f"no verifier result: {kind}: {message}" if kind else "no verifier result"


def _cvdp(result: Result) -> str | None:
    if _at(result, "response.id") != "cvdp-agent-error":
        return None
    return str(result.get("container_stderr") or "the agent gives no reason")


def _finance(result: Result) -> str | None:
    if _at(result, "response.metadata.stop_reason") != "error":
        return None
    return "stop_reason is error: a model call, a tool or the verification failed (see its log)"


def _gdp_pdf(result: Result) -> str | None:
    """A document that does not fit the model is a score of 0; calls and verifications that failed are none."""
    limit = str(_at(result, "document_delivery.limit") or "")
    return limit if limit.startswith(("unclassified_", "verify_failed_")) else None


def _vcqa(result: Result) -> str | None:
    """An empty answer is scored 0 with a note in the same field."""
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
        "mini_swe_agent_2": _mini_swe_2,
        "pinchbench": _pinchbench,
        "stirrup_agent": _field("error_message"),
        "vcqa_agent": _vcqa,
    }
)
"""By agent type: what its result says about its own breakdown."""
