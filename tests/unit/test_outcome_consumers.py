"""Every table, log, export and trainer takes the same rollouts for scores: none that failed, was masked or has no reward."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from gymgate.cli.rollout_commands import run_output
from gymgate.core.config import StackConfig
from gymgate.core.errors import EnvironmentServerError
from gymgate.integrations.training.rollouts import SampledRollout, mean_metrics, rollout_metrics
from gymgate.integrations.trl.batch import nemo_gym_reward, to_batch
from gymgate.integrations.verl.outputs import reward_extra_info
from gymgate.integrations.verl.reports import log_entries, why_untrained
from gymgate.results.export import export_dataset
from gymgate.results.report import write_report
from gymgate.results.report_data import REWARD, ReportData
from gymgate.rollouts import Rollout, RolloutError, Segment, outcome_of
from gymgate.runs.collected.progress import RunProgress
from gymgate.runs.collected.progress_display import state
from gymgate.runs.counted.account import notes_on
from gymgate.runs.counted.aggregate import read_runs
from gymgate.runs.counted.counts import RolloutCounts
from gymgate.runs.counted.metrics import keep, summary_rows, task_rows
from gymgate.runs.counted.tasks import CollectedTasks
from gymgate.runs.stored.attempts import Attempt
from gymgate.runs.stored.gym_rollouts import from_gym, to_gym
from gymgate.stack.run_row import run_row
from gymgate.tokens import TokenTurn, assemble, prefix_misses
from support.collecting import add, as_collected

ERROR = RolloutError(kind="environment", message="m", type="EnvironmentServerError")
FIELDS: dict[str, dict[str, Any]] = {
    "good": {"status": "completed", "reward": 1.0},
    "cut": {"status": "truncated", "reward": 0.5},
    "masked": {"status": "masked", "reward": 0.0, "reward_parts": {"style": 0.0}},
    "unscored": {"status": "completed", "reward": None, "reward_parts": {"style": 0.0}},
    "failed": {"status": "failed", "reward": None, "error": ERROR},
}
FINISHED = [name for name in FIELDS if name != "failed"]
NO_SCORE = ["masked", "unscored", "failed"]


def made(name: str) -> Rollout:
    return Rollout(id=name, environment="e", agent="a", **FIELDS[name])


def sampled(name: str) -> SampledRollout:
    turns = (TokenTurn([1], [2], [-0.5]),)
    return SampledRollout(made(name), assemble(turns), len(turns), prefix_misses(turns), [1])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of one task; what failed is in the file of failures, and in that of rollouts too, as nothing writes it."""
    path = tmp_path / "run"
    path.mkdir()
    (path / "run.json").write_bytes(orjson.dumps({"format": 1, "settings": {}, "extent": {}}))
    lines = [
        {
            **{"row_key": "0123456789abcdef", "occurrence": 0, "repeat": repeat, "seed": None, "task": 0},
            **{"source": "s", "line": 1, "result": {"reward": 0.0}, "calls": []},
            **made(name).model_dump(mode="json", exclude={"result", "calls"}),
        }
        for repeat, name in enumerate(FIELDS)
    ]
    (path / "rollouts.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    return path


@pytest.mark.parametrize("name", FIELDS)
async def test_one_row_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed rollout is raised, so that it becomes no reward of 0; any other comes back."""

    async def run(row: dict[str, Any], **settings: Any) -> Rollout:
        return made(name)

    @asynccontextmanager
    async def acquire(config: StackConfig) -> AsyncIterator[Any]:
        yield SimpleNamespace(run=run, refuse_training=lambda: None)

    monkeypatch.setattr("gymgate.stack.run_row.acquire", acquire)
    row = {"responses_create_params": {"input": "hi"}}
    if name == "failed":
        with pytest.raises(EnvironmentServerError, match="m"):
            await run_row(row, "e", base_url="http://h/v1")
    else:
        assert (await run_row(row, "e", base_url="http://h/v1")).id == name


def test_the_live_mean_of_a_collection() -> None:
    progress = RunProgress(total=9)
    for number, name in enumerate(FINISHED):
        progress.count(as_collected(made(name), number))
    counts = progress.tasks.counts
    assert (counts.mean_reward, counts.scored, progress.finished) == (0.75, 2, 4)
    assert counts.outcomes == {"completed": 1, "truncated": 1, "masked": 1, "unscored": 1}
    shown = state(progress)
    assert "mean reward 0.750, 1 truncated, 1 unscored, 1 masked" in shown


def test_counts_of_several_environments_add_up() -> None:
    tasks = CollectedTasks()
    for environment, names in (("e", ["good", "cut"]), ("f", ["cut", "failed"])):
        for number, name in enumerate(names):
            rollout = made(name).model_copy(update={"environment": environment})
            add(tasks, as_collected(rollout, number))
    total = tasks.counts
    assert (total.scored, total.reward_sum, total.failed, total.rollouts) == (3, 2.0, 1, 4)
    assert total.mean_reward == pytest.approx(2 / 3)


def test_messages_that_differ_in_each_rollout_fill_no_memory() -> None:
    counts = RolloutCounts()
    for number in range(3000):
        counts.add_cause(f"failed after {number} s")
    counts.add_cause("failed after 1 s")
    assert (len(counts.causes), counts.causes["other causes"], counts.causes["failed after 1 s"]) == (
        1001,
        2000,
        2,
    )


def test_failures_in_a_row_end_with_the_first_that_finishes() -> None:
    progress = RunProgress(total=9)
    for final in (True, False, True):
        progress.count_failure(as_collected(made("failed"), 9), final=final)
    assert (progress.failed, progress.failed_in_a_row, progress.attempts_failed) == (2, 2, 3)
    progress.count(as_collected(made("masked")))
    assert (progress.failed, progress.failed_in_a_row) == (2, 0)


def test_the_table_of_run() -> None:
    progress = RunProgress()
    for number, name in enumerate(FINISHED):
        progress.count(as_collected(made(name), number))
    progress.count_failure(as_collected(made("failed"), 9), final=True)
    metrics = progress.tasks.counts
    assert (metrics.mean_reward, metrics.scored, metrics.reward_sum) == (0.75, 2, 1.5)
    run: Any = SimpleNamespace(
        progress=progress, replayed=False, directory=None, plan=SimpleNamespace(invalid=())
    )
    tasks = CollectedTasks()
    for number, name in enumerate((*FINISHED, "failed")):
        add(tasks, as_collected(made(name), number))
    summary = run_output(run, summary_rows(tasks), (), None, interrupted=False, error=None)
    assert summary.environments["e"] == summary.overall
    assert summary.environments["e"].items() >= {
        "rollouts": 5, "failed": 1, "masked": 1, "unscored": 1, "truncated": 1, "mean_reward": 0.75,
    }.items()  # fmt: skip


def test_metrics_of_runs(run: Path) -> None:
    collected = read_runs([run]).tasks
    [row], [task] = summary_rows(collected), task_rows(collected)
    counts = {"rollouts": 5, "scored": 2, "masked": 1, "unscored": 1, "truncated": 1, "failed": 1}
    assert row.items() >= counts.items()
    assert row["mean_reward"] == row["pass@1"] == task["mean_reward"] == 0.75
    assert (task["rewards"], task["min_reward"]) == ([1.0, 0.5], 0.5)
    assert len(list(keep(collected, 0.7, 0.8))) == 1


def test_a_permanent_failure_counts_alike_in_a_directory_and_without_one(run: Path) -> None:
    """A directory keeps it apart from the rollouts that finished."""
    tasks = CollectedTasks()
    for number, name in enumerate(FIELDS):
        add(tasks, as_collected(made(name), number))
    *finished, failed = (run / "rollouts.jsonl").read_bytes().splitlines(keepends=True)
    (run / "rollouts.jsonl").write_bytes(b"".join(finished))
    (run / "failures.jsonl").write_bytes(orjson.dumps({**orjson.loads(failed), "final": True}) + b"\n")
    (live,), (kept,) = summary_rows(tasks), summary_rows(read_runs([run]).tasks)
    counts = RolloutCounts().columns()
    assert {name: live[name] for name in counts} == {name: kept[name] for name in counts}
    assert (live["rollouts"], live["failed"]) == (5, 1)


def test_the_report(run: Path) -> None:
    data = ReportData(1, 9)
    read_runs([run], see=data.add)
    assert list(data.charts[REWARD]) == [1.0, 0.5]
    write_report([run], run / "report.html", per_task=9)
    assert ": 1, 0.5, masked, unscored, failed" in (run / "report.html").read_text()


def test_the_flat_table(run: Path) -> None:
    export_dataset(read_runs([run]), run / "flat.jsonl")
    rows = [orjson.loads(line) for line in (run / "flat.jsonl").read_bytes().splitlines()]
    assert [row["reward"] for row in rows] == [1.0, 0.5, None, None, None]
    parts = [value for row in rows for name, value in row.items() if name.startswith("reward_parts.")]
    assert parts == [None] * 5, "parts of rewards that do not count"


def test_verifiers_traces(run: Path) -> None:
    pytest.importorskip("verifiers.v1", reason="verifiers is not installed")
    from verifiers.v1.utils.trace_store import read_episodes

    from gymgate.integrations.verifiers.evaluation import metrics_of
    from gymgate.integrations.verifiers.traces import WireTrace, export_traces

    export_traces(read_runs([run]), run / "traces.jsonl")
    lines = [orjson.loads(line) for line in (run / "traces.jsonl").read_bytes().splitlines()]
    traces = [line["traces"][0] for line in lines]
    assert [trace["rewards"] for trace in traces[:2]] == [
        {"reward": {"score": score, "weight": 1.0}} for score in (1.0, 0.5)
    ]
    assert [trace["rewards"] for trace in traces[2:]] == [{"reward": None}] * 2
    assert [trace["metrics"]["nemo_gym/unscored"] for trace in traces] == [0.0, 0.0, 1.0, 1.0]
    assert [trace["agent"]["trainable"] for trace in traces] == [True, True, False, False]
    assert [trace["ok"] for trace in traces] == [True] * 4
    tasks, _ = metrics_of(read_episodes(run, WireTrace))
    found, [row] = tasks.counts, summary_rows(tasks)
    assert (row["mean_reward"], row["scored"], row["failed"]) == (0.75, 2, 0)
    assert (found.mean_reward, found.scored, found.reward_sum) == (0.75, 2, 1.5)
    assert found.outcomes == {"completed": 1, "truncated": 1, "masked": 1, "unscored": 1}


@pytest.mark.parametrize("name", NO_SCORE)
def test_gyms_own_form_and_back(name: str) -> None:
    """Gym requires a number beside a mask; its profiler leaves those rows out, and so do we."""
    attempt = Attempt.model_construct(**as_collected(made(name)).__dict__)
    line = to_gym(attempt, {"_ng_task_index": 0, "_ng_rollout_index": 0})
    assert line.get("mask_sample", False) is (name == "masked")
    assert line["reward"] == (0.0 if name == "masked" else None)
    assert outcome_of(from_gym(line, Path("x"), 1)).reward is None


def test_what_gym_noted_as_a_failure_is_none_of_its_scores() -> None:
    line = {"reward": 0.0, "_ng_failure_class": "judge_failed", "_ng_task_index": 0, "_ng_rollout_index": 0}
    value = from_gym(line, Path("x"), 1)
    assert (outcome_of(value).reason, value["reward"], value["error"]["kind"]) == (
        "failed",
        None,
        "environment",
    )


def test_training_logs() -> None:
    logged = [rollout_metrics(sampled(name)) for name in FIELDS]
    found = mean_metrics(logged, ["e"] * len(logged))
    assert found["reward"] == found["e/reward"] == 0.75
    assert {found[name] for name in ("truncated", "masked", "unscored", "failed", "failed_environment")} == {
        0.2
    }
    assert [name for name, each in zip(FIELDS, logged, strict=True) if "reward" in each] == ["good", "cut"]
    reports = [{"environment": "e", "metrics": each} for each in logged]
    assert log_entries(reports)["nemo_gym/reward"] == 0.75


@pytest.mark.parametrize("option", [False, True])
def test_trls_batch(option: bool) -> None:
    batch = to_batch([sampled(name) for name in FIELDS], filler_id=9, score_truncated=option)
    assert batch["env_reward"] == [1.0, 0.5 if option else None, None, None, None]
    assert batch["env_mask"] == [[1], [int(option)], [0], [0], [0]]
    rewards = nemo_gym_reward([""] * 5, batch["env_reward"], batch["rollout_metrics"])
    assert rewards == batch["env_reward"]


def test_the_segment_with_most_sampled_ids_stands_for_a_rollout() -> None:
    """Not the longest one: a tool's long output is not sampled."""
    segments = [
        Segment(prompt_ids=[1], completion_ids=[2] * 9, mask=[1] + [0] * 8),
        Segment(prompt_ids=[1], completion_ids=[3, 4], mask=[1, 1]),
    ]
    batch = to_batch([SampledRollout(made("good"), segments, 0, 0, [1])], filler_id=9)
    assert batch["completion_ids"] == [[3, 4]]


@pytest.mark.parametrize("name", NO_SCORE)
def test_verl(name: str) -> None:
    assert "reward" not in reward_extra_info(sampled(name))
    assert why_untrained(sampled(name))["error"] == (
        "EnvironmentServerError" if name == "failed" else "DataError"
    )


def test_an_evaluation_counts_what_failed_apart() -> None:
    rollouts = [as_collected(made(name), number) for number, name in enumerate(FIELDS)]
    tasks = CollectedTasks()
    for rollout in rollouts:
        add(tasks, rollout)
    [task] = tasks.tasks.values()
    assert (task.failed, len(task.scores), len([*notes_on(tasks)])) == (1, len(FINISHED), 2)
