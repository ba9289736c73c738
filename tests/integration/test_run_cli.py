"""`gymgate run` as a user runs it: a process, real servers, real scoring."""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gymgate.cli import main
from gymgate.core.config import EnvironmentConfig, HTTPEndpoint, ReplayEndpoint, StackConfig
from gymgate.gym.runtime import open_catalog
from gymgate.runs.collected.prepare import prepare
from gymgate.runs.collected.replay_server import ReplayServer
from gymgate.runs.counted.aggregate import read_runs
from gymgate.runs.counted.metrics import summary_rows
from gymgate.runs.described.spec import RunSpec
from support.json_output import read_output
from support.stacks import all_gone
from support.upstream import scripted_chat

# The first use of a release installs it.
pytestmark = [pytest.mark.gym, pytest.mark.warm, pytest.mark.timeout(900)]

COMMAND = [sys.executable, "-m", "gymgate", "run"]
THREE = ("calendar", "example_multi_step", "xlam_fc")
MEANS = {"calendar": 0.4, "example_multi_step": 1.0, "xlam_fc": 0.6}


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *args], capture_output=True, text=True, timeout=600, check=False)


def means(done: subprocess.CompletedProcess[str]) -> dict[str, float]:
    environments: dict[str, Any] = json.loads(done.stdout)["environments"]
    return {name: each["mean_reward"] for name, each in environments.items()}


def test_without_an_endpoint_the_recordings_are_the_policy(tmp_path: Path) -> None:
    output = tmp_path / "new" / "out"
    done = run("example_session_state_mgmt", "-n", "2", "-r", "10", "-c", "5", "--bodies", "-o", str(output))
    assert done.returncode == 0, done.stderr
    head, row, _, note = done.stdout.splitlines()
    assert note.startswith("2 example rows")
    assert done.stderr.splitlines()[-1].startswith("next: gymgate report ")
    assert head.split()[0] == "environment"
    assert row.split() == [
        "example_session_state_mgmt",
        "20",
        "1.000",
        "±n/a",
        "1.000",
        "1.000",
        "replayed",
    ]
    assert re.search("^policy: .*replayed", done.stderr)
    lines = [json.loads(line) for line in (output / "rollouts.jsonl").read_text().splitlines()]
    assert [line["reward"] for line in lines] == [1.0] * 20
    assert {(line["line"], line["repeat"]) for line in lines} == {
        (line, repeat) for line in (1, 2) for repeat in range(10)
    }
    assert all(len(line["calls"]) == 3 for line in lines)
    [metrics] = summary_rows(read_runs([output]).tasks)
    assert (metrics["rollouts"], metrics["pass@10"]) == (20, 1.0)
    again = run("example_session_state_mgmt", "--replay-file", str(output), "--json")
    assert again.returncode == 0, again.stderr
    (metrics,) = read_output("run", again.stdout)["environments"].values()
    assert (metrics["rollouts"], metrics["mean_reward"]) == (2, 1.0)
    assert "3 of 5 rows" in again.stderr


