"""Rows as an environment server is sent them, and its answers."""

from __future__ import annotations

from typing import Any

import pytest

from gymgate.core import codec
from gymgate.core.config import StackConfig
from gymgate.gym.row_sources import RowSource
from gymgate.rollouts.episodes import EpisodeFailure, failed_episode_fields, failure_error, read_episode
from gymgate.rollouts.result import MAX_MESSAGE
from gymgate.rollouts.row import make_row, row_key
from gymgate.rollouts.row_fields import agent_of, environment_server_of, flat_row, sent_row
from gymgate.runs.collected.run import Collection
from gymgate.runs.described.plan import RolloutPlan
from gymgate.stack.daemon.routing import episode_request

PARAMS = {"input": [{"role": "user", "content": "hello"}]}
ENVELOPE = {"episode_id": {"rollout_id": "r", "attempt": 0}, "task_id": {"taskset": "t", "task_id": "1"}}


def requested(row: dict[str, Any], taskset: str = "maths") -> dict[str, Any]:
    request: dict[str, Any] = codec.loads(episode_request(codec.dumps(row), key="k" * 32, taskset=taskset))
    return request


@pytest.mark.parametrize(
    ("row", "task_id"),
    [
        ({"task_id": 7, "problem_id": "p"}, "7"),
        ({"problem_id": "p", "instance_id": "i", "_ng_task_index": 3}, "p"),
        ({"instance_id": "i"}, "i"),
        ({"task_id": None, "_ng_task_index": 3}, "3"),
        ({"_ng_task_index": 0}, "0"),
        ({"_ng_task_index": True}, row_key({"responses_create_params": PARAMS})),
        ({}, row_key({"responses_create_params": PARAMS})),
    ],
)
def test_a_rows_task_has_an_id(row: dict[str, Any], task_id: str) -> None:
    row = {"responses_create_params": PARAMS, **row}
    assert requested(row)["task"]["task_id"] == {"taskset": "maths", "task_id": task_id}


async def test_a_row_has_the_same_task_id_from_a_run_as_from_any_other_caller() -> None:
    """Wherever it stands in its file: an environment may choose a persona by the id."""
    bodies: list[bytes] = []

    class Recorder:
        async def run(
            self, row: Any, *, policy: Any, environment: Any, limits: Any, record_bodies: bool
        ) -> None:
            bodies.append(sent_row(row).body)

    first: dict[str, Any] = {"responses_create_params": {"input": "first"}}
    row: dict[str, Any] = {"responses_create_params": PARAMS}
    for rows in ([row], [first, row]):
        source = RowSource([make_row(data, "rows.jsonl", line) for line, data in enumerate(rows, 1)], "e")
        plan = RolloutPlan([source])
        run = Collection(stack=StackConfig(environments=("e",)), policy=print, plan=plan)
        for planned in plan.rollouts():
            await run._run_one(Recorder(), planned)  # type: ignore[arg-type]
    ids = [
        codec.loads(episode_request(body, key="k", taskset="t"))["task"]["task_id"]["task_id"]
        for body in (bodies[0], bodies[-1])
    ]
    assert ids == [row_key(row)] * 2


def test_the_key_is_the_episodes_and_nothing_but_the_task_is_sent() -> None:
    row = {
        "responses_create_params": PARAMS,
        "answer": "4",
        "agent_ref": {"name": "a"},
        "task_source": "mine",
    }
    row |= {"skills_ref": {"hash": "h"}, "_ng_attempt_index": 2, "_ng_rollout_id": "other"}
    assert requested(row) == {
        "episode_id": {"rollout_id": "k" * 32, "attempt": 0},
        "task": {
            "task_id": {"taskset": "mine", "task_id": row_key(row)},
            "task_input": {"responses_create_params": PARAMS, "answer": "4"},
        },
    }


def test_a_materialised_row_is_flat_inside_and_goes_out_as_it_came() -> None:
    task = {
        "task_id": {"taskset": "t:train", "task_id": "9"},
        "task_input": {"responses_create_params": PARAMS, "task_id": 9, "answer": "4"},
    }
    row = make_row({**task, "_ng_environment_server": "e"}, "rows.jsonl", 1)
    assert row.data["responses_create_params"] == PARAMS
    assert (row.data["task_id"], row.data["answer"], row.agent) == (9, "4", "e")
    assert sent_row(row.data).taskset == sent_row(task).taskset == "t:train"
    assert requested(row.data)["task"] == task
    assert flat_row(row.data) is row.data


