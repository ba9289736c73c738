"""Figures of rollouts: against the definitions, and over shards, overlaps, gaps and numbers that are none."""

from __future__ import annotations

import csv
import itertools
import math
import random
import re
import tracemalloc
from pathlib import Path
from typing import Any

import orjson
import pytest
from click.testing import CliRunner

from gymgate.cli.aggregate import command
from gymgate.cli.view import command as view
from gymgate.core.errors import ConfigError, DataError, GymgateError, MissingExtraError
from gymgate.core.extras import install_command
from gymgate.results import tables
from gymgate.results.report import write_report
from gymgate.runs.counted import statistics as st
from gymgate.runs.counted.aggregate import read_runs
from gymgate.runs.counted.metrics import keep, numbered, parse_bounds, summary_rows, task_rows
from gymgate.runs.counted.tasks import CollectedTasks
from gymgate.runs.stored.attempts import Attempt
from gymgate.runs.stored.score import score_of

SETTINGS = {"policy": {"type": "http", "model": "m"}}


def line(key: int, repeat: int, reward: Any, *, answer: Any = None, **fields: Any) -> dict[str, Any]:
    value = {"row_key": f"{key:016x}", "occurrence": 0, "repeat": repeat, "seed": None, "task": key}
    value |= {
        "environment": "mcqa",
        "agent": "a",
        "status": "completed",
        "reward": reward,
        "source": "s",
        "line": key + 1,
    }
    value["result"] = {"reward": reward, **({"extracted_answer": answer} if answer is not None else {})}
    return {**value, **fields}


def write_run(
    path: Path, lines: list[dict[str, Any]], *, failures: list[dict[str, Any]] | None = None, **run: Any
) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    described = {"format": 1, "settings": SETTINGS, "extent": {}, **run}
    (path / "run.json").write_bytes(orjson.dumps(described))
    (path / "rollouts.jsonl").write_text("".join(f"{_json(value)}\n" for value in lines))
    (path / "failures.jsonl").write_text("".join(f"{_json(value)}\n" for value in failures or ()))
    return path


def test_a_rollout_more_of_a_task_takes_few_bytes() -> None:
    """A million rollouts are read in 300 MB: equal scores are one object."""
    collected = CollectedTasks()

    def grow(repeats: range) -> int:
        before = tracemalloc.get_traced_memory()[0]
        for repeat in repeats:
            for key in range(50):
                reward, answer = float((key + repeat) % 2), "B" * (repeat % 2)
                collected.add(score_of(Attempt.read(line(key, repeat, reward, answer=answer), Path("r"), 1)))
        return tracemalloc.get_traced_memory()[0] - before

    tracemalloc.start()
    try:
        grow(range(16))
        assert grow(range(16, 216)) / (200 * 50) < 40
    finally:
        tracemalloc.stop()
    assert summary_rows(collected)[0]["rollouts"] == 216 * 50


def _json(value: Any) -> str:
    import json

    return json.dumps(value)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_pass_at_k_is_the_chance_that_one_of_k_drawn_rollouts_passes(count: int) -> None:
    for passed, k in itertools.product(range(count + 1), range(1, count + 1)):
        scores = [1.0] * passed + [0.0] * (count - passed)
        drawn = list(itertools.combinations(scores, k))
        assert st.pass_at_k(scores, k) == pytest.approx(sum(map(max, drawn)) / len(drawn))


def test_pass_at_k_of_too_few_or_of_graded_scores() -> None:
    assert st.pass_at_k([1.0], 2) is None
    assert st.pass_at_k([], 1) is None
    assert st.pass_at_k([0.2, 0.5, 0.9], 2) == pytest.approx((0.5 + 0.9 + 0.9) / 3)
    assert st.pass_at_k([-1.0, -3.0], 2) == -1.0
    assert st.pass_at_k([0.0] * 2000 + [1.0], 1000) == pytest.approx(1000 / 2001)


@pytest.mark.parametrize(
    ("answers", "scores", "expected"),
    [
        (["a", "a", "b"], [1, 1, 0], 1.0),
        (["a", "b", "b"], [1, 0, 0], 0.0),
        (["a", "b"], [1, 0], 0.5),
        ([None, None], [0, 0], 0.0),
        ([None, "a", None], [0, 1, 0], 1.0),
    ],
)
def test_majority(answers: list[str | None], scores: list[float], expected: float) -> None:
    assert st.majority_at_k(scores, answers, len(scores)) == expected


def test_ks_and_errors() -> None:
    assert st.default_ks(0) == []
    assert st.default_ks(1) == [1]
    assert st.default_ks(16) == [1, 2, 4, 8, 16]
    assert st.default_ks(6) == [1, 2, 4, 6]
    assert st.deviation([1.0]) is None
    assert st.standard_error([0.0, 1.0]) == pytest.approx(0.5)
    assert st.run_means([[1, 0], [0, 0], [1]]) == [2 / 3]


