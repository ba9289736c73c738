"""Runs under way: retries, drains, stalls, ends, and kills at any moment."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from collect_program import reward_of

from gymgate.core.config import HTTPEndpoint, StackConfig
from gymgate.core.errors import ConfigError, DataError, PolicyError, StackLostError
from gymgate.gym.row_sources import RowSource
from gymgate.rollouts import Rollout, RolloutError
from gymgate.rollouts.row import make_row
from gymgate.runs.collected import run as run_module
from gymgate.runs.collected.run import Collection, describe_calls
from gymgate.runs.collected.stream import rollouts_of
from gymgate.runs.counted.aggregate import read_runs
from gymgate.runs.counted.metrics import summary_rows
from gymgate.runs.described.pace import Pace
from gymgate.runs.described.plan import PlannedRollout, RolloutPlan
from gymgate.runs.stored.layout import FAILURES, ROLLOUTS
from gymgate.runs.stored.record import CollectedRollout, read_values
from support.collecting import MadeUpRun, made_up_run

PROGRAM = Path(__file__).with_name("collect_program.py")


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "wait_s", lambda failures: 0.0)


def plan_of(rows: int, repeats: int = 1) -> RolloutPlan:
    made = [
        make_row({"responses_create_params": {"input": str(number)}}, "rows.jsonl", number + 1)
        for number in range(rows)
    ]
    return RolloutPlan([RowSource(made, "mcqa")], repeats=repeats)


def completed(planned: PlannedRollout) -> Rollout:
    return Rollout(id="x", environment="mcqa", agent="a", status="completed", reward=1.0)


def failed(kind: Any = "infrastructure", *, retryable: bool = True, name: str = "ServerDiedError") -> Rollout:
    error = RolloutError(kind=kind, message="no luck", type=name, retryable=retryable)
    return Rollout(id="x", environment="mcqa", agent="a", status="failed", error=error)


@contextmanager
def collector(
    path: Path, plan: RolloutPlan, run_one: Callable[[PlannedRollout], Awaitable[Rollout]], **pace: Any
) -> Iterator[tuple[MadeUpRun, list[str]]]:
    """A run, and what it logs."""
    warnings: list[str] = []
    yield made_up_run(plan, run_one, output=path, pace=Pace(**pace), log=warnings.append), warnings


def lines(path: Path) -> list[dict[str, Any]]:
    return [value for _, value in read_values(path)]


async def raises(error: type[Exception], reason: str, made: MadeUpRun) -> None:
    with pytest.raises(error, match=reason):
        await made.run()


async def test_rollouts_are_retried_within_the_budget_of_their_class(tmp_path: Path) -> None:
    attempts: Counter[int] = Counter()

    async def run_one(planned: PlannedRollout) -> Rollout:
        attempts[planned.task] += 1
        if planned.task == 0 and attempts[0] <= 3:
            return failed("infrastructure")
        if planned.task == 1:
            return failed("timeout")
        if planned.task == 2:
            return failed("policy", retryable=False, name="PolicyError")
        if planned.task == 3:
            raise DataError("no agent of that name")
        return completed(planned)

    with collector(tmp_path, plan_of(5), run_one) as (made, _):
        await made.run()
    assert attempts == {0: 4, 1: 2, 2: 1, 3: 1, 4: 1}
    assert sorted((value["task"], value["attempt"]) for value in lines(tmp_path / ROLLOUTS)) == [
        (0, 3),
        (4, 0),
    ]
    final = {value["task"]: value["error"] for value in lines(tmp_path / FAILURES) if value["final"]}
    assert {task: error["kind"] for task, error in final.items()} == {1: "timeout", 2: "policy", 3: "data"}
    assert final[3]["message"] == "rows.jsonl:4: no agent of that name"
    assert (made.progress.finished, made.progress.failed, made.progress.attempts_failed) == (2, 3, 7)


async def test_a_resume_counts_the_attempts_before_it(tmp_path: Path) -> None:
    async def lost(planned: PlannedRollout) -> Rollout:
        made.drain()
        return failed("infrastructure")

    async def fails(planned: PlannedRollout) -> Rollout:
        return failed("infrastructure")

    for _ in range(2):
        with collector(tmp_path, plan_of(1), lost) as (made, _):
            await made.run()
    with collector(tmp_path, plan_of(1), fails) as (made, _):
        await made.run()
    assert [value["attempt"] for value in lines(tmp_path / FAILURES)] == [1, 2, 3, 4]
    assert [value["final"] for value in lines(tmp_path / FAILURES)] == [False, False, False, True]


async def test_draining_finishes_what_runs(tmp_path: Path) -> None:
    async def run_one(planned: PlannedRollout) -> Rollout:
        made.drain()
        await asyncio.sleep(0)
        return completed(planned)

    with collector(tmp_path, plan_of(10), run_one, concurrency=3) as (made, _):
        await made.run()
    assert len(lines(tmp_path / ROLLOUTS)) in (1, 2, 3)
    with collector(tmp_path, plan_of(10), _completed) as (made, _):
        await made.run()
    assert sorted(value["task"] for value in lines(tmp_path / ROLLOUTS)) == list(range(10))


async def _completed(planned: PlannedRollout) -> Rollout:
    return completed(planned)


async def test_a_run_in_which_everything_fails_stops(tmp_path: Path) -> None:
    async def run_one(planned: PlannedRollout) -> Rollout:
        return failed("policy", retryable=False, name="PolicyError")

    with collector(tmp_path, plan_of(500), run_one, concurrency=4, failures_in_a_row=20) as (made, _):
        reason = r"stopped: 20 rollouts failed in a row.*no luck.*--rerun-failed"
        await raises(PolicyError, reason, made)
    assert 20 <= len(lines(tmp_path / FAILURES)) <= 24


async def test_failures_between_rollouts_that_finish_do_not_stop_a_run(tmp_path: Path) -> None:
    async def run_one(planned: PlannedRollout) -> Rollout:
        return (
            completed(planned)
            if planned.task % 5 == 4
            else failed("policy", retryable=False, name="PolicyError")
        )

    with collector(tmp_path, plan_of(50), run_one, concurrency=1, failures_in_a_row=5) as (made, _):
        await made.run()
    assert (len(lines(tmp_path / ROLLOUTS)), len(lines(tmp_path / FAILURES))) == (10, 40)


async def test_a_run_that_goes_on_after_a_lost_stack_runs_nothing_twice(tmp_path: Path) -> None:
    """In the same process, which does not read its own lines again."""
    plan, ran = plan_of(6), Counter[int]()

    async def lost_after_three(planned: PlannedRollout) -> Rollout:
        if ran.total() == 3 and not lost:
            lost.append(True)
            raise StackLostError("the daemon is gone")
        ran[planned.row.line] += 1
        return completed(planned)

    lost: list[bool] = []
    with collector(tmp_path / "run", plan, lost_after_three, concurrency=1) as (made, _):
        await made.run()
    assert lost
    assert ran == Counter(range(1, 7))


async def test_a_lost_stack_does_not_give_back_the_retries(tmp_path: Path) -> None:
    """Two attempts before it and two after it: with a budget of 3 the fourth is the last."""
    attempts = Counter[str]()

    async def lost_after_two(planned: PlannedRollout) -> Rollout:
        if attempts["before"] < 2:
            attempts["before"] += 1
            return failed("infrastructure")
        if not attempts["lost"]:
            attempts["lost"] += 1
            raise StackLostError("the daemon is gone")
        attempts["after"] += 1
        return failed("infrastructure")

    with collector(tmp_path, plan_of(1), lost_after_two) as (made, _):
        await made.run()
    assert attempts == {"before": 2, "lost": 1, "after": 2}
    assert [value["final"] for value in lines(tmp_path / FAILURES)] == [False, False, False, True]


async def given(made: MadeUpRun) -> list[tuple[int, str]]:
    """What a run's caller gets, those of earlier runs in its directory included."""
    return [(rollout.task, rollout.status) async for rollout in rollouts_of(made)]