def test_what_a_row_names() -> None:
    """A result of NeMo Gym's collector names both its agent and the environment server in front of it."""
    row = {"_ng_environment_server": "e", "agent_ref": {"name": "a"}}
    assert (agent_of(row), environment_server_of(row)) == ("a", "e")
    assert agent_of({"agent_ref": {"name": "a"}}) == "a"
    assert agent_of({"_ng_environment_server": "e"}) == "e"


def test_a_result_comes_out_of_its_envelope() -> None:
    result = {"reward": 1.0, "response": {}}
    assert read_episode({**ENVELOPE, "result": result, "failure": None}, "r") == result
    assert read_episode({**ENVELOPE, "result": result}, "r") == result
    assert read_episode(result, "r") == result


@pytest.mark.parametrize(
    "change",
    [
        {"result": None, "failure": None},
        {"result": {"reward": 1.0}, "failure": {"failure_reason": "", "terminal": False}},
        {"result": 1.0},
        {"failure": "it failed"},
        {"episode_id": {"rollout_id": "another", "attempt": 0}, "result": {"reward": 1.0}},
        {"episode_id": {"rollout_id": "r", "attempt": 1}, "result": {"reward": 1.0}},
    ],
)
def test_an_envelope_that_contradicts_itself(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"episode|result"):
        read_episode({**ENVELOPE, **change}, "r")


FAILURE = {"failure_reason": "why", "terminal": True, "failure_kind": "verifier_error", "stage": "seed"}
FLAT = {"message": "why", "terminal": True, "kind": "verifier_error", "stage": "seed"}


@pytest.mark.parametrize(
    "answer",
    [
        {**ENVELOPE, "failure": {**FAILURE, "partial_response": {"output": []}}, "result": None},
        {
            "_ng_failure_class": "environment_server_failed",
            **{f"_ng_failure_{name}": value for name, value in FLAT.items()},
            "_ng_failure_partial_response": {"output": []},
        },
    ],
    ids=["envelope", "flat"],
)
def test_a_failure_of_either_form(answer: dict[str, Any]) -> None:
    read = read_episode(answer, "r")
    assert read == EpisodeFailure("why", True, "verifier_error", "seed", {"output": []})


def test_a_failure_that_counts_as_zero_is_a_result() -> None:
    """As the documentation of the release after 0.7.0 says."""
    answer = {"_ng_failure_class": "environment_server_failed", "_ng_failure_counts_as_zero": True}
    assert read_episode(answer, "r") == answer


@pytest.mark.parametrize(
    ("failure", "name", "kind"),
    [
        (EpisodeFailure("x", False, stage="admission"), "EnvironmentBusyError", "infrastructure"),
        (EpisodeFailure("x", False, stage="seed"), "EnvironmentServerError", "environment"),
        (EpisodeFailure("x", True), "EnvironmentServerError", "environment"),
        (EpisodeFailure("Episode timed out", False), "RolloutTimeoutError", "timeout"),
        (EpisodeFailure("x", False, "agent_timeout", "agent"), "RolloutTimeoutError", "timeout"),
        (EpisodeFailure("x", False, "judge_failed", "verification"), "JudgeError", "policy"),
        (EpisodeFailure("x", True, "judge_unparseable"), "JudgeError", "policy"),
    ],
)
def test_each_failure_has_a_class_of_ours(failure: EpisodeFailure, name: str, kind: str) -> None:
    fields = failed_episode_fields(failure, "e")
    assert (fields["status"], fields["error"]["kind"], fields["error"]["type"]) == ("failed", kind, name)
    assert fields["error"]["judge"] is (name == "JudgeError")
    assert fields["error"]["terminal"] is failure.terminal
    assert not (failure.terminal and fields["error"]["retryable"])
    assert "'e'" in fields["error"]["message"]


def test_a_long_reason_becomes_a_short_line() -> None:
    """Its end too, where a traceback says what was raised."""
    error = failure_error(
        EpisodeFailure("first\n" + "x" * 100_000 + "\nlast", False, stage="y" * 100_000), "e"
    )
    assert len(error.message) < 3 * MAX_MESSAGE
    assert "\n" not in error.message
    assert "first" in error.message
    assert error.message.endswith("last")