def test_shards_give_what_one_run_gives(tmp_path: Path) -> None:
    dice = random.Random(3)
    lines = [
        line(key, r, float(dice.random() < 0.4), answer=dice.choice("abc"))
        for key in range(9)
        for r in range(8)
    ]
    whole = write_run(tmp_path / "whole", lines)
    shuffled = random.Random(4).sample(lines, len(lines))
    for part in range(3):
        write_run(tmp_path / "parts" / f"shard-{part + 1}-of-3", shuffled[part::3])
    one, parts = read_runs([whole]).tasks, read_runs([tmp_path / "parts"]).tasks
    assert list(task_rows(one)) == list(task_rows(parts))
    assert summary_rows(one) == summary_rows(parts)
    [row] = summary_rows(one)
    means = [st.mean(task.rewards()) for task in one.ordered()]
    assert row["tasks"] == 9
    assert row["rollouts"] == 72
    assert row["pass@1"] == pytest.approx(sum(means) / 9)  # type: ignore[arg-type]
    assert row["pass@1_ci95_high"] - row["pass@1"] == pytest.approx(2.3060 * row["pass@1_se"], rel=1e-4)
    assert {f"maj@{k}" for k in (1, 2, 4, 8)} <= set(row)


def test_an_attempt_that_reached_no_environment_is_of_that_of_its_row(tmp_path: Path) -> None:
    attempt = {
        **line(0, 0, None, environment="", status="failed"),
        "final": False,
        "error": {"kind": "timeout"},
    }
    collected = read_runs([write_run(tmp_path, [line(0, 0, 1.0)], failures=[attempt])]).tasks
    [usage] = collected.usage.rows({})
    assert (usage.environment, usage.rollouts) == ("mcqa", 2)


@pytest.mark.parametrize(("passes", "low", "high"), [([1, 1, 2], 0.0, None), ([3, 3, 2], None, 1.0)])
def test_the_interval_of_a_pass_rate_stays_between_0_and_1(
    tmp_path: Path, passes: list[int], low: float | None, high: float | None
) -> None:
    """Three tasks of four rollouts; where the t interval would leave what is possible, it ends there."""
    if low is not None:
        passes = [0, 0, passes[0]]
    lines = [
        line(k, r, float(r < count))
        for k, count in enumerate(passes)
        for r in range(4 if low is not None else 3)
    ]
    [row] = summary_rows(read_runs([write_run(tmp_path, lines)]).tasks)
    width = st.t_quantile(2) * row["pass@1_se"]
    assert row["pass@1_ci95_low"] == pytest.approx(row["pass@1"] - width if low is None else low)
    assert row["pass@1_ci95_high"] == pytest.approx(row["pass@1"] + width if high is None else high)
    assert not 0 <= row["pass@1"] - width <= row["pass@1"] + width <= 1


@pytest.mark.parametrize(
    ("rewards", "low", "high"),
    [
        ([[1.0, 1.0]] * 5, 0.025 ** (1 / 5), 1.0),  # (Clopper-Pearson, all of five)
        ([[0.0]] * 20, 0.0, 1 - 0.025 ** (1 / 20)),
        ([[1.0] * 4], 0.025, 1.0),
        ([[0.5]] * 5, None, None),
    ],
)
def test_tasks_that_do_not_vary_have_no_error_and_an_exact_interval(
    tmp_path: Path, rewards: list[list[float]], low: float | None, high: float | None
) -> None:
    lines = [line(key, r, reward) for key, group in enumerate(rewards) for r, reward in enumerate(group)]
    run = write_run(tmp_path / "run", lines)
    [row] = summary_rows(read_runs([run]).tasks)
    assert (row["mean_reward_se"], row["pass@1_se"]) == (None, None)
    assert (row["pass@1_ci95_low"], row["pass@1_ci95_high"]) == (pytest.approx(low), pytest.approx(high))
    printed = CliRunner().invoke(command, [str(run)]).stdout
    assert f"{row['mean_reward']:.3f} ±n/a" in printed


def test_graded_rewards_have_a_mean_over_rollouts_and_an_interval_beyond_1(tmp_path: Path) -> None:
    lines = [line(0, repeat, 7.0) for repeat in range(3)] + [line(1, 0, 3.0)]
    [row] = summary_rows(read_runs([write_run(tmp_path / "run", lines)]).tasks)
    assert (row["mean_reward"], row["pass@1"]) == (6.0, 5.0)
    assert row["pass@1_ci95_low"] < 3 < 7 < row["pass@1_ci95_high"]


def test_the_interval_of_shares_ends_at_0_and_1(tmp_path: Path) -> None:
    """Of rewards like 0.5, too, as that of a comparison."""
    [row] = summary_rows(read_runs([write_run(tmp_path / "run", [line(0, 0, 0.5), line(1, 0, 0.9)])]).tasks)
    assert (row["pass@1_ci95_low"], row["pass@1_ci95_high"]) == (0.0, 1.0)


def test_the_first_rollouts_of_a_task_are_those_of_its_first_seed(tmp_path: Path) -> None:
    """In whatever order they ended."""
    rewards = {(0, 0): 0.1, (0, 1): 0.9, (1, 0): 0.2, (1, 1): 0.3}
    lines = [line(0, repeat, reward, seed=seed) for (seed, repeat), reward in rewards.items()]
    for order in (lines, lines[::-1]):
        [row] = task_rows(read_runs([write_run(tmp_path / "run", order)]).tasks)
        assert row["rewards"] == [*rewards.values()]