async def test_a_resume_gives_each_rollout_once_however_often_it_was_tried(tmp_path: Path) -> None:
    """What failed for ever is given as it is, or run again if asked; what is tried again is not given as failed."""
    fails = {0, 1}

    async def run_one(planned: PlannedRollout) -> Rollout:
        if planned.task == 1:
            made.drain()
        if planned.task not in fails:
            return completed(planned)
        return failed("policy", retryable=False, name="PolicyError") if planned.task == 0 else failed()

    def again(**fields: Any) -> MadeUpRun:
        return made_up_run(plan_of(3), run_one, output=tmp_path, pace=Pace(concurrency=1), **fields)

    made = again()
    assert await given(made) == [(0, "failed")]
    fails.remove(1)
    made = again()
    assert sorted(await given(made)) == [(0, "failed"), (1, "completed")]
    assert sorted(await given(again())) == [(0, "failed"), (1, "completed"), (2, "completed")]
    fails.clear()
    assert sorted(await given(again(rerun_failed=True))) == [(n, "completed") for n in range(3)]
    assert sorted(await given(again())) == [(n, "completed") for n in range(3)]


async def test_a_run_counts_failures_as_its_files_do(tmp_path: Path) -> None:
    """Also those of rollouts that `--rerun-failed` ran again, whether they finished or failed for another reason."""
    for rerun, kinds in enumerate((["policy", "policy", None], ["timeout", None, None])):

        async def run_one(planned: PlannedRollout, kinds: Any = kinds) -> Rollout:
            return failed(kinds[planned.task]) if kinds[planned.task] else completed(planned)

        made = made_up_run(plan_of(3), run_one, output=tmp_path, rerun_failed=bool(rerun))
        await made.run()
        assert summary_rows(made.progress.tasks) == summary_rows(read_runs([tmp_path]).tasks)
    assert "1 failed (1 by timeout), asked again 9 times" in summary_rows(made.progress.tasks)[0]["account"]


