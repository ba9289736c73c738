"""What `gymgate run` takes, and what it refuses before anything is started."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner

from gymgate.cli import cli
from gymgate.cli.options import GROUPS, OTHER
from gymgate.cli.rollout_commands import _checks, _with_check
from gymgate.cli.run import command
from gymgate.cli.texts import endpoint_list
from gymgate.core.config import StackConfig
from gymgate.core.errors import ConfigError, StackStartError
from gymgate.rollouts import Rollout
from gymgate.runs.collected import progress as progress_module
from gymgate.runs.collected.progress import RunProgress
from gymgate.runs.collected.progress_display import Lines, duration, state
from support.collecting import add, as_collected


def test_endpoint_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    assert endpoint_list("http://a/v1/, https://b:1/v1") == ["http://a/v1", "https://b:1/v1"]
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("SLURM_JOB_NODELIST_HET_GROUP_1", "g7")
    assert endpoint_list("slurm:8000,http://a/v1") == [
        "http://n1:8000/v1",
        "http://n2:8000/v1",
        "http://a/v1",
    ]
    assert endpoint_list("slurm/1:80") == ["http://g7:80/v1"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("http://a/v1,b:8000", "'b:8000'"),
        ("http://a/v1,", "''"),
        ("http://a/v1,http://a/v1/", "http://a/v1"),
        ("slurm:8000", "SLURM_JOB_NODELIST"),
        ("slurm", "'slurm'"),
    ],
)
def test_wrong_endpoint_lists(text: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=reason):
        endpoint_list(text)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("-m", "x"), "-m "),
        (
            ("--sampling", "top_p=1", "--wait-for-policy", "0"),
            "--sampling and --wait-for-policy",
        ),
        (("-b", "http://a/v1", "--replay-file", "f"), "--replay-file"),
        (("-b", "http://a/v1", "--sampling", "seed=1"), "use --seeds"),
        (("--seeds", "1,1"), "seeds 1 "),
        (("--seeds", "2"), "recorded rollouts"),
        (("--shard", "5/4"), "5/4"),
        (("--retries", "x=1"), "CLASS=N"),
    ],
)
def test_what_does_not_belong_together(tmp_path: Path, arguments: tuple[str, ...], reason: str) -> None:
    done = CliRunner().invoke(command, ["mcqa", "-o", str(tmp_path / "run"), *arguments])
    assert isinstance(done.exception, ConfigError), done.output
    assert reason in str(done.exception)
    assert not (tmp_path / "run").exists()


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    done = CliRunner().invoke(command, ["mcqa", "-o", str(tmp_path / "x")])
    assert isinstance(done.exception, ConfigError)
    assert f"-o {tmp_path / 'x'} " in str(done.exception)


@pytest.mark.parametrize("output", ["x.jsonl", "sub/x y.ndjson"])
def test_a_file_for_a_run_is_refused_with_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    """Before anything starts; rows that are there stay as they are."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.jsonl").write_text("{}\n")
    done = CliRunner().invoke(command, ["mcqa", "-o", output])
    assert isinstance(done.exception, ConfigError)
    [line] = str(done.exception).splitlines()
    directory = shlex.quote(output.rpartition(".")[0])
    assert f"-o {directory}," in line
    assert f"gymgate export {directory} --to jsonl -o {shlex.quote(output)}" in line
    assert "rollouts.jsonl" in line
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]
    assert (tmp_path / "x.jsonl").read_text() == "{}\n"


@pytest.mark.parametrize(
    "option",
    [("--shard", "1/2"), ("--retries", "1"), ("--rerun-failed",), ("--bodies",), ("--sync-every", "1")],
)
def test_options_of_a_directory_need_one(option: tuple[str, ...]) -> None:
    done = CliRunner().invoke(command, ["mcqa", *option])
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception).startswith(f"{option[0]} needs ")
    assert str(done.exception).endswith("-o DIR")