def test_servers_that_linger_serve_the_next_command_that_lingers() -> None:
    def lingering(*words: str) -> tuple[list[dict[str, Any]], str]:
        done = run("example_session_state_mgmt", "-n", "1", "--hang-timeout", str(1000 + os.getpid()), *words)
        assert done.returncode == 0, done.stderr
        command = [sys.executable, "-m", "gymgate", "ps", "--json"]
        listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        stacks = read_output("ps", listed)["stacks"]
        return [each for each in stacks if each["ends_in_s"] and "example_session" in str(each)], done.stderr

    stacks, said = lingering("--linger", "60")
    try:
        assert said.splitlines()[-1].endswith("gymgate stop ends the servers, which else stay for 60 s")
        later, _ = lingering("--linger", "90")
        assert [each["pid"] for each in later] == [each["pid"] for each in stacks]
        assert 60 < later[0]["ends_in_s"] <= 90
        alone, said = lingering()
        assert "gymgate stop" not in said
        assert [each["pid"] for each in alone] == [each["pid"] for each in stacks]
    finally:
        for stack in stacks:
            os.kill(stack["pid"], signal.SIGTERM)
    assert asyncio.run(all_gone([stack["pid"] for stack in stacks]))
    assert len(stacks) == 1


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("run simpleqa", "--judge genrm_model=URL"),
        ("run mcqa simpleqa --judge other=policy", "--judge genrm_model=URL"),
        ("run simpleqa --set simpleqa.resources_servers.simpleqa.value=x", "--judge genrm_model=URL"),
        ("run simpleqa -o {tmp}/out", "--judge genrm_model=URL"),
        ("eval run --env simpleqa", "--judge genrm_model=URL"),
    ],
)
def test_a_judge_without_an_endpoint_is_refused_before_servers_start(
    words: str, option: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "gymgate", *words.format(tmp=tmp_path).split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stderr
    *before, line = done.stderr.splitlines()
    assert line.startswith("gymgate: environment 'simpleqa' ")
    assert "'genrm_model'" in line
    assert option in line
    assert "'none'" in line
    assert not any("starting" in each for each in before), done.stderr
    assert not (tmp_path / "out" / "rollouts.jsonl").exists()
    if "-b" not in words and "--set" not in words:
        assert "`gymgate check resources_servers/simpleqa`" in line
        assert not any("reading" in each for each in before)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "--set nosuch.resources_servers.x.y=1",
            "mcqa, mcqa_environment_server, mcqa_simple_agent",
        ),
        ("--set nosuch.max_steps=1", "'nosuch.max_steps'"),
        ("--judge nosuch=policy", "'nosuch'"),
        (
            "simpleqa --judge nosuch=policy --judge genrm_model=policy",
            " genrm_model",
        ),
    ],
)
def test_a_server_that_is_not_there_is_named_with_those_that_are(words: str, told: str) -> None:
    done = run("mcqa", "-n", "1", *words.split())
    assert (done.returncode, done.stdout) == (1, "")
    assert told in done.stderr.splitlines()[-1]


def test_without_its_judge_a_rollout_that_calls_it_fails() -> None:
    done = run("simpleqa", "-n", "1", "--judge", "genrm_model=none", "--json")
    assert done.returncode == 1, done.stderr
    summary = json.loads(done.stdout)
    assert summary["environments"]["simpleqa"]["mean_reward"] is None
    assert "'genrm_model'" in json.dumps(summary)


def test_several_environments_with_an_endpoint_of_either_dialect() -> None:
    with ReplayServer(THREE) as server:
        for dialect in ("chat", "responses"):
            done = run(*THREE, "-b", server.base_url, "--dialect", dialect, "--json")
            assert (done.returncode, means(done)) == (0, MEANS), done.stderr


