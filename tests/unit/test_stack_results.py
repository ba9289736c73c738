"""From an agent's answer to the fields of a rollout."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from gymgate.core.errors import (
    DataError,
    EnvironmentServerError,
    GymgateError,
    PolicyError,
    RolloutTimeoutError,
    ServerDiedError,
)
from gymgate.rollouts import result as results

KEY = "0123456789abcdef" * 2


def read(value: Any) -> dict[str, Any] | None:
    found = results.read_result(json.dumps(value).encode(), key=KEY, rollout_id="r-1")
    return None if found is None else results.measurement_fields(found, b"{}", "route")["result"]


def test_routing_is_taken_out_of_the_result() -> None:
    result = read(
        {
            "reward": 1.0,
            "responses_create_params": {"input": "x", "metadata": {"route": KEY}},
            "response": {"metadata": {"route": KEY, "mine": "kept"}},
            "ng_trajectory": {"rollout_id": KEY},
            "log": f"http://h/ng-rollout/{KEY}/v1",
        }
    )
    assert result == {
        "reward": 1.0,
        "responses_create_params": {"input": "x"},
        "response": {"metadata": {"mine": "kept"}},
        "log": "http://h/ng-rollout/r-1/v1",
    }


@pytest.mark.parametrize("value", [None, [1], "text", 3])
def test_anything_but_an_object_is_no_result(value: Any) -> None:
    assert read(value) is None
    assert results.read_result(b"<html>", key=KEY, rollout_id="r") is None


@pytest.mark.parametrize(
    ("result", "reward"),
    [
        ({"reward": 0.5}, 0.5),
        ({"reward": True}, 1.0),
        ({"reward": None}, None),
        ({}, None),
        ({"reward": math.nan}, None),
    ],
)
def test_a_missing_reward_stays_missing(result: dict[str, Any], reward: float | None) -> None:
    scored = results.score_fields(result)
    assert (scored["status"], scored["reward"]) == ("completed", reward)


@pytest.mark.parametrize(
    ("result", "truncated", "status"),
    [
        ({"mask_sample": True}, None, "masked"),
        ({"instance_config": {"mask_sample": True}}, None, "masked"),
        ({"mask_sample": False}, None, "completed"),
        ({}, "max_calls", "truncated"),
        ({"response": {"status": "incomplete"}}, None, "truncated"),
        (
            {"response": {"status": "incomplete", "metadata": {"ng_termination_reason": "x"}}},
            None,
            "completed",
        ),
        ({"response": {"incomplete_details": {"reason": "max_output_tokens"}}}, None, "truncated"),
        ({"response": {"status": "completed", "incomplete_details": None}}, None, "completed"),
    ],
)
def test_status(result: dict[str, Any], truncated: str | None, status: str) -> None:
    assert results.score_fields({"reward": 1, **result}, truncated)["status"] == status


@pytest.mark.parametrize("large", [10**400, -(10**400), 10**101], ids=["positive", "negative", "its square"])
def test_an_integer_too_large_for_a_figure_is_no_number(large: int) -> None:
    """JSON has integers of any length, and an answer may be one."""
    found = results.read_result(
        b'{"reward": 1.0, "answer": %d, "reward_length": %d}' % (large, large), key=KEY, rollout_id="r-1"
    )
    assert found is not None
    assert results.score_fields(found)["reward"] == 1.0
    measured = results.measurement_fields(found, b"{}", "route")
    assert (measured["metrics"], measured["reward_parts"]) == ({}, {})
    assert measured["result"]["answer"] == large
    assert results.score_fields({**found, "reward": large})["reward"] is None


def test_parts_and_metrics() -> None:
    """The row's own numbers, which Gym repeats or replaces under their names, are no metrics."""
    result = {
        "reward": 0.5,
        "reward_components": {"format": 1, "answer": 0.0, "note": "x"},
        "reward_safety": 0.25,
        "accuracy": 0.75,
        "correct": True,
        "infinite": math.inf,
        "text": "x",
        "my_reward_count": 2,
        "level": 3,
        "attempts": 4,
        "_ng_task_index": 1,
        "mask_sample": False,
    }
    measured = results.measurement_fields(result, b'{"level":3,"attempts":1}', "route")
    assert measured["reward_parts"] == {"format": 1.0, "answer": 0.0, "reward_safety": 0.25}
    assert measured["metrics"] == {"accuracy": 0.75, "correct": 1.0, "my_reward_count": 2.0}


def test_a_metric_with_the_name_of_a_row_field_is_in_no_rollout() -> None:
    """By value it would be left out only where it equals the row's, and its mean would be one of the others."""
    row = b'{"num_steps":5}'
    measured = [
        results.measurement_fields({"num_steps": taken, "score": 1}, row, "route") for taken in (5, 4, 3)
    ]
    assert [each["metrics"] for each in measured] == [{"score": 1.0}] * 3


def test_a_number_of_the_row_is_no_reward_part() -> None:
    """Else a row's `reward_threshold` would be an objective with a weight of its own."""
    result = {"reward": 1.0, "reward_threshold": 0.8, "reward_style": 0.5}
    measured = results.measurement_fields(result, b'{"reward_threshold":0.8}', "route")
    assert measured["reward_parts"] == {"reward_style": 0.5}


