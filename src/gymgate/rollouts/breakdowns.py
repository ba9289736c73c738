"""How agents report that they broke down while they give a reward all the same. Pure functions over their results.

NeMo Gym's collector knows a few keys that any agent may set. Everything else differs from agent to agent; the table is
from reading the agents of nemo-gym 0.7.0, and is in docs/agents.md.
"""

from __future__ import annotations

import re
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

_COUNTS_AS_ZERO = "_ng_failure_counts_as_zero"
_NO_REASON = "the agent gives no reason"
_SCORING_SANDBOX = "verifier_sandbox_observation.error_type"
_CVDP_SANDBOX = re.compile(
    r"^\[[^]\n]*\] ((?:sandbox (?:create|operation)|workspace (?:setup|snapshot)) failed for service .*)",
    re.MULTILINE,
)
_BROWSER = re.compile("browser session not found|browser unreachable")
_TIMEOUT = re.compile("timeout|timed out", re.IGNORECASE)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_RAISED = re.compile(r"(?<=\n)[A-Za-z_][\w.]*: ")
"""The line of a traceback that says what was raised, if the name is one of an exception: what it holds may be a model's text,
and a pattern that looks for `Error` in it takes minutes for a long word."""
_TIMED_OUT = 124
"""Status of a program that `timeout` ended."""


def breakdown(
    result: Result, agent_type: str | None = None, row: Mapping[str, Any] | None = None
) -> str | None:
    """Return what an agent's result says about its own breakdown, in one line; `None` if it reports none.

    `row` is what was run: results repeat its fields, which say nothing about this rollout.
    """
    reason = _by_collector_keys(result, row or {})
    if reason is None:
        reason = _scoring(result, row or {})
    if reason is None and (reader := AGENTS.get(agent_type or "")) is not None:
        reason = reader(result)
    return None if reason is None else " ".join(_raised(reason).split())[:MAX_REASON]


def counts_as_zero(result: Result, row: Mapping[str, Any] | None = None) -> bool:
    """Whether a failed result is marked as the model's own failure, a score of 0, by NeMo Gym's next release.

    `row` is what was run: results repeat its fields, which say nothing about this rollout. The marker is as the documentation
    of NeMo Gym's main branch had it on 2026-11-28; no release that sets it was seen.
    """
    return result.get(_COUNTS_AS_ZERO) is True and _COUNTS_AS_ZERO not in (row or {})


def is_masked(result: Result) -> bool:
    """Whether Gym says that the reward measures nothing: at the top level, or in `instance_config` (older releases)."""
    return bool(result.get("mask_sample")) or bool(_at(result, "instance_config.mask_sample"))


def _by_collector_keys(result: Result, row: Mapping[str, Any]) -> str | None:
    """Keys of NeMo Gym's collector, which keeps no reward of such a rollout."""
    if (kind := result.get("_ng_failure_class")) and row.get("_ng_failure_class") != kind:
        return f"{kind}: {_why(result)}"
    if (dropped := result.get("_ng_no_persist")) and row.get("_ng_no_persist") != dropped:
        return _why(result)
    if (kind := result.get("failure_kind")) and is_masked(result):
        return f"{kind}: {_why(result)}"
    return None


def _scoring(result: Result, row: Mapping[str, Any]) -> str | None:
    """Why resources servers that score in a sandbox could not: a reward of 0 stands for the missing one."""
    readers = [read for path, read in SCORINGS.items() if path.partition(".")[0] in result]
    reason = next((why for read in readers if (why := read(result, row)) is not None), None)
    return None if reason is None or is_masked(result) else f"the scoring did not complete: {reason}"


def _incomplete(result: Result, row: Mapping[str, Any]) -> str | None:
    """SWE-bench's own scoring reports a patch that does not apply in the same way, so it has to name an error of its sandbox."""
    if result.get("evaluation_completed") is not False or "evaluation_completed" in row:
        return None
    errors = (result.get("error"), result.get("verifier_error"), _at(result, _SCORING_SANDBOX))
    reason = next((str(error) for error in errors if error), None)
    if reason is None and "model_patch" not in result:
        reason = _last_line(result.get("test_output")) or "no output of its tests"
    return reason


def _cvdp_service(result: Result, row: Mapping[str, Any]) -> str | None:
    """A simulation that fails or takes too long is the policy's; a container that could not be made or used is not."""
    match = _CVDP_SANDBOX.search(str(result.get("container_stderr") or ""))
    return match[1] if match and "container_stderr" not in row else None


def _browser(result: Result, row: Mapping[str, Any]) -> str | None:
    reason = str(result.get("failure_reason") or "")
    return reason if _BROWSER.match(reason) and row.get("failure_reason") != reason else None


def _code_runner(result: Result, row: Mapping[str, Any]) -> str | None:
    """scicodepile blames itself (`harness_fault`) only for what is not the policy's."""
    fault = _at(result, "details.harness_fault") is True and "details" not in row
    return str(result.get("failure_reason") or "harness_fault") if fault else None


def _vibench_plan(result: Result, row: Mapping[str, Any]) -> str | None:
    """An app that cannot be seeded is the policy's. A plan that was seeded and has no report counts as 0 all the same."""
    plans = result.get("results") if "test_plans_graded" in result and "results" not in row else None
    listed = plans if isinstance(plans, list) else ()
    broken = [plan for plan in listed if _at(plan, "error") and not _at(plan, "seeding_failed")]
    return f"{broken[0].get('test_plan')}: {_last_line(broken[0]['error'])}" if broken else None