def test_what_has_no_answer_has_no_vote_and_long_answers_are_told_apart(tmp_path: Path) -> None:
    """Three rollouts answered nothing; of the others two agree, with as long a beginning as the third."""
    same, other = "x" * 100 + "a", "x" * 100 + "b"
    lines = [line(0, repeat, 0.0, result={"extracted_answer": None}) for repeat in range(3)]
    lines += [line(0, 3, 0.0, answer=other), line(0, 4, 1.0, answer=same), line(0, 5, 1.0, answer=same)]
    [row] = task_rows(read_runs([write_run(tmp_path / "run", lines)]).tasks)
    assert row["maj@6"] == 1.0
    lines = [line(0, repeat, 1.0, answer=f"{'x' * 100}{repeat}") for repeat in range(2)]
    lines += [line(0, repeat, 0.0, answer="short") for repeat in (2, 3, 4)]
    lines += [line(0, repeat, 1.0, answer=f"{'x' * 100}{repeat}") for repeat in (5, 6)]
    [row] = task_rows(read_runs([write_run(tmp_path / "run", lines)]).tasks)
    assert row["maj@7"] == 0.0, "three short answers are more than four long ones that only begin alike"


def test_calls_and_tokens_are_the_policys_over_all_that_finished(tmp_path: Path) -> None:
    calls = [
        {"model_server": "policy_model", "usage": {"output_tokens": 10}},
        {"model_server": "judge", "usage": {"output_tokens": 500}},
    ]
    lines = [line(0, 0, 1.0, calls=calls), line(0, 1, 0.0, calls=calls, status="masked")]
    [row] = task_rows(read_runs([write_run(tmp_path / "run", lines)]).tasks)
    assert (row["mean_calls"], row["mean_output_tokens"]) == (1.0, 10.0)


def test_a_rollout_that_was_only_tried_is_missing_and_counts_once(tmp_path: Path) -> None:
    error = {"kind": "policy", "type": "PolicyError", "message": "gone"}
    tried = [line(1, 0, None, error=error, final=False)]
    run = write_run(tmp_path / "run", [line(0, 0, 1.0)], failures=tried, extent={"rollouts": 2})
    collected = read_runs([run])
    assert (collected.tasks.counts.failed, len(collected.missing)) == (0, 1)
    assert "1 of 2" in collected.missing[0]
    tried_once: list[Attempt] = []
    read_runs([run, run], first_of_overlap=True, see_attempt=tried_once.append)
    assert len(tried_once) == 1


def test_what_is_not_measured_is_counted_apart(tmp_path: Path) -> None:
    failure = {**line(1, 1, None), "final": True, "error": {"kind": "timeout"}}
    lines = [
        line(0, 0, 1.0),
        line(0, 1, 0.0, status="masked"),
        line(1, 0, float("nan")),
        line(1, 2, None),
        line(1, 3, 1.0, status="truncated"),
    ]
    run = write_run(
        tmp_path,
        lines,
        failures=[failure, failure, {**line(0, 0, None), "final": True}],
        extent={"rollouts": 8},
    )
    collected = read_runs([run])
    [row] = summary_rows(collected.tasks)
    counts = {name: row[name] for name in ("rollouts", "scored", "masked", "unscored", "truncated", "failed")}
    assert counts == {"rollouts": 6, "scored": 2, "masked": 1, "unscored": 2, "truncated": 1, "failed": 1}
    assert row["mean_reward"] == 1.0
    assert any("2 of 8 " in note for note in collected.notes)
    assert row["account"].endswith("; 1 failed (1 by timeout), asked again 2 times")
    assert any("finite" in note for note in collected.notes)


def test_a_masked_rollout_has_no_vote(tmp_path: Path) -> None:
    """Nor does it take the place of one: answers stay beside their own rewards."""
    masked = line(0, 0, 1.0, status="masked", answer="c")
    given = [(1.0, "a"), (1.0, "a"), (0.0, "c")]
    run = write_run(
        tmp_path, [masked, *(line(0, r, score, answer=text) for r, (score, text) in enumerate(given, 1))]
    )
    [row] = task_rows(read_runs([run]).tasks)
    assert (row["mean_reward"], row["maj@3"]) == (pytest.approx(2 / 3), 1.0)


UNEQUAL = [
    *(line(0, r, score, answer=text) for r, (score, text) in enumerate([(1.0, "a"), (0.0, "b"), (1.0, "a")])),
    *(line(1, r, score, answer=text) for r, (score, text) in enumerate([(0.0, "c"), (0.0, "c")])),
    line(2, 0, None),
]
"""Tasks of three, two and no scored rollouts."""


def test_every_metric_of_a_row_is_over_the_same_tasks(tmp_path: Path) -> None:
    run = write_run(tmp_path, UNEQUAL)
    [row] = summary_rows(read_runs([run]).tasks)
    assert (row["tasks"], row["scored_tasks"], row["max_k"]) == (3, 2, 2)
    assert (row["pass@1"], row["pass@2"]) == (pytest.approx(1 / 3), 0.5)
    assert (row["maj@1"], row["maj@2"]) == (0.5, 0.25)
    assert not {"pass@3", "maj@3"} & set(row)
    # runs: the first rollouts of both tasks, then the second ones; only one task has a third
    assert row["pass@1_std_runs"] == pytest.approx(st.deviation([0.5, 0.0]))


