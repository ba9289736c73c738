"""`--log-to`: what the real libraries store, where they are installed, and what a library that fails costs a run."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import queue
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import orjson
import pytest
from click.testing import CliRunner

from gymgate.cli.aggregate import command as aggregate
from gymgate.cli.rollout_commands import conduct
from gymgate.cli.run import command
from gymgate.core.config import EnvironmentConfig, HTTPEndpoint, StackConfig
from gymgate.core.errors import MissingExtraError
from gymgate.gym.row_sources import RowSource
from gymgate.results import trackers, tracking
from gymgate.results.trackers import LIBRARIES, log_run
from gymgate.results.tracking import RunTracking, log_message, summary_of
from gymgate.rollouts import ModelCall, RolloutError, Usage
from gymgate.rollouts.row import make_row
from gymgate.runs.collected.progress import RunProgress
from gymgate.runs.collected.run import Collection
from gymgate.runs.described.plan import RolloutPlan
from gymgate.runs.described.settings import shown_settings
from gymgate.runs.stored.record import CollectedRollout, to_line
from gymgate.runs.stored.score import score_of

SECRETS = ("sk-secret", "Bearer x", "hunter2")


def rollout(number: int, **fields: Any) -> CollectedRollout:
    """Repeat `number` of one row, solved every other time."""
    known: dict[str, Any] = {
        "status": "completed",
        "reward": float(number % 2),
        "result": {"extracted_answer": "A"},
    }
    calls = [
        ModelCall(index=0, dialect="chat", usage=Usage(input_tokens=40, cached_tokens=10, output_tokens=10))
    ]
    place = {"row_key": "0" * 16, "repeat": number, "source": "s", "line": 1}
    return CollectedRollout(
        id="x", environment="mcqa", agent="a", calls=calls, **place, **{**known, **fields}
    )


def failed(number: int) -> CollectedRollout:
    error = RolloutError(kind="timeout", type="RolloutTimeoutError", message="late")
    return rollout(number, status="failed", reward=None, result=None, error=error)


def make_run(log: list[str], output: Path | None = None) -> Collection:
    """A run that is described and not started, with secrets wherever a user may have put one."""
    overrides = (("mcqa.a.api_key", SECRETS[0]), ("mcqa.a.headers", {"X": SECRETS[1]}))
    row = make_row({"responses_create_params": {"input": "hi"}}, "rows", 1)
    url = f"http://user:{SECRETS[2]}@host:8000/v1"
    sampling = (("temperature", 0.5), ("extra_headers", {"X": SECRETS[1]}), ("user", url))
    return Collection(
        stack=StackConfig(environments=("mcqa",)),
        stack_settings={
            "environments": [EnvironmentConfig(name="mcqa", overrides=overrides).model_dump(mode="json")]
        },
        policy=HTTPEndpoint(base_url=url, model="m", sampling=sampling),
        plan=RolloutPlan([RowSource([row], "mcqa")], repeats=4),
        names=["rows"],
        output=output,
        log=log.append,
    )


async def track(library: str, log: list[str], output: Path | None = None) -> RunTracking:
    """Log three rollouts that finished and one that failed."""
    run = make_run(log, output)
    run.progress.total = 4
    run.progress.start()
    async with RunTracking(library, run) as tracked:
        for each in (rollout(0), rollout(1), rollout(2), failed(3)):
            if each.error is None:
                run.progress.count(each)
            else:
                run.progress.count_failure(each, final=True)
            tracked.add(each)
    return tracked


def stand_in(library: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library of that name that does what no real one can be made to do."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / f"{library}.py").write_text(
        f"class Settings:\n    def __init__(self, **_): pass\n{code}"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"), prepend=os.pathsep)


def processes_of(session: int) -> list[str]:
    """Processes of a session that have not ended."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group, its_session = status.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if session in (int(its_session), int(group)) and state != "Z":
            found.append(status.parent.name)
    return found


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise RuntimeError('no login here')", "no login here"),
        ("def init(**_): raise ValueError('no\\nnetwork')", "no network"),
        ("import os, sys; print('out of luck', file=sys.stderr, flush=True); os._exit(3)", "out of luck"),
        ("import os; os.kill(os.getpid(), 9)", "no reason"),
        ("def init(**_): raise SystemExit(3)", "SystemExit"),
    ],
)
async def test_a_library_that_fails_is_one_line_of_the_run(
    code: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in("wandb", code, tmp_path, monkeypatch)
    log: list[str] = []
    tracked = await asyncio.wait_for(track("wandb", log), 30)
    [line] = log
    assert line.startswith("warning: ")
    assert reason in line
    assert "\n" not in line
    assert tracked._process is not None
    assert processes_of(tracked._process.pid) == []


async def test_a_library_that_has_failed_is_signalled_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number may be another process's at the end of the run, hours later."""
    stand_in("wandb", "raise RuntimeError('no login here')", tmp_path, monkeypatch)
    run = make_run([])
    failing = asyncio.Event()
    run.log = lambda _: failing.set()
    async with asyncio.timeout(30), RunTracking("wandb", run) as tracked:
        tracked.add(rollout(0))
        await failing.wait()
        assert tracked._process is not None
        await tracked._process.wait()
        signalled: list[int] = []
        monkeypatch.setattr(os, "killpg", lambda group, _: signalled.append(group))
        tracked.add(rollout(1))
    assert signalled == []


HANGS = (
    "import signal, subprocess\nchild = subprocess.Popen(['sleep', '1000'])\ndef init(**_): signal.pause()\n"
)
HANGS_AT_THE_END = """
import signal
class Run:
    url, dir, summary = "here", None, {}
    def log(self, *_, **__): pass
    def finish(self, **_): signal.pause()
def init(**_): return Run()
"""
HANGS_MIDWAY = HANGS_AT_THE_END.replace(
    "def log(self, *_, **__): pass", "def log(self, *_, **__): signal.pause()"
)


async def test_a_library_that_does_not_start_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in("wandb", HANGS, tmp_path, monkeypatch)
    monkeypatch.setattr(tracking, "START_S", 2.0)
    monkeypatch.setattr(tracking, "END_S", 60.0)
    log: list[str] = []
    began = time.monotonic()
    tracked = await asyncio.wait_for(track("wandb", log), 30)
    assert time.monotonic() - began < 20
    assert len([line for line in log if line.startswith("warning: ")]) == 1
    assert tracked._process is not None
    assert processes_of(tracked._process.pid) == []


async def test_a_library_that_does_not_end_is_waited_for_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in("wandb", HANGS_AT_THE_END, tmp_path, monkeypatch)
    monkeypatch.setattr(tracking, "END_S", 2.0)
    monkeypatch.setattr(tracking, "NOTICE_S", 0.1)
    log: list[str] = []
    tracked = await asyncio.wait_for(track("wandb", log), 30)
    assert any(line.startswith("waiting for wandb") for line in log)
    assert log[-1].startswith("warning: ")
    assert tracked._process is not None
    assert processes_of(tracked._process.pid) == []


async def test_what_a_library_does_not_take_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hangs at its first log: its process holds a number of messages, the pipe a little, and this process one message."""
    stand_in("wandb", HANGS_MIDWAY, tmp_path, monkeypatch)
    monkeypatch.setattr(tracking, "END_S", 1.0)
    log: list[str] = []
    message = {"metrics": {"x": 1.0}, "step": 1, "summary": {str(n): 1.0 for n in range(1000)}}
    async with asyncio.timeout(60), RunTracking("wandb", make_run(log)) as tracked:
        await tracked.start()
        assert tracked._process is not None
        assert tracked._process.stdin is not None
        waiting = []
        for _ in range(1000):  # 16 MB
            tracked.send(message)
            waiting.append(tracked._process.stdin.transport.get_write_buffer_size())
            await asyncio.sleep(0)
    assert 0 < max(waiting) < 100_000
    assert log[-1].startswith("warning: ")


def test_a_library_that_is_not_there_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    [choices] = [
        each.type.choices
        for each in command.params
        if isinstance(each.type, click.Choice) and "--log-to" in each.opts
    ]
    assert {*choices} == {*LIBRARIES}
    for library in LIBRARIES:
        done = CliRunner().invoke(command, ["mcqa", "--log-to", library, "--dry-run"])
        assert isinstance(done.exception, MissingExtraError)
        assert f"pip install {library}" in str(done.exception)


def test_settings_hold_no_secret() -> None:
    shown = shown_settings(make_run([]).settings())
    text = orjson.dumps(shown).decode()
    assert not [secret for secret in SECRETS if secret in text]
    assert shown["policy.model"] == "m"
    assert shown["policy.sampling.temperature"] == 0.5
    assert shown["environments.0.overrides.mcqa.a.api_key"] == "***"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("search.api_keys", ["hunter2"]),
        ("search.password", 7411),
        ("search.openai_api_key_2", "hunter2"),
        ("db.pw", "hunter2"),
        ("db.root_pwd", "hunter2"),
        ("db.auth", "hunter2"),
        ("db.credentials", {"user": "u", "passwd": "hunter2"}),
        ("db.url", "https://u:a@hunter2@host/v1"),
        ("search.url", "https://host/v1?page=2&api_key=hunter2"),
    ],
)
def test_settings_hold_no_secret_of_an_environment(name: str, value: Any) -> None:
    settings = {"environments": [{"name": "e", "overrides": [["e.max_tokens", 8192], [f"e.{name}", value]]}]}
    shown = shown_settings(settings)
    assert not [secret for secret in ("hunter2", "7411") if secret in orjson.dumps(shown).decode()]
    assert shown["environments.0.overrides.e.max_tokens"] == 8192


def test_only_numbers_are_logged() -> None:
    rows = [{"environment": "e", "mean_reward": float("nan"), "pass@1": 0.5, "pass@2": None, "agent": "text"}]
    assert summary_of(rows) == {"e/pass@1": 0.5}


def pieces(data: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's form: blocks of 32 KiB, in which a record may go on in the next block."""
    place, record = 7, b""
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


class Noted:
    """A tracker that keeps what it gets."""

    where = "here"

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.summary: dict[str, float] = {}
        self.failed: bool | None = None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.logged.append((step, dict(metrics)))

    def finish(self, summary: Mapping[str, float], *, failed: bool) -> None:
        self.summary, self.failed = dict(summary), failed


def log_messages(*messages: dict[str, Any] | None) -> Noted:
    noted, waiting = Noted(), queue.Queue[dict[str, Any] | None]()
    for message in messages:
        waiting.put(message)
    log_run(lambda name, settings: noted, waiting, lambda **_: None)
    return noted


def test_metrics_are_those_of_the_whole_run_after_a_resume() -> None:
    """A rollout had finished and two had failed permanently; `--rerun-failed` runs these again, of which one finishes."""
    progress = RunProgress(total=4, resumed=1)
    progress.tasks.add(score_of(rollout(0)))
    for number in (2, 3):
        progress.tasks.add(score_of(failed(number)))
    progress.count(rollout(1))
    progress.count(rollout(3))
    message = log_message(progress)
    assert message["step"] == 3
    expected = {"rollouts": 3, "mcqa/mean_reward": 2 / 3, "mcqa/pass@1": 2 / 3, **PASSES}
    assert {name: message["metrics"][name] for name in expected} == expected
    assert [message["summary"][f"mcqa/{name}"] for name in ("rollouts", "failed", "scored")] == [4, 1, 3]


PASSES = {"mcqa/pass@2": 1.0, "mcqa/pass@3": 1.0}


def test_a_run_whose_process_is_gone_has_failed() -> None:
    message = {"metrics": {"rollouts": 1}, "step": 1, "summary": {"mcqa/rollouts": 1}}
    noted = log_messages({"name": "n", "settings": {}}, message, None)
    assert noted.logged == [(1, {"rollouts": 1})]
    assert (noted.failed, noted.summary) == (True, {"mcqa/rollouts": 1})


def test_a_stored_run_has_its_table_as_summary() -> None:
    noted = log_messages({"name": "n", "settings": {}}, {"end": "completed", "summary": {"e/pass@1": 0.5}})
    assert (noted.logged, noted.summary, noted.failed) == ([], {"e/pass@1": 0.5}, False)


EXPECTED = {
    "rollouts": 4,
    "failed": 1,
    "failed_attempts": 1,
    "output_tokens": 30,
    "cached_share": 0.25,
    "mcqa/mean_reward": pytest.approx(1 / 3),
    "mcqa/pass@1": pytest.approx(1 / 3),
    "mcqa/pass@2": pytest.approx(2 / 3),
}


async def test_wandb_has_settings_metrics_and_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("wandb is not installed: run ./dev train")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    log: list[str] = []
    await asyncio.wait_for(track("wandb", log), 90)
    assert not [line for line in log if line.startswith("warning")], log
    from wandb.proto.wandb_internal_pb2 import Record

    [path] = [*tmp_path.glob("wandb/offline-run-*/*.wandb")]  # noqa: ASYNC240
    assert not [secret for secret in SECRETS if secret.encode() in path.read_bytes()]
    history: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    config: dict[str, Any] = {}
    for data in pieces(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        for found, items in (
            (history, record.history.item),
            (summary, record.summary.update),
            (config, record.run.config.update),
        ):
            found |= {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
    assert {name: history.get(name) for name in EXPECTED} == EXPECTED
    assert summary["mcqa/failed"] == 1
    assert config["policy.model"] == "m"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of its own use of SQLAlchemy
async def test_mlflow_has_settings_metrics_and_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("mlflow") is None:
        pytest.skip("mlflow is not installed: run ./dev train")
    monkeypatch.chdir(tmp_path)
    store = f"sqlite:///{tmp_path / 'store.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    log: list[str] = []
    await asyncio.wait_for(track("mlflow", log), 90)
    assert not [line for line in log if line.startswith("warning")], log
    from mlflow import MlflowClient

    client = MlflowClient(store)
    [experiment] = [each for each in client.search_experiments() if each.name == "gymgate"]
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    expected = {name.replace("@", "_at_"): value for name, value in EXPECTED.items()}
    assert {name: run.data.metrics.get(name) for name in expected} == expected
    assert run.data.metrics["mcqa/failed"] == 1
    assert run.data.params["policy.model"] == "m"
    assert not [secret for secret in SECRETS if secret in str(run.data.params)]


async def test_trackio_has_settings_metrics_and_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("trackio") is None:
        pytest.skip("trackio is not installed: run ./dev train")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    log: list[str] = []
    await asyncio.wait_for(track("trackio", log), 90)
    assert not [line for line in log if line.startswith("warning")], log
    import sqlite3

    [path] = [*(tmp_path / "trackio").glob("gymgate.db")]
    with sqlite3.connect(path) as database:
        rows = [json.loads(row[0]) for row in database.execute("SELECT metrics FROM metrics ORDER BY id")]
        [config] = [json.loads(row[0]) for row in database.execute("SELECT config FROM configs")]
    metrics = {name: value for row in rows for name, value in row.items()}
    assert {name: metrics.get(name) for name in EXPECTED} == EXPECTED
    assert metrics["mcqa/failed"] == 1
    assert config["policy.model"] == "m"
    assert not [secret for secret in SECRETS if secret in str(config)]


def test_a_stored_run_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("trackio") is None:
        pytest.skip("trackio is not installed: run ./dev train")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    (tmp_path / "run.jsonl").write_bytes(to_line(rollout(0)) + to_line(rollout(1)))
    done = CliRunner().invoke(aggregate, [str(tmp_path / "run.jsonl"), "--log-to", "trackio"])
    assert done.exit_code == 0, done.output
    assert "warning" not in done.output
    import sqlite3

    with sqlite3.connect(tmp_path / "trackio" / "gymgate.db") as database:
        [row] = database.execute("SELECT metrics FROM metrics")
    assert json.loads(row[0])["mcqa/pass@2"] == 1.0


def test_names_of_figures_are_those_that_mlflow_takes() -> None:
    assert trackers.MLflow._name("mcqa/pass@1") == "mcqa/pass_at_1"
    assert trackers.MLflow._name("environments.0.overrides.a=b") == "environments.0.overrides.a_b"


def test_settings_are_sent_by_a_hundred() -> None:
    assert [len(some) for some in trackers._batches({str(n): n for n in range(250)})] == [100, 100, 50]


def test_a_reason_that_is_logged_holds_no_password() -> None:
    log: list[str] = []
    tracked = tracking.Tracking("wandb", "n", {}, log.append)
    for _ in range(2):
        tracked._give_up("cannot reach http://me:secret@host/api.")
    [line] = log
    assert "http://host/api;" in line


def test_a_tracker_gets_failed_rollouts_with_the_reward_that_the_table_counts_them_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run([], tmp_path / "run")
    means = []

    async def two_rollouts(*_: Any, **__: Any) -> None:
        async with contextlib.AsyncExitStack() as exits:
            run._open(exits)
            run.progress.count(rollout(1))
            run.progress.count_failure(failed(2), final=True)
            means.append(log_message(run.progress)["summary"]["mcqa/mean_reward"])

    monkeypatch.setattr(run, "run", two_rollouts)
    for failed_as in (None, 0.0):
        conduct(run, lambda _: None, None, failed_as=failed_as)
    assert means == [1.0, 0.5]


def test_what_failed_before_a_resume_has_failed() -> None:
    progress = RunProgress(given_up_before=2, failed=1)
    assert log_message(progress)["metrics"]["failed"] == 3
