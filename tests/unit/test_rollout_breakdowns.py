"""How each packaged agent says that it broke down, and that what it says otherwise is taken for no such thing."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import orjson
import pytest

from gymgate.rollouts import result as results
from gymgate.rollouts.breakdowns import AGENTS, SCORINGS, breakdown

DOCS = Path(__file__).parents[2] / "docs" / "agents.md"
SAID = {"output": [{"type": "message"}]}

BROKEN: list[tuple[str, dict[str, Any], str]] = [
    ("browsecomp_agent", {"agent_error": "KeyError: 'name'"}, "KeyError"),
    ("cvdp_agent", {"response": {"id": "cvdp-agent-error"}, "container_stderr": "no image"}, "no image"),
    ("finance_agent", {"response": {"metadata": {"stop_reason": "error"}}}, "stop_reason is error"),
    ("gdp_pdf_agent", {"document_delivery": {"limit": "verify_failed_TimeoutError"}}, "verify_failed"),
    ("gdp_pdf_agent", {"document_delivery": {"limit": "unclassified_http_500"}}, "http_500"),
    ("harbor_agent", {"metadata": {}, "response": {"output": []}}, "its run raised"),
    (
        "harbor_agent",
        {"metadata": {"exception_info": {"exception_type": "OSError", "exception_message": "no\nimage"}}},
        "no verifier result: OSError: no image",
    ),
    (
        "harbor_agent",
        {"metadata": {"verifier_result": {"rewards": {"reward": 0.0, "verifier_error": 1}}}},
        "the verifier raised",
    ),
    ("mini_swe_agent", {"metadata": {}, "response": {"output": []}}, "its run raised"),
    ("mini_swe_agent_2", {"metadata": {"error": "no such image", "traceback": "..."}}, "no such image"),
    (
        "mini_swe_agent_2",
        {"metadata": {"eval_report": {"a.b-1": {"patch_exists": True, "resolved": False}}}},
        "SWE-bench's report has no test",
    ),
    (
        "mini_swe_agent_2",
        {
            "metadata": {
                "error": "\x1b[36mray::run()\x1b[39m (pid=1)\n  File x\nsome.CreateError: no\nsuch: image"
            }
        },
        "reports a failure: some.CreateError: no such: image",
    ),
    (
        "miniswe_sandboxed_agent",
        {"termination": {"reason": "infrastructure_error", "detail": "OSError: gone"}},
        "OSError: gone",
    ),
    (
        "miniswe_sandboxed_agent",
        {"termination": {"reason": "timeout"}, "agent_started": False},
        "its setup timed out: it fetches uv and Python from GitHub",
    ),
    (
        "opencode_sandboxed_agent",
        {"opencode_failed": True, "opencode_exit_code": 127, "opencode_run_stderr": "a\nno opencode\n"},
        "opencode ended with status 127 (no opencode)",
    ),
    (
        "opencode_sandboxed_agent",
        {"opencode_failed": True, "opencode_exit_code": 125, "opencode_error_type": "sandbox"},
        "opencode ended with status 125 (sandbox)",
    ),
    ("pi_sandboxed_agent", {"pi_failed": True, "pi_exit_code": 1}, "pi ended with status 1 (no reason)"),
    (
        "terminus_2_sandboxed_agent",
        {"terminus2_completed": False, "error": "Traceback\nRuntimeError: no tmux"},
        "RuntimeError: no tmux",
    ),
    ("pinchbench", {"status": "error", "grading_notes": "run failed"}, "status is error: run failed"),
    ("pinchbench", {"status": "missing_task"}, "missing_task"),
    ("stirrup_agent", {"error_message": "sandbox is gone"}, "sandbox is gone"),
    ("vcqa_agent", {"error": "HTTPError: 404"}, "404"),
]
SOUND: list[tuple[str, dict[str, Any]]] = [
    ("browsecomp_agent", {"agent_error": None}),
    ("cvdp_agent", {"response": {"id": "resp_1"}, "container_stderr": "warning"}),
    ("finance_agent", {"response": {"metadata": {"stop_reason": "max_time"}}}),
    ("gdp_pdf_agent", {"document_delivery": {"limit": "context_length"}}),
    ("harbor_agent", {"metadata": {"verifier_result": {"rewards": {"reward": 0}}, "exception_info": None}}),
    ("mini_swe_agent", {"metadata": {}, "response": SAID}),
    ("mini_swe_agent_2", {"metadata": {"eval_report": {}}, "response": SAID}),
    (
        "mini_swe_agent_2",
        {"metadata": {"eval_report": {"a.b-1": {"resolved": False, "tests_status": {"FAIL_TO_PASS": {}}}}}},
    ),
    ("miniswe_sandboxed_agent", {"termination": {"reason": "timeout", "detail": "budget"}}),
    ("miniswe_sandboxed_agent", {"termination": {"reason": "timeout"}, "agent_started": True}),
    ("opencode_sandboxed_agent", {"opencode_failed": True, "opencode_error_type": "timeout"}),
    ("opencode_sandboxed_agent", {"opencode_failed": False, "opencode_exit_code": 0}),
    ("pi_sandboxed_agent", {"pi_failed": True, "pi_exit_code": 124}),
    ("terminus_2_sandboxed_agent", {"terminus2_completed": False, "error": "...\nTimeoutError"}),
    ("terminus_2_sandboxed_agent", {"terminus2_completed": True, "error": None}),
    ("pinchbench", {"status": "success"}),
    ("stirrup_agent", {"error_message": None}),
    ("vcqa_agent", {"error": "empty model answer"}),
    ("simple_agent", {"error": "of the environment's own", "status": "error", "metadata": {"error": "x"}}),
]


@pytest.mark.parametrize(("agent", "result", "told"), BROKEN)
def test_an_agents_own_way_of_saying_that_it_broke_down(
    agent: str, result: dict[str, Any], told: str
) -> None:
    made = results.interpret_result({"reward": 0.0, **result}, agent="mine", agent_type=agent)
    assert (made["status"], made.get("reward"), made["error"]["kind"]) == ("failed", None, "environment")
    assert made["error"]["type"] == "EnvironmentServerError"
    assert made["error"]["message"].startswith("agent 'mine' reports a failure: ")
    assert told in made["error"]["message"]
    assert results.interpret_result({"reward": 0.0, **result}, agent_type="simple_agent")["reward"] == 0.0


def test_a_models_text_in_a_result_holds_nobody_up() -> None:
    """The daemon reads results for all rollouts: these took it minutes each."""
    began = time.process_time()
    assert breakdown({"container_stderr": "[\n" * 100_000}) is None
    reason = f"\n{'Error' * 20_000}"
    assert breakdown({"agent_error": reason}, "browsecomp_agent") == reason[1:401]
    assert time.process_time() - began < 2


def test_of_a_chain_of_exceptions_the_last_is_the_reason() -> None:
    """It is what the others led to."""
    chain = "Traceback:\n  File x\nKeyError: 'a'\n\nDuring handling:\n  File y\nRuntimeError: no page\n"
    assert breakdown({"agent_error": chain}, "browsecomp_agent") == "RuntimeError: no page"


@pytest.mark.parametrize(("agent", "result"), SOUND)
def test_a_score_stays_a_score(agent: str, result: dict[str, Any]) -> None:
    made = results.interpret_result({"reward": 0.0, **result}, agent_type=agent)
    assert (made["status"], made["reward"]) == ("completed", 0.0)


@pytest.mark.parametrize(
    ("result", "told"),
    [
        ({"_ng_failure_class": "harbor_failed", "error": "OSError: no"}, "harbor_failed: OSError: no"),
        ({"_ng_no_persist": True, "agent_error": "RayActorError"}, "RayActorError"),
        ({"mask_sample": True, "failure_kind": "session_lost"}, "session_lost: "),
        (
            {
                "instance_config": {"mask_sample": True},
                "failure_kind": "judge_failed",
                "failure_reason": "no\nanswer",
            },
            "judge_failed: no answer",
        ),
    ],
)
def test_keys_of_gyms_collector_hold_for_every_agent(result: dict[str, Any], told: str) -> None:
    for agent in (None, "anything", "vcqa_agent"):
        assert str(breakdown({"reward": 0.0, **result}, agent)).startswith(told)


@pytest.mark.parametrize(
    ("result", "told"),
    [
        ({"error": "Verification failed: docker run failed"}, "Verification failed: docker run failed"),
        ({"verifier_error": "Verifier timed out"}, "Verifier timed out"),
        ({"test_output": "a\nbash: /tests/test.sh: not found\n"}, "bash: /tests/test.sh: not found"),
        ({"test_output": ""}, "output"),
        (
            {"model_patch": "diff", "verifier_sandbox_observation": {"error_type": "TimeoutError"}},
            "TimeoutError",
        ),
    ],
)
def test_a_scoring_that_could_not_run_is_no_score(result: dict[str, Any], told: str) -> None:
    made = results.interpret_result(
        {"reward": 0.0, "evaluation_completed": False, **result}, agent_type="simple_agent"
    )
    assert (made["status"], made.get("reward")) == ("failed", None)
    assert told in made["error"]["message"]


def test_a_failure_that_gym_counts_as_zero_is_a_score() -> None:
    """As the documentation of the release after 0.7.0 says. A row that carries the marker itself says nothing."""
    failure = {"_ng_failure_class": "agent_timeout", "_ng_failure_counts_as_zero": True}
    made = results.interpret_result(failure)
    assert (made["status"], made["reward"]) == ("completed", 0.0)
    assert results.interpret_result({**failure, "reward": 1.0}, limit="max_calls")["reward"] == 0.0
    assert results.interpret_result({**failure, "mask_sample": True})["status"] == "masked"
    marked_row = b'{"_ng_failure_counts_as_zero": true}'
    assert results.interpret_result(failure, marked_row)["status"] == "failed"
    assert results.interpret_result({**failure, "_ng_failure_counts_as_zero": False})["status"] == "failed"


SCORED: list[tuple[str, dict[str, Any], str]] = [
    (
        "evaluation_completed",
        {"evaluation_completed": False, "error": "Verification failed: no image"},
        "Verification failed: no image",
    ),
    (
        "container_stderr",
        {
            "container_exit_code": 1,
            "container_stderr": "[01-sim] sandbox create failed for service '01-sim': docker run failed (code=125)",
        },
        "sandbox create failed for service '01-sim': docker run failed",
    ),
    (
        "container_stderr",
        {"container_stderr": "[a] ok\n[b] workspace snapshot failed for service 'b': No such container"},
        "workspace snapshot failed for service 'b': No such container",
    ),
    (
        "failure_reason",
        {
            "failure_reason": "browser unreachable while scoring: TargetClosedError: closed",
            "failure_kind": None,
        },
        "browser unreachable while scoring",
    ),
    (
        "failure_reason",
        {"failure_reason": "browser session not found at verify"},
        "browser session not found",
    ),
    (
        "details.harness_fault",
        {"status": "error", "details": {"harness_fault": True}, "failure_reason": "runner_crashed"},
        "runner_crashed",
    ),
    (
        "results",
        {
            "test_plans_graded": 1,
            "results": [
                {"test_plan": "a", "seeding_failed": False, "error": None},
                {"test_plan": "b", "seeding_failed": False, "error": "Traceback\nFileNotFoundError: docker"},
            ],
        },
        "b: FileNotFoundError: docker",
    ),
    (
        "verification_result.status",
        {"verification_result": {"status": "error", "resolution": None}},
        "its process could not run",
    ),
]
"""The field, a result as a server of nemo-gym 0.7.0 makes it, and what the error says."""
SCORED_SOUND: list[tuple[str, dict[str, Any]]] = [
    ("evaluation_completed", {"evaluation_completed": True, "error": "1 test failed"}),
    ("container_stderr", {"container_stderr": "[01-sim] sandbox exec timed out after 600s"}),
    ("container_stderr", {"container_stderr": "parse_failed: could not extract RTL from model output"}),
    ("failure_reason", {"failure_reason": "no_sql_extracted"}),
    ("details.harness_fault", {"details": {"harness_fault": False}, "failure_reason": None}),
    (
        "results",
        {
            "test_plans_graded": 0,
            "results": [{"test_plan": "a", "seeding_failed": True, "error": "no start.sh"}],
        },
    ),
    ("results", {"results": [{"error": "of another environment"}]}),
    ("verification_result.status", {"verification_result": {"status": "timeout"}}),
]


@pytest.mark.parametrize(("field", "result", "told"), SCORED)
def test_each_field_by_which_a_scoring_says_that_it_could_not_run(
    field: str, result: dict[str, Any], told: str
) -> None:
    made = results.interpret_result({"reward": 0.0, **result}, agent_type="simple_agent")
    assert (made["status"], made.get("reward")) == ("failed", None)
    assert told in made["error"]["message"], field
    row = orjson.dumps(result)
    assert (
        results.interpret_result({"reward": 1.0, **result}, row, agent_type="simple_agent")["reward"] == 1.0
    )


@pytest.mark.parametrize(("field", "result"), SCORED_SOUND)
def test_a_scoring_that_blames_the_policy_is_a_score(field: str, result: dict[str, Any]) -> None:
    made = results.interpret_result({"reward": 0.0, **result}, agent_type="simple_agent")
    assert (made["status"], made["reward"]) == ("completed", 0.0), field


@pytest.mark.parametrize("form", [True, 5, "x", [1], {"a": 1}])
def test_fields_of_another_form_report_nothing(form: Any) -> None:
    assert breakdown({"test_plans_graded": 1, "results": form}) is None
    report = {"metadata": {"eval_report": form}, "response": SAID}
    assert breakdown(report, "mini_swe_agent_2") is None or isinstance(form, dict)


def test_a_scoring_that_ran_is_a_score() -> None:
    """A patch that does not apply is the policy's, and a masked rollout stays one."""
    for result in (
        {"evaluation_completed": True, "error": "1 test failed"},
        {"evaluation_completed": False, "model_patch": None},
    ):
        assert results.interpret_result({"reward": 0.0, **result})["status"] == "completed"
    masked = {"reward": 0.0, "evaluation_completed": False, "mask_sample": True}
    assert results.interpret_result(masked)["status"] == "masked"
    row = {"evaluation_completed": False}
    assert results.interpret_result({"reward": 1.0, **row}, orjson.dumps(row))["status"] == "completed"