def test_a_larger_k_takes_the_tasks_that_have_it(tmp_path: Path) -> None:
    run = write_run(tmp_path, UNEQUAL)
    [row] = summary_rows(read_runs([run]).tasks, (1, 3))
    assert (row["tasks"], row["scored_tasks"], row["max_k"]) == (3, 1, 3)
    assert (row["pass@1"], row["pass@3"], row["maj@3"]) == (pytest.approx(2 / 3), 1.0, 1.0)
    assert "pass@2" not in row
    for arguments, shown in (([], ["3", "2", "pass@2"]), (["-k", "3"], ["3", "1", "pass@3"])):
        done = CliRunner().invoke(command, [str(run), *arguments])
        names, cells = (re.split(r"  +", text) for text in done.stdout.splitlines()[:2])
        place = names.index("tasks")
        assert [*cells[place : place + 2], names[-1]] == shown, done.output
    with pytest.raises(ConfigError, match="'0,x'"):
        CliRunner().invoke(command, [str(run), "-k", "0,x"], catch_exceptions=False)


def test_votes_of_several_environments_are_over_all_their_tasks(tmp_path: Path) -> None:
    other = [line(9, r, 1.0, environment="weather") for r in range(2)]
    rows = {
        row["environment"]: row
        for row in summary_rows(read_runs([write_run(tmp_path, UNEQUAL + other)]).tasks)
    }
    assert (rows["all"]["scored_tasks"], rows["all"]["pass@2"]) == (3, pytest.approx(2 / 3))
    assert "maj@2" in rows["mcqa"]
    assert "maj@2" not in rows["all"]


def test_a_row_is_one_task_whatever_its_failures_call_the_environment(tmp_path: Path) -> None:
    """A failure from before the stack knew its agent, of a rollout that finished later, and of another one that did not."""
    failures = [
        {**line(0, r, None, environment=""), "final": True, "error": {"kind": "data"}} for r in (0, 1)
    ]
    for shard, lines in ((1, [line(0, 0, 1.0)]), (2, [])):
        write_run(
            tmp_path / f"shard-{shard}-of-2",
            lines,
            failures=failures[shard - 1 : shard],
            extent={"shard": [shard, 2]},
        )
    [task] = read_runs([tmp_path]).tasks.ordered()
    assert (task.environment, len(task.scores), task.failed) == ("mcqa", 1, 1)


def test_a_rollout_that_failed_permanently_in_two_runs_failed_once(tmp_path: Path) -> None:
    failure = {**line(0, 0, None), "final": True, "error": {"kind": "data"}}
    paths = [write_run(tmp_path / name, [line(0, 1, 1.0)], failures=[failure]) for name in "ab"]
    runs = read_runs(paths, first_of_overlap=True)
    assert (len([*runs.rollouts()]), len([*runs.rollouts(failed=True)])) == (1, 2)


def test_a_rollout_that_failed_again_counts_as_it_ended_the_last_time(tmp_path: Path) -> None:
    """So after `--rerun-failed` the table says why it fails now, and not what was mended before."""

    def failures(reason: str) -> list[dict[str, Any]]:
        error = {"kind": reason, "type": "Error", "message": reason, "judge": reason == "judge"}
        return [{**line(0, 0, None), "final": final, "error": error} for final in (False, True)]

    run = write_run(tmp_path, [line(0, 1, 1.0)], failures=[*failures("judge"), *failures("timeout")])
    table = read_runs([run])
    assert [*table.tasks.counts.causes] == ["Error: timeout"]
    assert "1 failed (1 by timeout), asked again 3 times" in summary_rows(table.tasks)[0]["account"]
    assert [attempt.error and attempt.error.kind for attempt in table.rollouts(failed=True)] == [
        None,
        "timeout",
    ]


def test_a_rollout_that_will_be_tried_again_has_not_failed(tmp_path: Path) -> None:
    attempt = {**line(0, 0, None), "final": False, "error": {"kind": "timeout"}}
    [task] = read_runs([write_run(tmp_path, [line(0, 1, 1.0)], failures=[attempt])]).tasks.ordered()
    assert (len(task.scores), task.failed) == (1, 0)