async def let_others_run() -> None:
    """Until all have gone as far as they can without this task; nothing of a made-up run waits for the machine."""
    for _ in range(100):
        await asyncio.sleep(0)


@pytest.mark.parametrize("how", ["finished", "failed"])
async def test_what_was_written_is_told_though_the_stack_is_lost_while_the_caller_is_slow(
    how: str, tmp_path: Path
) -> None:
    """The caller takes one rollout, then none until another one's stack is lost; as many as may wait for it do."""
    taken, lost, told = asyncio.Event(), asyncio.Event(), Counter[int]()

    async def run_one(planned: PlannedRollout) -> Rollout:
        if planned.task == 3 and not lost.is_set():
            await taken.wait()
            await let_others_run()
            lost.set()
            raise StackLostError("the daemon is gone")
        return completed(planned) if how == "finished" else failed("policy", retryable=False)

    made = made_up_run(plan_of(9), run_one, output=tmp_path, pace=Pace(concurrency=2))
    async with aclosing(rollouts_of(made)) as rollouts:
        async for rollout in rollouts:
            told[rollout.task] += 1
            taken.set()
            await lost.wait()
    stored = lines(tmp_path / (ROLLOUTS if how == "finished" else FAILURES))
    assert told == Counter(value["task"] for value in stored) == Counter(range(9))


@pytest.mark.parametrize("kept", [True, False])
async def test_a_caller_that_leaves_results_behind_may_go(kept: bool, tmp_path: Path) -> None:
    """Even if rollouts that are cancelled say that their stack is lost, which would start it again."""
    waiting, ends = asyncio.Event(), Counter[str]()

    async def run_one(planned: PlannedRollout) -> Rollout:
        if planned.task < 3:
            return completed(planned)
        try:
            waiting.set()
            await asyncio.Event().wait()
        finally:
            ends["all"] += 1
            raise StackLostError("the daemon is gone")

    made = made_up_run(plan_of(9), run_one, output=tmp_path if kept else None, pace=Pace(concurrency=2))
    async with asyncio.timeout(20), aclosing(rollouts_of(made)) as rollouts:
        await anext(rollouts)
        await waiting.wait()
        await let_others_run()
    assert 1 <= ends["all"] <= 2
    assert not made.in_flight


async def test_rollouts_that_are_not_planned_any_more_complete_no_run(tmp_path: Path) -> None:
    """As many are there as are planned, of other rows."""

    async def run_one(planned: PlannedRollout) -> Rollout:
        return completed(planned)

    with collector(tmp_path, plan_of(3), run_one) as (made, _):
        await made.run()
    with collector(tmp_path, plan_of(1, repeats=3), run_one) as (made, _):
        await made.run()
    assert (made.progress.resumed, made.progress.finished) == (1, 2)