def test_a_mask_without_a_failure_is_a_mask() -> None:
    made = results.interpret_result({"reward": 1.0, "mask_sample": True})
    assert made["status"] == "masked"
    degraded = results.interpret_result(
        {"reward": 1.0, "mask_sample": False, "failure_kind": "judge_unparseable"}
    )
    assert (degraded["status"], degraded["reward"]) == ("completed", 1.0)


def test_a_failure_that_the_row_brought_along_is_none() -> None:
    row = {"_ng_failure_class": "transient"}
    assert results.interpret_result({"reward": 1.0, **row}, orjson.dumps(row))["status"] == "completed"
    assert (
        results.interpret_result({"reward": 0.0, "_ng_failure_class": "permanent"}, orjson.dumps(row))[
            "status"
        ]
        == "failed"
    )


def test_a_breakdown_over_a_limit_is_a_truncation_without_a_reward() -> None:
    result = {"reward": 0.0, "metadata": {"error": "429: max_calls"}}
    made = results.interpret_result(result, agent_type="mini_swe_agent_2", limit="max_calls")
    assert (made["status"], made.get("reward"), made.get("error")) == ("truncated", None, None)


def test_the_docs_name_the_agents() -> None:
    named = re.findall(r"^\| `(\w+)` \|", DOCS.read_text(), re.MULTILINE)
    assert {*AGENTS} <= {*named}
    assert {field for field, _, _ in SCORED} == {field for field, _ in SCORED_SOUND} == {*SCORINGS}
    text = DOCS.read_text()
    assert all(f"`{field}" in text for field in SCORINGS)
    assert {agent for agent, _, _ in BROKEN} == {agent for agent, _ in SOUND} - {"simple_agent"} == {*AGENTS}