@pytest.mark.parametrize(("name", "more"), [("run", ()), ("check", ("Measurements", "Thresholds"))])
def test_options_stand_in_groups(name: str, more: tuple[str, ...]) -> None:
    help_text = CliRunner().invoke(cli, [name, "--help-all"]).output
    titles = [line for line in help_text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    common = [*GROUPS[:5], *more, *GROUPS[7:]]
    assert common == [each for each in GROUPS if each in common]
    assert titles == [f"{each}:" for each in (*common, OTHER)]
    assert len([line for line in help_text.partition("Other:")[2].splitlines() if line.strip()]) == 2


def test_the_first_line_comes_some_seconds_after_the_servers_are_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr("gymgate.runs.collected.progress_display.time.monotonic", lambda: now)
    lines, progress, printed = Lines(), RunProgress(total=20), []
    for now in (100.0, 104.0, 106.0, 107.0, 137.0):  # noqa: B007, the clock
        lines(progress)
        printed.append(capsys.readouterr().err)
    assert [bool(each) for each in printed] == [False, False, True, False, True]


def test_names_of_environments_are_completed() -> None:
    completion = BashComplete(cli, {}, "gymgate", "_GYMGATE_COMPLETE")
    values = [item.value for item in completion.get_completions(["run"], "workplace_a")]
    assert values == ["workplace_assistant"]
    assert [item.type for item in completion.get_completions(["run"], "./")] == ["file"]


def looks(tokens: dict[str, int], away: str = "") -> dict[str, dict[str, object]]:
    return {
        f"http://{name}/v1": {"healthy": name != away, "output_tokens": count}
        for name, count in tokens.items()
    }


class Clock:
    """In the place of `time` in the module of progress."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress_module, "time", made)
    return made


def running() -> RunProgress:
    progress = RunProgress(total=10, finished=4, output_tokens=620, started=0.0)
    progress._note_time()
    return progress


def test_the_line_shows_each_replica(clock: Clock) -> None:
    progress = running()
    progress.sample_replicas(looks({"a:1": 0, "b:1": 0}))
    clock.now = 10.0
    progress.sample_replicas(looks({"a:1": 310, "b:1": 290}))
    assert state(progress).endswith("62 tokens/s (a:1 31, b:1 29)")
    clock.now = 20.0
    progress.sample_replicas(looks({"a:1": 820, "b:1": 290}, away="b:1"))
    assert state(progress).endswith("tokens/s (a:1 41, b:1 left out)")


def test_rates_are_those_of_the_last_minute(clock: Clock) -> None:
    """Counted from the moment at which the stack is ready, and with a point a second."""
    progress = RunProgress(total=1000, started=0.0, last_finished=0.0)
    clock.now = 100.0
    progress.start()
    assert (progress.started, progress.last_finished) == (100.0, 100.0)
    for count in [1] * 100 + [3] * 100:
        for _ in range(count):
            clock.now += 1 / count
            progress.finished += 1
            progress.output_tokens += 50
            progress._note_time()
    assert progress.rate == pytest.approx(3.0, abs=0.1)
    assert progress.token_rate == pytest.approx(150.0, abs=5)
    assert len(progress._recent) < 65


def test_what_is_left_is_what_nobody_has_done() -> None:
    """Nine of 100 are left: 90 were there, and this process gave one up."""
    progress = RunProgress(total=100, resumed=90)
    rollout = as_collected(Rollout(id="x", environment="e", agent="a", status="failed"))
    progress.count_failure(rollout, final=True)
    assert (progress.done, progress.left) == (91, 9)
    assert progress.rate
    assert progress.eta_s == pytest.approx(9 / progress.rate, rel=0.5)


def test_a_resumed_run_shows_the_mean_of_the_whole_run() -> None:
    progress = RunProgress(total=10, resumed=3)
    for repeat, reward in enumerate((1.0, 0.0)):
        rollout = Rollout(id="x", environment="e", agent="a", status="completed", reward=reward)
        add(progress.tasks, as_collected(rollout, repeat))
    progress.count(as_collected(rollout.model_copy(update={"reward": 0.5}), 2))
    assert state(progress).startswith("mean reward 0.500")
    progress.count_failure(
        as_collected(rollout.model_copy(update={"status": "failed", "reward": None}), 3), final=True
    )
    assert state(progress).startswith("mean reward 0.500")
    progress.tasks.count_failed_as(0.0)
    assert state(progress).startswith("mean reward 0.375"), "as the table"


def test_many_replicas_are_a_range(clock: Clock) -> None:
    names = [f"n{number}:1" for number in range(8)]
    progress = running()
    progress.sample_replicas(looks(dict.fromkeys(names, 0)))
    clock.now = 10.0
    progress.sample_replicas(looks({name: 100 * place for place, name in enumerate(names)}, away="n0:1"))
    assert "(10-70 " in state(progress)
    assert "n0:1 left out" in state(progress)


def test_durations() -> None:
    assert [duration(seconds) for seconds in (7, 185, 7385)] == ["7 s", "3:05", "2:03:05"]


def test_an_environment_called_all_has_the_rate_of_its_own_rollouts() -> None:
    progress = RunProgress(started=0.0, last_finished=2.0)
    progress.by_environment.update({"all": 2, "f": 6})
    assert [progress.mean_rate(name) for name in ("all", "f", "g", None)] == [1.0, 3.0, None, 4.0]


def test_environments_whose_servers_failed_are_to_be_checked_next() -> None:
    """By the name or path that the command had: `gymgate check` names the file and the line of an exception."""
    progress = RunProgress(total=4)
    kinds = {
        "own": ("environment", "T"),
        "mcqa": ("policy", "T"),
        "calendar": ("infrastructure", "ServerDiedError"),
        "gpqa_diamond": ("infrastructure", "StackLostError"),
    }
    for name, (kind, type_name) in kinds.items():
        error = {"kind": kind, "message": "m", "type": type_name}
        rollout = Rollout.model_validate(
            {"id": name, "environment": name, "agent": "a", "status": "failed", "error": error}
        )
        add(progress.tasks, as_collected(rollout))
    stack = StackConfig(environments=("mcqa", "own dir/own", "calendar", "gpqa_diamond"))
    run: Any = SimpleNamespace(progress=progress, stack=stack)
    steps = [step.partition(",")[0] for step in _checks(run)]
    assert steps == ["gymgate check 'own dir/own'", "gymgate check calendar"]
    run.stack = StackConfig(environments="copies/of_own")  # the environment in it is called `own`
    assert [step.partition(",")[0] for step in _checks(run)] == ["gymgate check copies/of_own"]


def test_of_a_server_that_ended_while_starting_the_next_step_is_said() -> None:
    run: Any = SimpleNamespace(stack=StackConfig(environments="own dir/own"))
    died = StackStartError("it died", environment="own", log_tail="line", exit_status=3)
    shown = _with_check(died, run)
    assert "gymgate check 'own dir/own' -v" in str(shown)
    assert (shown.environment, shown.exit_status) == ("own", 3)
    for error in (
        StackStartError("not up", log_tail="line", timed_out=True),
        StackStartError("x", exit_status=3),
    ):
        assert _with_check(error, run) is error, "the command would show no more"
