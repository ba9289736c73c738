"""Recorded files with broken lines, the config that was recorded, judges' answers in records, results on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gymgate.core.errors import UnknownConversationError
from gymgate.gym.catalog import DataFile, EnvConfig, Environment
from gymgate.gym.catalog.entries import kind_of_file
from gymgate.gym.inside.resolve import ServerInstance, dataset_lists, undefined_models
from gymgate.quality import CheckRequest, RowResult, known
from gymgate.quality.model import replayable, same_reward, worst_verdict
from gymgate.quality.recorded_models import RecordedJudge, RecordedPolicy, recorded_answers, texts_at
from gymgate.quality.recordings import as_rollout, config_for, packaged_rows, read_recordings
from gymgate.quality.reward_trial import cohort_size


def ask(text: str) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": text}]}


def said(text: str) -> dict[str, Any]:
    return {"output": [{"type": "message", "role": "assistant", "content": text}]}


def record(question: str, answer: str, **fields: Any) -> dict[str, Any]:
    return {"responses_create_params": ask(question), "response": said(answer), "reward": 1.0, **fields}


def agent(name: str, type_: str, server: str) -> ServerInstance:
    reference = {"type": "resources_servers", "name": server}
    block = {"entrypoint": "app.py", "resources_server": reference}
    return ServerInstance(name, "responses_api_agents", type_, block)


def environment(tmp_path: Path, lines: list[str], *configs: EnvConfig) -> Environment:
    (tmp_path / "example_rollouts.jsonl").write_text("\n".join(lines))
    rows = [{"responses_create_params": ask(q), "answer": n} for n, q in enumerate(["one", "two", "three"])]
    (tmp_path / "example.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = (
        DataFile("example", tmp_path / "example.jsonl", "rows"),
        DataFile("example_rollouts", tmp_path / "example_rollouts.jsonl", "rollouts"),
        DataFile("example_rollouts_reward_profiling", tmp_path / "nothing.jsonl", "other"),
    )
    return Environment("e", "resources_servers", tmp_path, configs=configs, data=files)


def test_broken_lines_are_named_and_cost_only_themselves(tmp_path: Path) -> None:
    lines = [
        json.dumps(record("two", "b")),
        "<PLACEHOLDER ROW>",
        "",
        json.dumps({"responses_create_params": ask("x")}),
        json.dumps(record("elsewhere", "c")),
    ]
    found, broken = read_recordings(environment(tmp_path, lines))
    assert [sample.name for sample in found] == ["example_rollouts:1", "example_rollouts:5"]
    assert [line.split(" ")[0] for line in broken] == [
        "example_rollouts.jsonl:2",
        "example_rollouts.jsonl:4",
    ]
    assert "JSON" in broken[0]
    assert "no 'response'" in broken[1]
    first, second = found
    assert (first.packaged, first.row["answer"]) == (True, 1)
    assert not second.packaged
    assert second.row["responses_create_params"] == ask("elsewhere")


def test_the_config_is_the_one_that_was_recorded(tmp_path: Path) -> None:
    plain = EnvConfig("e", tmp_path, (agent("plain", "simple_agent", "e"),))
    other = EnvConfig("other", tmp_path, (agent("special", "aviary_agent", "e"),))
    lines = [json.dumps(record("one", "a", agent_ref={"name": name})) for name in ("special", "gone")]
    home = environment(tmp_path, lines, plain, other)
    samples, _ = read_recordings(home)
    chosen, (note,) = config_for(home, samples)
    assert chosen == other
    assert "'gone'" in note
    assert config_for(home, samples[1:])[0] == plain
    assert config_for(home, samples, "e")[0] == plain, "the requested one"


JUDGED = record(
    "q",
    "a",
    judge_evaluations=[
        {"responses_create_params": ask("right?"), "response": said("[[A=B]]"), "verdict_label": "x"},
        {"responses_create_params": ask("swapped?"), "response": said("[[A!=B]]"), "verdict_label": "y"},
    ],
)


async def answer_of(judge: RecordedJudge | RecordedPolicy, question: str) -> str:
    answer = await judge(ask(question))
    text: str = answer["output"][0]["content"][0]["text"]
    return text


async def test_a_judge_says_what_it_said(tmp_path: Path) -> None:
    judge = RecordedJudge("any")
    judge.begin(JUDGED)
    assert await answer_of(judge, "swapped?") == "[[A!=B]]"
    assert await answer_of(judge, "right?") == "[[A=B]]"
    with pytest.raises(UnknownConversationError):
        await judge(ask("again?"))
    assert (judge.calls, judge.refused, judge.judged_by) == (3, 1, "recorded")


async def test_a_policy_that_is_its_own_judge(tmp_path: Path) -> None:
    ((sample,), _) = read_recordings(environment(tmp_path, [json.dumps(JUDGED)]))
    judge = RecordedJudge("any")
    policy = RecordedPolicy(judge)
    judge.begin(JUDGED)
    policy.begin(sample.recording)
    assert await answer_of(policy, "q") == "a"
    assert await answer_of(policy, "right?") == "[[A=B]]"
    judge.begin(None)
    with pytest.raises(UnknownConversationError, match="nearest is"):
        await policy(ask("right?"))


def test_texts_of_judges_are_found_where_the_table_says() -> None:
    rubrics = [{"judge_response": "PASS"}, {"judge_response": "FAIL"}]
    found = list(recorded_answers(record("q", "a", rubric_evaluations=rubrics), "inverse_if"))
    assert [(key, items[0]["content"]) for key, items in found] == [(None, "PASS"), (None, "FAIL")]
    assert not list(recorded_answers(record("q", "a", rubric_evaluations=rubrics), "another"))


def test_verdicts_add_up() -> None:
    assert worst_verdict(["match", "blocked", "differs"]) == "differs"
    assert worst_verdict([]) == "incomplete"
    assert same_reward(0.1 + 0.2, 0.3)
    assert not same_reward(0.0, 1e-3)
    gone = RowResult(recording="a:1", verdict="incomplete", outdated=True)
    kept = RowResult(recording="a:2", verdict="match")
    assert replayable([gone, kept]) == [kept]
    assert replayable([gone]) == [gone]


def test_models_that_no_file_defines_and_datasets_are_found() -> None:
    judge = {"type": "responses_api_models", "name": "judge"}
    unset = [{**judge, "name": "???"}, {**judge, "name": "${model}"}]
    merged = {
        "server": {"resources_servers": {"s": {"judge": judge, "more": [judge, *unset]}}},
        "agent": {
            "responses_api_agents": {
                "simple_agent": {"model_server": {**judge, "name": "policy_model"}, "datasets": [{}]}
            }
        },
        "policy_model": {},
    }
    assert undefined_models(merged) == {"judge"}
    assert dataset_lists(merged) == ["agent.responses_api_agents.simple_agent.datasets"]


def test_settings_do_not_hold_the_environment() -> None:
    one, other = (CheckRequest.model_validate({"environments": name}) for name in ("a", "b"))
    assert one.settings == other.settings
    assert one.settings != CheckRequest.model_validate({"environments": "a", "memory_gb": 1.0}).settings


def test_an_object_among_judges_texts_answers_the_question_that_names_its_fields() -> None:
    kept = {"validation": [{"by": "judge_1", "said": "YES"}, {"by": "rule", "said": "none"}]}
    node = {"first": {"grade": "a"}, **kept}
    assert list(texts_at(node, ["first"])) == ['{"grade":"a"}']
    assert list(texts_at(node, ["validation", "*[by=judge_]", "said"])) == ["YES"]


async def test_judges_that_are_asked_at_once_are_told_apart_by_what_they_are_asked_for() -> None:
    judge = RecordedJudge("bbq")
    told = record("q", "a", answer_judgment={"picked": "b"}, explanation_judgment={"quality": "low"})
    judge.begin(told)
    assert await answer_of(judge, "say its quality as JSON") == '{"quality":"low"}'
    assert await answer_of(judge, "say what was picked as JSON") == '{"picked":"b"}'


def test_a_record_of_an_own_shape_is_read_with_the_row_that_it_names(tmp_path: Path) -> None:
    row = {"responses_create_params": ask("who?"), "source": {"id": "x-7"}}
    shape = {"row": "made_from", "said": "words"}
    line = {"made_from": "x-7", "words": "she", "reward": 0.5}
    made = as_rollout(line, shape, [{"responses_create_params": ask("what?")}, row])
    assert (made["response"]["output"][0]["content"], made["reward"]) == ("she", 0.5)
    assert made["responses_create_params"] == ask("who?")
    assert as_rollout(line, shape, []) == line
    assert as_rollout(line, None, [row]) == line
    assert as_rollout(["she"], shape, [row]) == ["she"]


def test_every_setting_of_the_table_of_knowledge_is_of_its_kind() -> None:
    table = known.known()
    assert all(isinstance(paths, list) for paths in table["judge_texts"].values())
    assert all(isinstance(cause, str) for cause in table["causes"].values())
    assert all("." in key for settings in table["replayed_with"].values() for key in settings)
    assert not set(table["replayed_with"]) & set(table["causes"])


def test_the_size_of_a_cohort_is_read_from_the_config(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    config = EnvConfig("c", path)
    assert cohort_size(config) == 1
    path.write_text("s: {resources_servers: {genrm: {num_rollouts_per_prompt: 16}}}")
    assert cohort_size(config) == 16
    path.write_text("s: {resources_servers: {genrm: {num_rollouts_per_prompt: 100000}}}")
    assert cohort_size(config) == 1


def test_a_cause_is_known_for_an_environment_its_release_or_its_scoring() -> None:
    assert "math_verify" in (known.cause_of("math_with_judge") or "")
    assert "math_verify" in (known.cause_of("any_math", ["math_with_judge"]) or "")
    assert known.cause_of("equivalence_rule") is None
    assert dict(known.replay_settings("lc_niah"))
    assert not known.replay_settings("wmt_translation")


def test_rows_that_nemo_gym_materialised_are_rows_as_well(tmp_path: Path) -> None:
    task = {"task_id": {"taskset": "t", "task_id": "1"}, "task_input": {"responses_create_params": ask("x")}}
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(task) + "\n")
    assert kind_of_file(path) == "rows"
    files = (DataFile("tasks", path, "rows"),)
    (row,) = packaged_rows(Environment("e", "config", tmp_path, data=files))
    assert (row["responses_create_params"], row["_ng_task_id"]) == (ask("x"), task["task_id"])