def test_a_rollout_that_is_in_two_runs_is_missing_in_neither(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", [line(0, 0, 1.0), line(0, 1, 1.0)], extent={"rollouts": 2})
    second = write_run(tmp_path / "b", [line(0, 1, 0.0), line(0, 2, 0.0)], extent={"rollouts": 2})
    assert read_runs([first, second], first_of_overlap=True).missing == []


def test_a_directory_without_a_run_beside_others_is_missing(tmp_path: Path) -> None:
    """As a seed of an array that never began."""
    run = write_run(tmp_path / "seed-0", [line(0, 0, 1.0)])
    for arguments, code in (((), 0), (("--complete",), 1)):
        done = CliRunner().invoke(command, [str(run), str(tmp_path / "seed-1"), *arguments])
        assert done.exit_code == code, done.output
        assert str(tmp_path / "seed-1") in done.stderr
        assert "mcqa" in done.stdout


def test_bounds_need_a_file_to_write(tmp_path: Path) -> None:
    done = CliRunner().invoke(command, [str(write_run(tmp_path, UNEQUAL)), "--keep", "0.1..0.9"])
    assert isinstance(done.exception, ConfigError)
    assert "0.1..0.9" in str(done.exception)


def test_overlapping_shards_are_named(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", [line(0, 0, 1.0), line(0, 1, 1.0)])
    second = write_run(tmp_path / "b", [line(0, 1, 0.0), line(0, 2, 0.0)])
    with pytest.raises(ConfigError, match=r"\b1 .*b\b.*a\b.*\(row 0000000000000000 repeat 1\)"):
        read_runs([first, second])
    collected = read_runs([first, second], first_of_overlap=True).tasks
    assert [task.rewards() for task in collected.ordered()] == [[1.0, 1.0, 0.0]]


def test_two_policies_are_not_mixed(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", [line(0, 0, 1.0)])
    second = write_run(tmp_path / "b", [line(0, 1, 1.0)], settings={"policy": {"type": "http", "model": "n"}})
    with pytest.raises(
        ConfigError, match=r"different settings \(policy\.model: 'm' there, 'n' here\).*gymgate compare"
    ):
        read_runs([first, second])


def test_runs_that_score_an_environment_differently_are_named(tmp_path: Path) -> None:
    """Without the values, some of which may be secrets; other environments may have other settings."""

    def write(name: str, number: int, judge: str, *environments: tuple[str, str]) -> Path:
        settings = {
            "policy": {"type": "http", "model": "m"},
            "judges": {"judge": {"model": judge}},
            "environments": [{"name": name, "content": {"app.py": digest}} for name, digest in environments],
        }
        return write_run(tmp_path / name, [line(0, number, 1.0)], settings=settings)

    first = write("a", 0, "small", ("mcqa", "12"))
    same = write("b", 1, "small", ("mcqa", "12"), ("other", "34"))
    grader = write("c", 2, "small", ("mcqa", "56"))
    judge = write("d", 3, "large", ("mcqa", "12"))
    assert read_runs([first, same]).notes == []
    assert read_runs([first, same, grader, judge]).notes == [
        f"{first} and {grader} may score mcqa differently: environment.content.app.py differ",
        f"{first} and {judge} may score mcqa differently: judges.judge.model differ",
    ]


def test_runs_that_score_context_overflows_otherwise_are_not_mixed(tmp_path: Path) -> None:
    first, second = (
        write_run(
            tmp_path / overflow,
            [line(0, repeat, 1.0)],
            settings={"policy": {"type": "http", "model": "m"}, "limits": {"context_overflow": overflow}},
        )
        for repeat, overflow in enumerate(("answer", "refuse"))
    )
    with pytest.raises(ConfigError, match="context_overflow: 'answer' there, 'refuse' here"):
        read_runs([first, second])


def test_shards_of_different_graders_are_not_one_run(tmp_path: Path) -> None:
    """Two machines may have started them at once, of two states of the code."""
    for index, grader in ((1, "old"), (2, "new")):
        settings = {**SETTINGS, "environments": [{"name": "mcqa", "content": {"app.py": grader}}]}
        write_run(
            tmp_path / f"shard-{index}-of-2",
            [line(index, 0, 1.0)],
            settings=settings,
            extent={"shard": [index, 2]},
        )
    with pytest.raises(ConfigError, match=r"content\.app\.py"):
        read_runs([tmp_path])
    assert read_runs([tmp_path / "shard-1-of-2"]).tasks.counts.rollouts == 1


def test_shards_that_started_at_once_may_have_salts_of_their_own(tmp_path: Path) -> None:
    for index in (1, 2):
        settings = {**SETTINGS, "salt": str(index), "variables": {"MODE": f"digest {index}"}}
        write_run(tmp_path / f"shard-{index}-of-2", [], settings=settings, extent={"shard": [index, 2]})
    assert len(read_runs([tmp_path]).runs) == 2


def test_shards_that_were_run_differently_are_named(tmp_path: Path) -> None:
    for index, seeds in ((1, [0]), (2, [1])):
        extent = {"shard": [index, 2], "seeds": seeds}
        write_run(tmp_path / f"shard-{index}-of-2", [line(index, 0, 1.0)], extent=extent)
    (note,) = [note for note in read_runs([tmp_path]).notes if "run differently" in note]
    assert "seeds" in note


def test_bounds_keep_rows_of_their_environment_alone(tmp_path: Path) -> None:
    """Two environments can have a row of one content."""
    lines = [
        line(0, repeat, float(repeat < right), environment=name)
        for name, right in (("mcqa", 1), ("easy", 2))
        for repeat in range(2)
    ]
    run, output = write_run(tmp_path / "r", lines), tmp_path / "kept.jsonl"
    CliRunner().invoke(command, [str(run), "-o", str(output), "--keep", "0.1..0.9"])
    assert [orjson.loads(row)["environment"] for row in output.read_bytes().splitlines()] == ["mcqa"]


def test_missing_shards_are_named(tmp_path: Path) -> None:
    write_run(tmp_path / "x" / "shard-2-of-4", [line(0, 0, 1.0)], extent={"shard": [2, 4]})
    assert read_runs([tmp_path / "x"]).notes == [f"{tmp_path / 'x'}: shards 1, 3, 4 of 4 are missing"]
    for arguments, code in (((), 0), (("--complete",), 1)):
        done = CliRunner().invoke(command, [str(tmp_path / "x"), *arguments])
        assert done.exit_code == code, done.output
        assert "shards 1, 3, 4 of 4 are missing" in done.output


def test_of_more_missing_shards_than_anybody_has_the_first_are_named(tmp_path: Path) -> None:
    """A large number in somebody's `run.json` took all memory."""
    write_run(tmp_path / "x" / "shard-2-of-4", [line(0, 0, 1.0)], extent={"shard": [2, 1 << 60]})
    (note,) = read_runs([tmp_path / "x"]).notes
    assert "shards 1, 3, 4, 5" in note
    assert note.endswith(f"100, 101, ... of {1 << 60} are missing")


@pytest.mark.parametrize(
    ("content", "reason"),
    [("{broken\n", "rollouts.jsonl:1: .*JSON"), ('{"reward": 1}\n', "rollouts.jsonl:1: .*rollout")],
)
def test_a_broken_line_is_named(tmp_path: Path, content: str, reason: str) -> None:
    run = write_run(tmp_path, [])
    (run / "rollouts.jsonl").write_text(content)
    with pytest.raises(DataError, match=reason):
        read_runs([run])


def test_a_directory_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=re.escape(str(tmp_path))):
        read_runs([tmp_path])


def test_bounds(tmp_path: Path) -> None:
    run = write_run(tmp_path, [line(k, r, float(r < k)) for k in range(5) for r in range(4)])
    kept = [task.task for task in keep(read_runs([run]).tasks, *parse_bounds("0.1..0.9"))]
    assert kept == [1, 2, 3]
    assert [task.task for task in keep(read_runs([run]).tasks, *parse_bounds("0.25..0.75"))] == [1, 2, 3]
    assert parse_bounds("..0.5") == (-math.inf, 0.5)
    for wrong in ("0.5", "a..b", "0.9..0.1"):
        with pytest.raises(ConfigError, match="--keep"):
            parse_bounds(wrong)


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        ("=cmd|' /C calc'!A0", "'=cmd|' /C calc'!A0"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("+1+1", "'+1+1"),
        ("-A1", "'-A1"),
        ("\t=1", "'\t=1"),
        ("\r=1", "'\r=1"),
        ("\n=1", "'\n=1"),
        ("\uff1d1", "'\uff1d1"),
        (-0.5, "-0.5"),
        ("-0.5", "-0.5"),
        ("+3", "+3"),
        ("a=1", "a=1"),
    ],
)
def test_no_text_of_a_table_is_a_formula(value: Any, cell: str, tmp_path: Path) -> None:
    """A spreadsheet would run it. The name of a column may be an environment's too."""
    tables.write_table(tmp_path / "t.csv", [{"=a": value, "b": 1}])
    with (tmp_path / "t.csv").open(newline="") as file:
        assert [*csv.reader(file)] == [["'=a", "b"], [cell, "1"]]


def test_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"a": 1, "b": None}, {"a": 2.5, "b": [1], "c": "x,y"}]
    tables.write_table(tmp_path / "t.csv", rows)
    assert (tmp_path / "t.csv").read_text() == 'a,b,c\n1,,\n2.5,[1],"x,y"\n'
    tables.write_table(tmp_path / "t.jsonl", rows)
    assert [orjson.loads(text) for text in (tmp_path / "t.jsonl").read_bytes().splitlines()] == rows
    with pytest.raises(ConfigError, match=r"t\.txt.*\.jsonl, \.csv, \.parquet"):
        tables.checked_table(tmp_path / "t.txt")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=re.escape(install_command("parquet"))):
        tables.checked_table(tmp_path / "t.parquet")