async def test_a_row_of_another_environment_now_is_refused(tmp_path: Path) -> None:
    """Equal rows are counted over all environments: one that comes before takes the first one's number."""

    async def run_one(planned: PlannedRollout) -> Rollout:
        return completed(planned)

    rows = [make_row({"responses_create_params": {"input": "hi"}}, "rows.jsonl", 1)]
    one, other = RowSource(rows, "mcqa"), RowSource(rows, "weather")
    for sources in ([one], [one, other]):
        await made_up_run(RolloutPlan(sources), run_one, output=tmp_path).run()
    with pytest.raises(ConfigError, match="'weather'"):
        await made_up_run(RolloutPlan([other, one]), run_one, output=tmp_path).run()


@pytest.mark.parametrize("fsync_s", [0.0, 0.01])
async def test_what_finished_is_put_on_the_disk(
    fsync_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rollout at once, or all after a time."""
    loop, synced, count = asyncio.get_running_loop(), asyncio.Event(), Counter[str]()

    def sync(fd: int) -> None:
        count["all"] += 1
        loop.call_soon_threadsafe(synced.set)

    async def run_one(planned: PlannedRollout) -> Rollout:
        if planned.task == 2:
            async with asyncio.timeout(20):
                await synced.wait()
            assert fsync_s or count["all"] == 2
        return completed(planned)

    monkeypatch.setattr(os, "fdatasync", sync)
    with collector(tmp_path, plan_of(3), run_one, concurrency=1, fsync_s=fsync_s) as (made, _):
        await made.run()
    assert made.progress.finished == 3


async def test_a_caller_gets_each_rollout_once(tmp_path: Path) -> None:
    """When it finished or failed permanently, not at each attempt."""
    attempts, given = Counter[int](), []

    async def run_one(planned: PlannedRollout) -> Rollout:
        attempts[planned.task] += 1
        return failed() if planned.task == 0 or attempts[1] < 3 else completed(planned)

    def see(rollout: CollectedRollout) -> None:
        given.append((rollout.task, rollout.status, rollout.attempt))

    plan = plan_of(2)
    await made_up_run(plan, run_one, pace=Pace(1)).run(on_rollout=see)
    assert given == [(0, "failed", 4), (1, "completed", 2)]


async def test_a_stack_that_dies_again_before_anything_finished_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = Counter[str]()

    @asynccontextmanager
    async def acquire(*_: Any, **__: Any) -> AsyncIterator[Any]:
        starts["all"] += 1
        assert starts["all"] < 10
        raise StackLostError("the daemon is gone")
        yield

    monkeypatch.setattr("gymgate.runs.collected.run.acquire", acquire)
    collection = Collection(
        stack=StackConfig(environments=("mcqa",)),
        policy=HTTPEndpoint(base_url="http://127.0.0.1:9/v1"),
        plan=plan_of(1),
        output=tmp_path / "run",
    )
    with pytest.raises(StackLostError, match="the daemon is gone"):
        await collection.run()
    assert starts["all"] == 2


async def test_a_failure_names_the_environment_of_its_agent(tmp_path: Path) -> None:
    """Though the row names only its agent: one that cannot be run, and one that the stack's daemon did not answer."""
    made_rows = [
        make_row(
            {"responses_create_params": {"input": f"{n}"}, "agent_ref": {"name": name}}, "rows.jsonl", n + 1
        )
        for n, name in enumerate(["a", "b", "unknown"])
    ]

    async def run_one(planned: PlannedRollout) -> Rollout:
        if planned.task == 1:
            return failed("timeout").model_copy(update={"environment": ""})
        raise DataError("no")

    plan = RolloutPlan([RowSource(made_rows, None)])
    await made_up_run(plan, run_one, output=tmp_path, agents={"a": "mcqa", "b": "weather"}).run()
    found = {value["line"]: value["environment"] for value in lines(tmp_path / FAILURES)}
    assert found == {1: "mcqa", 2: "weather", 3: ""}


async def test_a_lost_stack_ends_the_run_and_keeps_what_finished(tmp_path: Path) -> None:
    async def run_one(planned: PlannedRollout) -> Rollout:
        if planned.task == 7:
            raise StackLostError("the daemon is gone")
        return completed(planned)

    with collector(tmp_path, plan_of(10), run_one, concurrency=1) as (made, _):
        await raises(StackLostError, "the daemon is gone", made)
    assert [value["task"] for value in lines(tmp_path / ROLLOUTS)] == list(range(7))
    assert not made.in_flight


async def test_a_stall_is_named(tmp_path: Path) -> None:
    warned = asyncio.Event()

    async def run_one(planned: PlannedRollout) -> Rollout:
        await warned.wait()
        return completed(planned)

    with collector(tmp_path, plan_of(5), run_one, stall_s=0.05) as (made, _):
        found: list[str] = []

        def warn(message: str) -> None:
            if "expected_answer" not in message:  # of the rows, before the start
                found.append(message)
                warned.set()

        async def status() -> dict[str, Any]:
            replicas = {"http://a/v1": {"healthy": True}, "http://b/v1": {"healthy": False}}
            return {"calls": {"policy_model": 3}, "replicas": replicas}

        made.log, made.status = warn, status
        await made.run()
    assert " 0 s" in found[0]
    assert "mcqa rows.jsonl:1 (row " in found[0]
    assert "2 more" in found[0]
    assert "3 calls to policy_model" in found[0]
    assert "replica http://b/v1 " in found[0]


def test_waits_without_a_model_call() -> None:
    assert "5 rollouts " in describe_calls({"calls": {}}, 5)


async def test_cancelling_a_run_waits_for_nothing(tmp_path: Path) -> None:
    started = asyncio.Event()

    async def run_one(planned: PlannedRollout) -> Rollout:
        started.set()
        await asyncio.Event().wait()
        raise AssertionError

    with collector(tmp_path, plan_of(5), run_one) as (made, _):
        task = asyncio.create_task(made.run())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert lines(tmp_path / ROLLOUTS) == []


def write_rows(path: Path, count: int) -> Path:
    rows = ({"responses_create_params": {"input": f"{number}"}} for number in range(count))
    path.write_bytes(b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows))
    return path