def _swerl(result: Result, row: Mapping[str, Any]) -> str | None:
    """Its process could not be started. A run without a verdict may be the patch's."""
    broken = _at(result, "verification_result.status") == "error" and "verification_result" not in row
    return "its process could not run" if broken else None


SCORINGS: Mapping[str, Callable[[Result, Mapping[str, Any]], str | None]] = MappingProxyType(
    {
        "evaluation_completed": _incomplete,
        "container_stderr": _cvdp_service,
        "failure_reason": _browser,
        "details.harness_fault": _code_runner,
        "results": _vibench_plan,
        "verification_result.status": _swerl,
    }
)
"""Field of a resources server's result -> reader of why its scoring could not run. The row's own fields say nothing."""


def _raised(reason: str) -> str:
    """Return what was raised, without the traceback before it, which Ray colours."""
    plain = _COLOUR.sub("", reason)
    names = ((line.start(), line[0].rpartition(".")[2]) for line in _RAISED.finditer(plain))
    starts = [start for start, name in names if "Error" in name or "Exception" in name]
    return plain[starts[-1] :] if starts else plain


def _last_line(text: Any) -> str:
    return (str(text or "").strip().splitlines() or [""])[-1]


def _why(result: Result) -> str:
    return str(next((result[name] for name in _REASONS if result.get(name)), _NO_REASON))


def _at(result: Result, path: str) -> Any:
    """Return the value at a dotted path; `None` if there is none."""
    value: Any = result
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _field(path: str) -> Callable[[Result], str | None]:
    """Return a reader of a field that is set only after a breakdown."""
    return lambda result: str(value) if (value := _at(result, path)) else None


def _when(path: str, value: str, detail: str, otherwise: str) -> Callable[[Result], str | None]:
    """Return a reader for an agent that breaks down if the field at `path` is `value`; the reason is at `detail`."""
    return lambda result: str(_at(result, detail) or otherwise) if _at(result, path) == value else None


def _nothing_ran(result: Result) -> str | None:
    """mini_swe_agent and harbor_agent give no report and no output for a run that raised."""
    empty = not _at(result, "metadata") and not _at(result, "response.output")
    return "its run raised (see its log)" if empty else None


def _mini_swe(result: Result) -> str | None:
    """A container that dies while the tests run, or tests that take too long, leave a report without any test."""
    reason = _field("metadata.error")(result) or _nothing_ran(result)
    reports = _at(result, "metadata.eval_report")
    tests = [_at(report, "tests_status") for report in reports.values()] if isinstance(reports, dict) else ()
    if reason is None and tests and not any(tests):
        return "SWE-bench's report has no test: they did not run to their end (see its log)"
    return reason


def _miniswe(result: Result) -> str | None:
    """A timeout of its work is scored; one of its setup is not. The resources server decides which fields are in the result."""
    reason = _at(result, "termination.reason")
    if reason == "timeout" and result.get("agent_started") is False:
        return "its setup timed out: it fetches uv and Python from GitHub, and mini-swe-agent from PyPI"
    return str(_at(result, "termination.detail") or reason) if reason == "infrastructure_error" else None


def _harbor(result: Result) -> str | None:
    """legal_agent_bench gives 0 with `verifier_error` where its verifier raised."""
    if _at(result, "metadata.verifier_result.rewards.verifier_error"):
        return "the verifier raised (see its transcript)"
    if (reason := _nothing_ran(result)) is not None or _at(result, "metadata.verifier_result"):
        return reason
    kind, message = (_at(result, f"metadata.exception_info.exception_{name}") for name in ("type", "message"))
    return f"no verifier result: {kind}: {message}" if kind else "no verifier result"


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


def _terminus(result: Result) -> str | None:
    """A timeout is the agent's own limit; what it had done is scored. Any other exception ended its run."""
    lines = str(result.get("error") or "").strip().splitlines()
    if result.get("terminus2_completed") is not False or (lines and _TIMEOUT.search(lines[-1])):
        return None
    return lines[-1] if lines else "its run did not complete"


def _command(name: str) -> Callable[[Result], str | None]:
    """Return a reader for an agent whose program runs in the sandbox, and ends by itself or by a limit unless it breaks down."""

    def read(result: Result) -> str | None:
        kind, code = result.get(f"{name}_error_type"), result.get(f"{name}_exit_code")
        at_limit = _TIMEOUT.search(str(kind)) or code == _TIMED_OUT
        if not result.get(f"{name}_failed") or at_limit or _at(result, "response.status") == "incomplete":
            return None
        lines = str(result.get(f"{name}_run_stderr") or "").strip().splitlines()
        return f"{name} ended with status {code} ({kind or (lines[-1] if lines else 'no reason')})"

    return read


AGENTS: Mapping[str, Callable[[Result], str | None]] = MappingProxyType(
    {
        "browsecomp_agent": _field("agent_error"),
        "cvdp_agent": _when("response.id", "cvdp-agent-error", "container_stderr", _NO_REASON),
        "finance_agent": _when(
            "response.metadata.stop_reason",
            "error",
            "",
            "stop_reason is error: a model call, a tool or the verification failed (see its log)",
        ),
        "gdp_pdf_agent": _gdp_pdf,
        "harbor_agent": _harbor,
        "mini_swe_agent": _nothing_ran,
        "mini_swe_agent_2": _mini_swe,
        "miniswe_sandboxed_agent": _miniswe,
        "opencode_sandboxed_agent": _command("opencode"),
        "pi_sandboxed_agent": _command("pi"),
        "pinchbench": _pinchbench,
        "stirrup_agent": _field("error_message"),
        "terminus_2_sandboxed_agent": _terminus,
        "vcqa_agent": _vcqa,
    }
)
"""Agent type -> reader of what its result says about its own breakdown."""