def test_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    run = write_run(tmp_path / "r", [line(k, r, float(r < k)) for k in range(3) for r in range(2 + k)])
    rows = list(task_rows(read_runs([run]).tasks))
    tables.write_table(tmp_path / "t.parquet", rows)
    found = parquet.read_table(tmp_path / "t.parquet").to_pylist()
    assert [row["rewards"] for row in found] == [row["rewards"] for row in rows]


def test_the_command(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "r", [line(k, r, float(r < k), answer="a") for k in range(3) for r in range(2)]
    )
    arguments = [
        str(run),
        "-o",
        str(tmp_path / "t.csv"),
        "--summary",
        str(tmp_path / "s.jsonl"),
        "--keep",
        "0.1..0.9",
    ]
    done = CliRunner().invoke(command, arguments)
    assert done.exit_code == 0, done.output
    header, cells, account = done.stdout.splitlines()
    assert account == "6 rollouts: 3 right, 3 wrong"
    assert header.split() == ["environment", "rollouts", "mean", "±", "se", "pass@1", "pass@2"]
    assert cells.split() == ["mcqa", "6", "0.500", "±0.289", "0.500", "0.667"]
    chosen = CliRunner().invoke(command, [str(run), "-k", "2"]).stdout.splitlines()
    assert [line.split()[-2:] for line in chosen[:2]] == [["se", "pass@2"], ["±0.289", "0.667"]]
    assert isinstance(CliRunner().invoke(command, [str(run), "-k", "0"]).exception, ConfigError)
    header, cells, _ = CliRunner().invoke(command, [str(run), "--wide"]).stdout.splitlines()
    assert header.split()[-5:] == ["pass@1", "pass@1_ci95", "±runs", "pass@2", "maj@2"]
    interval, other = cells.split()[-8:-5], [*cells.split()[-10:-8], *cells.split()[-5:]]
    assert interval == ["0.000", "to", "1.000"]
    assert other == ["0.500", "±0.289", "0.167", "0.667", "±0.333", "0.500", "±0.289"]
    marked = CliRunner().invoke(command, [str(run), "--markdown"]).output.splitlines()
    assert marked[0] == "| environment | rollouts | mean ± se | pass@1 | pass@2 |"
    assert marked[2] == "| mcqa | 6 | 0.500 ±0.289 | 0.500 | 0.667 |"
    both = CliRunner().invoke(command, [str(run), "--markdown", "--json"])
    assert "--markdown" in str(both.exception)
    assert len((tmp_path / "t.csv").read_text().splitlines()) == 2
    assert orjson.loads((tmp_path / "s.jsonl").read_bytes())["pass@1"] == 0.5