@pytest.mark.parametrize(
    ("error", "kind", "retryable"),
    [
        (ServerDiedError("gone", server="s"), "infrastructure", True),
        (RolloutTimeoutError("slow"), "timeout", True),
        (PolicyError("bad", endpoint="http://h", status_code=401), "policy", False),
        (PolicyError("busy", status_code=503, retryable=True), "policy", True),
        (DataError("row"), "data", False),
        (EnvironmentServerError("500", server="s", status_code=500), "environment", False),
    ],
)
def test_failures_say_whose_fault(error: GymgateError, kind: str, retryable: bool) -> None:
    failed = results.error_fields(error)
    assert failed["status"] == "failed"
    assert "reward" not in failed
    assert (failed["error"]["kind"], failed["error"]["retryable"]) == (kind, retryable)
    rollout = results.failed_rollout(error, id="r")
    assert rollout.reward is None
    assert rollout.error is not None
    assert rollout.error.type == type(error).__name__
    assert rollout.error.server == (getattr(error, "server", None) or getattr(error, "endpoint", None))


@pytest.mark.parametrize(("status", "kind"), [(422, DataError), (400, EnvironmentServerError)])
def test_only_a_row_that_is_rejected_is_the_rows_fault(status: int, kind: type[GymgateError]) -> None:
    assert type(results.run_error(status, b'{"detail": "no"}', "a")) is kind


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (b'"Hit an exception:\\n  no"', "Hit an exception: no"),
        (b'{"detail": [{"loc": ["body", "x", 0], "msg": "Field required"}]}', "x.0: Field required"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b"<html>\n502</html>", "<html> 502</html>"),
        (b'{"a": 1}', '{"a":1}'),
    ],
)
def test_an_error_body_is_one_line(body: bytes, line: str) -> None:
    assert results.error_line(body) == line
    assert len(results.error_line(b"x" * 100_000)) < 700


def test_an_agents_422_is_the_rows_fault() -> None:
    assert isinstance(results.run_error(422, b"{}", "a"), DataError)
    odd = results.run_error(
        422, b'{"detail": [{"msg": "no", "loc": 5}, {"msg": "nor this", "loc": null}]}', "a"
    )
    assert "nor this" in odd.message
    error = results.run_error(500, b'"boom"', "a")
    assert isinstance(error, EnvironmentServerError)
    assert (error.server, error.status_code) == ("a", 500)


def test_an_exception_of_a_server_that_the_agent_called_is_told_as_it_was() -> None:
    inner = json.dumps(repr(NameError("name 'txt' is not defined"))).encode()
    for name in ("SimpleAgent___own_agent", "LegacyAgent___own_environment"):
        inner = json.dumps(f"Hit an exception in {name} calling an inner server: {inner!r}").encode()
        error = results.run_error(500, inner, "own_agent")
        assert "NameError(\"name 'txt' is not defined\")" in error.message
        assert "own_environment" not in error.message
        assert "\\" not in error.message
    lacking = b'{"detail":[{"type":"missing","loc":["body","letter"],"msg":"Field required"}]}'
    told = json.dumps(f"Hit an exception in A___a calling an inner server: {lacking!r}").encode()
    assert "letter: Field required" in results.run_error(500, told, "a").message
    assert "calling an inner server: b'" in results.run_error(500, told[:-9] + b'"', "a").message


@pytest.mark.parametrize("deep", [f"b''{'-' * 100_000}1, b''", "+".join(["b''"] * 100_000)])
def test_an_inner_answer_that_python_cannot_read_is_the_environments_error(deep: str) -> None:
    """It was an internal error of the daemon's, since Python gives up at such depths in its own way."""
    told = json.dumps(f"Hit an exception in A___a calling an inner server: {deep}").encode()
    assert isinstance(results.run_error(500, told, "a"), EnvironmentServerError)


def test_an_id_with_quotes_replaces_the_key_all_the_same() -> None:
    body = json.dumps({"log": f"at {KEY}", "reward": 1.0}).encode()
    found = results.read_result(body, key=KEY, rollout_id='a"b\\c')
    assert found is not None
    assert found == {"log": 'at a"b\\c', "reward": 1.0}


def test_an_answer_that_an_agent_cannot_read_is_its_models_fault() -> None:
    """NeMo Gym's schema is stricter than endpoints are, as of an output without `annotations`."""
    said = repr(RuntimeError('Received an invalid response from model server: {"output": []}'))
    inner = json.dumps(said).encode()
    outer = json.dumps(f"Hit an exception in A___a calling an inner server: {inner!r}").encode()
    for body in (inner, outer):
        error = results.run_error(500, body, "a")
        assert results.rollout_error(error).kind == "policy"
        assert "invalid response" in error.message


def test_of_a_long_error_both_ends_are_shown() -> None:
    text = "first " + "a " * 200_000 + "last"
    line = results.one_line(text)
    assert (line.startswith("first a a"), line.endswith("a a last"), len(line) < 700) == (True, True, True)