def test_a_price_shows_tokens_and_cost_of_the_whole_run(tmp_path: Path) -> None:
    command = [
        "example_single_tool_call",
        "-n",
        "2",
        "-m",
        "m",
        "-o",
        str(tmp_path / "run"),
        "--price",
        "1000,5000",
    ]
    with scripted_chat(lambda _: "cold") as url:
        for repeats, rollouts, cost in ((1, 2, "$0.0260"), (2, 4, "$0.0520")):
            done = run(*command, "-b", url, "-r", str(repeats))
            assert done.returncode == 0, done.stderr
            _, row = done.stdout.split("\n\n")[1].splitlines()
            assert row.split()[1:] == [
                "policy",
                str(rollouts),
                str(rollouts),
                str(3 * rollouts),
                "-",
                str(2 * rollouts),
                cost,
            ]
        done = run(*command, "-b", url, "-r", "2", "--json")
    [usage] = read_output("run", done.stdout)["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["cost"]) == (12, 8, pytest.approx(0.052))


@pytest.mark.parametrize(
    ("environment", "warned"),
    [
        ("math_with_code", True),
        ("mcqa", False),
        ("reasoning_gym", False),
        (EnvironmentConfig(name="reasoning_gym", config="reasoning_gym_codex_agent"), True),
    ],
)
def test_code_of_a_model_is_warned_of_before_a_start(environment: Any, warned: bool) -> None:
    said: list[str] = []
    with scripted_chat(lambda _: "cold") as url:
        policy = HTTPEndpoint(base_url=url, model="m")
        spec = RunSpec(stack=StackConfig(environments=(environment,)), policy=policy)
        prepare(spec, output=None, shard=(1, 1), rerun_failed=False, log=said.append)
    assert any("with your rights" in line for line in said) == warned


@pytest.mark.parametrize("given", [True, False])
def test_code_of_recorded_answers_is_warned_of_unless_the_release_ships_them(given: bool) -> None:
    said: list[str] = []
    recorded = open_catalog().find("math_with_code").path / "data" / "example_rollouts.jsonl"
    policy = ReplayEndpoint(rollouts=(str(recorded),)) if given else None
    spec = RunSpec(stack=StackConfig(environments=("math_with_code",)), policy=policy)
    prepare(spec, output=None, shard=(1, 1), rerun_failed=False, log=said.append)
    assert any("recorded answers hold, with your rights" in line for line in said) == given


@pytest.mark.heavy
def test_a_blended_file(tmp_path: Path) -> None:
    catalog = open_catalog()
    rows = []
    for name in THREE:
        environment = catalog.find(name)
        reference = {"type": "responses_api_agents", "name": environment.config().agents[0].name}
        lines = environment.data_file().path.read_text().splitlines()
        rows += [json.dumps({**json.loads(line), "agent_ref": reference}) for line in lines]
    path = tmp_path / "blend.jsonl"
    path.write_text("".join(f"{row}\n" for row in [*rows[::2], *rows[1::2]]))
    done = run(*THREE, "--data", str(path), "--json")
    assert (done.returncode, means(done)) == (0, MEANS), done.stderr
    with path.open("a") as file:
        file.write('{"prompt": "raw"}\n')
    done = run(*THREE, "--data", str(path), "-c", "1")
    assert done.returncode == 1
    assert f"left out: {path}:16: has no responses_create_params" in done.stderr
    assert len(done.stdout.splitlines()) == 6


def test_rows_that_cannot_be_read_or_run_stop_no_others(tmp_path: Path) -> None:
    """The second line is no JSON, the third names an agent that no environment has; none of them is the last."""
    [first, second, *_] = (
        open_catalog().find("example_session_state_mgmt").data_file().path.read_text().splitlines()
    )
    stray = json.dumps({**json.loads(first), "agent_ref": {"type": "responses_api_agents", "name": "nobody"}})
    path, output = tmp_path / "rows.jsonl", tmp_path / "out"
    path.write_text("\n".join([first, "{", stray, second]) + "\n")
    done = run("example_session_state_mgmt", "--data", str(path), "-r", "2", "-c", "1", "-o", str(output))
    assert done.returncode == 1
    row = done.stdout.splitlines()[1].split()
    assert row[:6] == ["example_session_state_mgmt", "6", "2", "3", "2", "1.000"]
    assert f"left out: {path}:2: not JSON" in done.stderr
    assert f"2 x DataError: {path}:3: " in done.stderr
    assert "'nobody'" in done.stderr
    lines, failures = (
        [json.loads(line) for line in (output / name).read_text().splitlines()]
        for name in ("rollouts.jsonl", "failures.jsonl")
    )
    assert [(line["line"], line["status"]) for line in lines] == [(1, "completed"), (4, "completed")] * 2
    assert [(line["line"], line["final"]) for line in failures] == [(3, True)] * 2
    assert failures[0]["error"]["kind"] == "data"
    assert failures[0]["source"] == str(path)


def test_failures_are_grouped_and_change_the_exit_code() -> None:
    with ReplayServer(("calendar",)) as server:
        done = run("example_multi_step", "-b", server.base_url, "-m", "m")
        counted = run("example_multi_step", "-b", server.base_url, "-m", "m", "-n", "1", "--failed-as", "0")
    assert (done.returncode, counted.returncode) == (1, 1)
    assert counted.stdout.splitlines()[2] == "1 rollout: none scored; 1 failed and counted as 0 (1 by policy)"
    assert "0.000 ±n/a" in counted.stdout
    assert done.stdout.splitlines()[1].split() == ["example_multi_step", "5", "5", "5", "0", "-", "-"]
    assert [line for line in done.stderr.splitlines() if " x PolicyError: " in line]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["mcqaa"], "no environment 'mcqaa'"),
        (["mcqa", "--config", "no"], "'no'"),
        (["mcqa", "--data", "train2"], "'train2'"),
        (["mcqa", "--data", "./none.jsonl"], "'none.jsonl'"),
        (["calendar", "--agent", "no"], "'no'"),
        (["multichallenge"], "multichallenge"),
        (["mcqa", "-m", "x"], "-m "),
        (["mcqa", "-o", "/proc/no/out"], "/proc/no/out"),
        (["mcqa", "-o", "out.jsonl"], "out.jsonl"),
    ],
)
def test_bad_input_is_one_line(args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", *args])
    out, err = capsys.readouterr()
    assert ended.value.code
    assert out == ""
    assert said in err.splitlines()[-1]
    assert "Traceback" not in err


def test_rows_without_a_recording_play_the_calls_that_they_list(tmp_path: Path) -> None:
    """Every trainer guide begins with this environment, whose recordings are of other rows."""
    results = tmp_path / "out"
    command = [*COMMAND, "workplace_assistant", "-o", str(results)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "workplace_assistant: no row " in done.stderr
    assert "(oracle)" in done.stderr
    rollouts = [json.loads(line) for line in (results / "rollouts.jsonl").read_text().splitlines()]
    assert [each["reward"] for each in rollouts] == [1.0] * 5


@contextmanager
def running(*args: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A run under way, and the processes that it started, to be watched."""
    argv = [*COMMAND, "example_session_state_mgmt", "-r", "100000", *args]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if " of 500000 rollouts, mean reward 1.000" in line:
                break
        watched = [os.pidfd_open(pid) for pid in started_by(process.pid)]
        try:
            yield process, watched
        finally:
            process.kill()
            for each in watched:
                os.close(each)


def started_by(pid: int) -> list[int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it ended meanwhile
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found[1:]


def all_end(watched: list[int], within_s: float) -> bool:
    return all(select.select([each], [], [], within_s)[0] for each in watched)


@pytest.mark.warm(False)  # it looks for the fork server among the processes
def test_an_interrupt_says_what_was_done_and_stops_everything(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with running("-o", str(output)) as (process, watched):
        assert len(watched) >= 4  # daemon, fork server, agent, resources server
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert err.splitlines()[-1] == "interrupted"
        done = int(out.splitlines()[1].split()[1])
        assert done == len((output / "rollouts.jsonl").read_text().splitlines()) > 0
        assert all_end(watched, 10)


@pytest.mark.warm(False)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_a_second_interrupt_or_a_kill(number: signal.Signals) -> None:
    with running() as (process, watched):
        if number == signal.SIGINT:
            process.send_signal(number)
        process.send_signal(number)
        process.communicate(timeout=60)
        assert process.returncode != 0
        assert all_end(watched, 10)


def test_show_prints_each_rollout_with_its_answers_and_reward() -> None:
    done = run("mcqa", "-n", "2", "--show")
    assert done.returncode == 0, done.stderr
    first, second = sorted(done.stdout.partition("--- ")[2].split("--- "))
    assert first.startswith("mcqa:1, repeat 0\n[user] ")
    assert "\n[assistant] " in first
    assert "\nexpected answer: B\nextracted answer: B\nreward: 1\n" in first
    assert second.startswith("mcqa:2, ")
    assert "--- " not in done.stderr
    quiet = run("mcqa", "-n", "1", "--show", "--json")
    assert json.loads(quiet.stdout)
    assert "\nreward: 1\n" in quiet.stderr
    assert done.stderr.splitlines()[-1].startswith("next: ")