def test_gym_rollouts_are_read(tmp_path: Path) -> None:
    values = [
        {"_ng_task_index": t, "_ng_rollout_index": r, "agent_ref": {"name": "a"}, "reward": float(r < t)}
        for t in range(3)
        for r in range(2)
    ]
    values += [{**values[-1], "_ng_rollout_index": 2, "agent_ref": {"name": "b"}}]
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(_json(value) + "\n" for value in values))
    row, other, _ = summary_rows(collected := read_runs([path]).tasks)
    assert (row["environment"], row["tasks"], row["pass@2"]) == ("a", 3, pytest.approx(2 / 3))
    assert (other["environment"], other["tasks"]) == ("b", 1)
    assert len({task.row_key for task in collected.ordered()}) == 4, "a task of another agent is another row"
    path.write_text('{"reward": 1}\n')
    with pytest.raises(GymgateError, match=r"rollouts\.jsonl:1: "):
        read_runs([path])


def test_a_last_line_without_its_ending_counts_once_it_is_whole(tmp_path: Path) -> None:
    """Other programs than NeMo Gym's collector may leave it out."""
    path = tmp_path / "r.jsonl"
    lines = [
        _json({"_ng_task_index": t, "_ng_rollout_index": 0, "agent_ref": {"name": "a"}, "reward": 1.0})
        for t in range(2)
    ]
    for text, count in (("\n".join(lines), 2), ("\n".join(lines)[:-1], 1)):
        path.write_text(text)
        [row] = summary_rows(read_runs([path]).tasks)
        assert row["rollouts"] == count


@pytest.mark.parametrize(
    "field", [{"_ng_task_index": None}, {"_ng_rollout_index": "x"}, {"agent_ref": "a"}, {"agent_ref": ["a"]}]
)
def test_a_field_of_another_form_is_named(tmp_path: Path, field: dict[str, Any]) -> None:
    value = {"_ng_task_index": 0, "_ng_rollout_index": 0, "agent_ref": {"name": "a"}, "reward": 1.0}
    path = tmp_path / "r.jsonl"
    path.write_text(f"{_json(value)}\n{_json({**value, **field})}\n")
    with pytest.raises(DataError) as caught:
        read_runs([path])
    assert (caught.value.path, caught.value.line) == (str(path), 2)