def outcomes(path: Path) -> Counter[tuple[Any, float | None]]:
    found = [CollectedRollout.model_validate(value) for value in lines(path / ROLLOUTS)]
    return Counter((rollout.identity, rollout.reward) for rollout in found)


def run_with_kills(rows: Path, output: Path, repeats: int, kills: int, longest_s: float) -> int:
    """Kill it so many times at random moments, then let it end; how many of the kills came in time."""
    dice, killed = random.Random(5), 0
    for kill in range(kills + 1):
        arguments = [sys.executable, str(PROGRAM), str(rows), str(output), str(repeats), "50"]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as program:
            assert program.stdout is not None
            assert program.stdout.readline().startswith("ready")
            if kill < kills:
                try:
                    program.wait(dice.uniform(0, longest_s))
                except subprocess.TimeoutExpired:
                    program.send_signal(signal.SIGKILL)
                    killed += 1
            assert program.wait(60) in (0, -signal.SIGKILL)
    return killed


@pytest.mark.parametrize(
    ("rows", "repeats", "kills", "longest_s"),
    [(200, 5, 4, 0.1), pytest.param(500, 20, 20, 0.35, marks=pytest.mark.heavy)],
)
def test_a_killed_run_ends_as_one_that_was_not(
    tmp_path: Path, rows: int, repeats: int, kills: int, longest_s: float
) -> None:
    source = write_rows(tmp_path / "rows.jsonl", rows)
    started = time.monotonic()
    run_with_kills(source, tmp_path / "whole", repeats, 0, 0)
    killed = run_with_kills(source, tmp_path / "killed", repeats, kills, longest_s)
    print(f"{killed} kills, {time.monotonic() - started:.1f} s")
    whole = outcomes(tmp_path / "whole")
    assert killed == kills
    assert set(whole.values()) == {1}
    assert len(whole) == rows * repeats
    assert all(reward == reward_of(identity) for identity, reward in whole)
    assert outcomes(tmp_path / "killed") == whole


@pytest.mark.heavy
def test_memory_does_not_grow_with_the_rollouts(tmp_path: Path) -> None:
    """20 kB each: 10,000 of them would be 200 MB."""
    source, peaks = write_rows(tmp_path / "rows.jsonl", 500), []
    for repeats in (2, 20):
        arguments = [
            sys.executable,
            str(PROGRAM),
            str(source),
            str(tmp_path / f"{repeats}"),
            str(repeats),
            "50",
            "20",
        ]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=100, check=True)
        peaks.append(int(done.stdout.split()[-1]) / 1024)
    print(f"1,000 rollouts: {peaks[0]:.0f} MiB, 10,000 rollouts: {peaks[1]:.0f} MiB")
    assert peaks[1] - peaks[0] < 20