def test_gym_failures_are_counted(tmp_path: Path) -> None:
    """Beside NeMo Gym's rollouts.jsonl, a line per failed attempt; here as 0.7.0 writes them."""
    common = {"agent_ref": {"name": "a"}, "_ng_environment_server": "a_environment_server"}
    values = [{**common, "_ng_task_index": t, "_ng_rollout_index": 0, "reward": 1.0} for t in range(2)]
    path = tmp_path / "r.jsonl"
    path.write_text("".join(_json(value) + "\n" for value in values))
    failures = [
        {
            "_ng_failure_class": "agent_run_error",
            "_ng_failure_type": "ClientResponseError",
            "_ng_failure_message": f"500, attempt {attempt}",
            "_ng_task_index": task,
            "_ng_rollout_index": rollout,
            **common,
        }
        for task, rollout, attempt in [(0, 0, 1), (1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 0, 1)]
    ]
    (tmp_path / "r_failures.jsonl").write_text("".join(_json(value) + "\n" for value in failures))
    collected = read_runs([path]).tasks
    [row] = summary_rows(collected)
    assert (row["tasks"], row["rollouts"], row["failed"], row["asked_again"]) == (3, 5, 3, 2)
    assert [task.failed for task in collected.ordered()] == [0, 2, 1]
    write_report([path], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "agent_run_error" in page
    assert "500, attempt 1" in page
    (tmp_path / "r_failures.jsonl").write_text("{}\n")
    with pytest.raises(GymgateError, match=r"r_failures\.jsonl:1: "):
        read_runs([path])


def test_a_gym_failure_that_counts_as_zero_is_a_rollout(tmp_path: Path) -> None:
    """Its last failure decides, and a rollout that finished counts in its place."""
    path, marked = tmp_path / "r.jsonl", {"_ng_failure_counts_as_zero": True}
    common = {"agent_ref": {"name": "a"}, "_ng_rollout_index": 0}
    failure = {**common, "_ng_failure_class": "agent_timeout"}
    path.write_text(_json({**common, "_ng_task_index": 0, "reward": 1.0}) + "\n")
    failures = [
        (0, marked),
        (1, {}),
        (1, marked),
        (2, marked),
        (2, {}),
        (3, marked),
        (3, {"_ng_rollout_index": 1}),
    ]
    lines = [_json({**failure, "_ng_task_index": task, **field}) + "\n" for task, field in failures]
    (tmp_path / "r_failures.jsonl").write_text("".join(lines))
    [row] = summary_rows(read_runs([path]).tasks)
    assert (row["rollouts"], row["failed"], row["pass@1"]) == (5, 2, pytest.approx(1 / 3))
    assert row["asked_again"] == 1


def test_each_rollout_has_an_answer_field_of_its_own(tmp_path: Path) -> None:
    """Which rollout comes first, and whether its result has the field, changes nothing."""
    lines = []
    for repeat, answer in enumerate([None, "x", "x", "y"]):
        place = {"row_key": "0" * 16, "occurrence": 0, "repeat": repeat, "seed": None, "environment": "e"}
        result = {} if answer is None else {"extracted_answer": answer}
        lines.append(
            {**place, "agent": "a", "status": "completed", "reward": float(answer == "x"), "result": result}
        )
    found = []
    for order in (lines, lines[::-1]):
        collected = CollectedTasks()
        for line in order:
            collected.add(score_of(Attempt.read(line, Path("r"), 1)))
        [row] = task_rows(collected)
        found.append({name: value for name, value in row.items() if name.startswith("maj")})
    assert found[0] == found[1]
    assert found[0]["maj@4"] == 1.0


def test_a_file_without_rollouts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text("")
    done = CliRunner().invoke(command, [str(path)])
    assert isinstance(done.exception, DataError)
    assert str(path) in str(done.exception)


def test_a_file_of_the_run_command_is_read(tmp_path: Path) -> None:
    """`gymgate run -o FILE` writes finished and failed rollouts; one failed here."""
    path = tmp_path / "out.jsonl"
    failed = {**line(2, 1, 0.0), "status": "failed", "reward": None, "error": {"kind": "policy"}}
    lines = [line(k, r, float(r < k)) for k in range(3) for r in range(2) if (k, r) != (2, 1)]
    path.write_text("".join(_json(value) + "\n" for value in [*lines, failed]))
    [row] = summary_rows(read_runs([path]).tasks)
    assert (row["environment"], row["tasks"], row["rollouts"], row["failed"]) == ("mcqa", 3, 6, 1)
    write_report([path], tmp_path / "report.html")
    assert "mcqa" in (tmp_path / "report.html").read_text()


def test_a_carriage_return_ends_no_line_of_a_csv_file(tmp_path: Path) -> None:
    rows = [
        {"answer": "a\rb", "x\ry": 1.5},
        {"answer": None, "x\ry": None},
        {"answer": "a\r\nb", "x\ry": 2.5},
    ]
    tables.write_table(tmp_path / "t.csv", rows)
    with (tmp_path / "t.csv").open(newline="") as file:
        read = [*csv.DictReader(file)]
    assert read == [
        {name: "" if value is None else str(value) for name, value in row.items()} for row in rows
    ]


def test_a_table_is_in_the_order_of_its_numbers(tmp_path: Path) -> None:
    """Tasks in that of the input, whatever their lines; k from the smallest on; and the range of a task's rewards."""
    lines = [line(key, repeat, float(repeat), line=9 - key) for key in range(2) for repeat in range(16)]
    collected = read_runs([write_run(tmp_path, lines)]).tasks
    assert [row["row_key"][-1] for row in task_rows(collected)] == ["0", "1"]
    assert {(row["min_reward"], row["max_reward"]) for row in task_rows(collected)} == {(0.0, 15.0)}
    assert numbered("pass@", summary_rows(collected)) == ["pass@1", "pass@2", "pass@4", "pass@8", "pass@16"]


def test_a_run_of_unknown_size_has_none(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", [line(0, 0, 1.0)], extent={"rollouts": 4})
    other = write_run(tmp_path / "other", [line(1, 0, 1.0)])
    assert read_runs([one]).planned == 4
    assert read_runs([one, other]).planned is None


def test_a_rollout_of_another_environment_is_no_duplicate(tmp_path: Path) -> None:
    """The run that is named has the same one: a row that two environments have is two."""
    others = write_run(tmp_path / "others", [line(0, 0, 1.0, environment="weather")])
    first, second = (write_run(tmp_path / name, [line(0, 0, 1.0)]) for name in ("first", "second"))
    with pytest.raises(ConfigError, match=re.escape(f"{second} are in {first} ")):
        read_runs([others, first, second])


def test_a_rollout_counts_once_whatever_came_before() -> None:
    """It failed for ever in two shards, and finished in the end."""
    collected, error = CollectedTasks(), {"kind": "policy", "type": "PolicyError", "message": "gone"}
    failed = line(0, 0, None, status="failed", error=error)
    for _ in range(2):
        collected.add(score_of(Attempt.read(failed, Path("r"), 1)))
        assert collected.counts.outcomes["failed"] == 1
        assert collected.counts.causes == {"PolicyError: gone": 1}
    collected.add(score_of(Attempt.read(line(0, 0, 1.0), Path("r"), 1)))
    assert collected.counts.outcomes["failed"] == 0
    assert not collected.counts.causes


def test_a_list_of_rows_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [line(0, 0, 1.0)])
    (run / "rows.txt").mkdir()
    with pytest.raises(DataError, match=r"rows\.txt"):
        read_runs([run])


@pytest.mark.parametrize("below", [".", "model--env--1"])
def test_verifiers_traces_are_named_for_what_they_are(tmp_path: Path, below: str) -> None:
    (tmp_path / below).mkdir(exist_ok=True)
    (tmp_path / below / "traces.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=r"holds verifiers' traces, .*`gymgate run -o DIR` writes a run"):
        read_runs([tmp_path])
    with pytest.raises(DataError, match=r"is verifiers' traces, .*`gymgate run -o DIR` writes a run"):
        read_runs([tmp_path / below / "traces.jsonl"])
    viewed = CliRunner().invoke(view, [str(tmp_path)])
    assert isinstance(viewed.exception, DataError)  # it would wait for a run that is written nowhere
