"""`gymgate rescore`: stored rollouts through real agents and scoring again; what changed is found with `gymgate compare`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import gymgate
from gymgate.runs.stored.record import read_values
from support.checks import PARIS, recorded
from support.faulty import faulty, row, with_recordings
from support.json_output import read_output
from support.stacks import SIMPLE
from support.upstream import Seen, chat_answer, responses_answer, scripted_chat, upstream_in_thread

# The first use of a release installs it.
pytestmark = [pytest.mark.gym, pytest.mark.warm, pytest.mark.timeout(900)]

FAULTY = "faulty.resources_servers.faulty"
GYM_COLLECTOR = Path(__file__).parent / "gym_collector"
CODE = "resources_servers/faulty/app.py"
ITALY = recorded("of Italy?", "It is Rome.", 1.0)


def command(*words: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "gymgate", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done


def compared(first: Path, second: Path) -> dict[str, Any]:
    value: dict[str, Any] = read_output("compare", command("compare", first, second, "--json").stdout)[
        "compared"
    ][0]
    return value


def failures(run: Path) -> list[dict[str, Any]]:
    return [value for _, value in read_values(run / "failures.jsonl")]


@contextmanager
def judge(says: str, fails_at: str | None = None) -> Iterator[str]:
    """A judge's URL; it answers 500 where the question holds `fails_at`."""

    async def answer(seen: Seen) -> web.Response:
        if fails_at is not None and fails_at in seen.raw.decode():
            return web.Response(status=500)
        return web.json_response(
            chat_answer(says) if seen.path.endswith("completions") else responses_answer(says)
        )

    with upstream_in_thread(answer) as serving:
        yield serving.url


def test_a_verifier_that_got_stricter_is_found(tmp_path: Path) -> None:
    config, base, strict = with_recordings(tmp_path / "e", PARIS, ITALY), tmp_path / "a", tmp_path / "b"
    command("run", config, "-o", base, "-r", 2, "--judge", "a_judge=none")
    code = tmp_path / "e" / CODE
    code.write_text(code.read_text().replace("float(body.wanted in text)", "float(body.wanted == text)"))
    command("rescore", base, "-o", strict, "--env", config)
    [environment], flips = (found := compared(base, strict))["environments"], found["flips"]
    assert (environment["pairs"], environment["first"], environment["second"]) == (4, 1.0, 0.5)
    assert [(flip["name"].rpartition(":")[2], flip["difference"]) for flip in flips] == [("2", -1.0)]
    settings = json.loads((strict / "run.json").read_text())["settings"]
    assert settings["rescored"]["run"] == str(base)
    assert settings["rescored"]["policy"]["type"] == "replay"


def test_a_judge_that_changed_its_mind_is_found(tmp_path: Path) -> None:
    config, base, other = with_recordings(tmp_path / "e", PARIS, ITALY), tmp_path / "a", tmp_path / "b"
    with judge("Paris and Rome") as kind, judge("Only Rome") as strict:
        command("run", config, "-o", base, "--set", f"{FAULTY}.fault=judge", "--judge", f"a_judge=m@{kind}")
        words = ("rescore", base, "--env", config, "--set", f"{FAULTY}.fault=judge")
        unjudged = command(*words, "-o", tmp_path / "c", code=1)
        assert "needs an endpoint for model server 'a_judge'" in unjudged.stderr
        command(*words, "-o", other, "--judge", f"a_judge=m@{strict}")
    found = compared(base, other)
    assert [(flip["name"].rpartition(":")[2], flip["difference"]) for flip in found["flips"]] == [("1", -1.0)]


def test_only_rollouts_whose_judge_failed(tmp_path: Path) -> None:
    config, base, again = with_recordings(tmp_path / "e", PARIS, ITALY), tmp_path / "a", tmp_path / "b"
    settings = ("--set", f"{FAULTY}.fault=judge", "--retries", "0")
    with judge("Paris and Rome", fails_at="Rome") as broken, judge("Paris and Rome") as repaired:
        words = ("run", config, "-o", base, *settings, "--bodies", "--judge", f"a_judge=m@{broken}")
        assert "1 x JudgeError" in command(*words, code=1).stderr
        words = ("rescore", base, "-o", again, "--judge-failed", "--json", "--judge", f"a_judge=m@{repaired}")
        summary = read_output("rescore", command(*words, "--env", config, *settings[:2]).stdout)
        assert (summary["total"], summary["finished"], summary["failed"]) == (1, 1, 0)
        assert summary["overall"]["mean_reward"] == 1.0
        nothing = command("rescore", again, "-o", tmp_path / "d", "--judge-failed", code=1)
        assert "no rollout with a failed judge is stored" in nothing.stderr
        whole = tmp_path / "whole"
        words = ("rescore", base, "-o", whole, "--env", config, *settings[:2])
        command(*words, "--judge", f"a_judge=m@{repaired}")
    assert sorted(value["line"] for _, value in read_values(whole / "rollouts.jsonl")) == [1, 2]


async def test_a_rollout_that_goes_otherwise_has_no_reward(tmp_path: Path) -> None:
    """The tool tells its process's id: another stack's tool says something else."""

    def policy(body: dict[str, Any]) -> dict[str, Any]:
        if any(message["role"] == "tool" for message in body["messages"]) or "talk" in str(body["messages"]):
            return chat_answer("cold")
        call = {
            "id": "c",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "sf"}'},
        }
        answer = chat_answer(None)
        answer["choices"][0]["message"]["tool_calls"] = [call]
        return answer

    config, base, again = faulty(tmp_path / "e"), tmp_path / "a", tmp_path / "b"
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row(text)) + "\n" for text in ("weather?", "talk")))
    rollouts = gymgate.collect([config], rows, policy=policy, output=base)
    assert {rollout.line: rollout.reward async for rollout in rollouts} == {1: 0.5, 2: 0.5}
    done = command("rescore", base, "-o", again, "--env", config.name, code=1)
    assert "1 of 2 rollouts diverged from what was recorded: they have no reward" in done.stderr
    [failure] = failures(again)
    assert (failure["line"], failure["final"], failure["error"]["type"]) == (1, True, "DivergedError")
    assert "the environment said something else than recorded" in failure["error"]["message"]
    [environment] = compared(base, again)["environments"]
    assert (environment["pairs"], environment["failed_second"]) == (1, 1)
    strings = command("rescore", base, "-o", again, "--env", config.name, code=1)
    assert "1 failed permanently" in strings.stderr


def test_a_rescoring_is_resumed_and_split(tmp_path: Path) -> None:
    base, whole = tmp_path / "a", tmp_path / "b"
    command("run", SIMPLE, "-o", base, "-r", 4)
    command("rescore", base, "-o", whole)
    lines = (whole / "rollouts.jsonl").read_bytes().splitlines(keepends=True)
    (whole / "rollouts.jsonl").write_bytes(b"".join(lines[:7]) + lines[7][:30])
    summary = read_output("rescore", command("rescore", base, "-o", whole, "--json").stdout)
    assert (summary["resumed"], summary["finished"], summary["left"]) == (7, 13, 0)
    assert "holds a run with other settings" in command("run", SIMPLE, "-o", whole, code=1).stderr
    other = command("rescore", whole, "-o", whole, code=1)
    assert "rescored.run" in other.stderr
    for part in (1, 2):
        command("rescore", base, "-o", tmp_path / "c", "--shard", f"{part}/2")
    for new in (whole, tmp_path / "c"):
        [environment] = compared(base, new)["environments"]
        assert (environment["pairs"], environment["difference"], environment["left_out"]) == (20, 0.0, 0)
    command("rescore", tmp_path / "c", "-o", tmp_path / "d")  # a rescored run is a run


def test_a_run_with_seeds_is_scored_again(tmp_path: Path) -> None:
    """It was refused: recorded answers cannot use seeds. But none is sent again."""
    base, again = tmp_path / "a", tmp_path / "b"
    answers = iter(["cold", "warm"])
    with scripted_chat(lambda _: next(answers)) as url:
        command("run", SIMPLE, "-n", 1, "--seeds", 2, "-c", 1, "-b", url, "-o", base)
    command("rescore", base, "-o", again)
    said = [
        {
            line["seed"]: line["result"]["response"]["output"][-1]["content"][0]["text"]
            for line in map(json.loads, (run / "rollouts.jsonl").read_text().splitlines())
        }
        for run in (base, again)
    ]
    assert said[0] == said[1]
    assert {*said[0].values()} == {"cold", "warm"}
    [environment] = compared(base, again)["environments"]
    assert (environment["pairs"], environment["difference"]) == (2, 0.0)


def test_a_release_that_scores_otherwise_is_found(tmp_path: Path) -> None:
    """nemo-gym 0.6.0 gives 1.0 whatever is said; 0.7.0 looks for the tool's call."""
    base, newer = tmp_path / "a", tmp_path / "b"
    command("run", SIMPLE, "-o", base, "--gym", "0.6.0")
    command("rescore", base, "-o", newer, "--gym", "0.7.0")
    settings = json.loads((newer / "run.json").read_text())["settings"]
    assert (settings["nemo_gym"], settings["rescored"]["nemo_gym"]) == ("0.7.0", "0.6.0")
    [environment] = compared(base, newer)["environments"]
    assert (environment["pairs"], environment["first"], environment["second"]) == (5, 1.0, 0.6)


@pytest.mark.parametrize("inputs", [True, False])
def test_rollouts_of_nemo_gyms_collector(tmp_path: Path, inputs: bool) -> None:
    """`gym eval run` of nemo-gym 0.7.0 wrote these. They name agents, not environments; the rows are in a file beside the
    rollouts, and repeated in the results."""
    stored = Path(shutil.copy(GYM_COLLECTOR / "rollouts.jsonl", tmp_path))
    if inputs:
        shutil.copy(GYM_COLLECTOR / "rollouts_materialized_inputs.jsonl", tmp_path)
    command("rescore", stored, "-o", tmp_path / "b")
    [environment] = compared(stored, tmp_path / "b")["environments"]
    assert environment["environment"] == f"{SIMPLE}_simple_agent"
    assert (environment["pairs"], environment["first"], environment["difference"]) == (5, 0.6, 0.0)


def test_nemo_gyms_failures_of_a_judge_are_beside_its_rollouts(tmp_path: Path) -> None:
    config = with_recordings(tmp_path / "e", PARIS, ITALY)
    command("run", config, "-o", tmp_path / "a", "--judge", "a_judge=none")
    command("export", tmp_path / "a", "--to", "gym", "-o", tmp_path / "rollouts.jsonl")
    first, second = (json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines())
    (tmp_path / "rollouts.jsonl").write_text(json.dumps(first) + "\n")
    failed = {"_ng_failure_class": "judge_failed", "failure_kind": "judge_failed", "failure_reason": "503"}
    second |= {"reward": 0.0, "mask_sample": True, **failed}
    (tmp_path / "rollouts_failures.jsonl").write_text(json.dumps(second) + "\n")
    words = (
        "rescore",
        tmp_path / "rollouts.jsonl",
        "-o",
        tmp_path / "b",
        "--judge-failed",
        "--judge",
        "*=none",
    )
    assert "no environment has agent 'faulty_agent'" in command(*words, code=1).stderr
    done = command(*words, "--env", config)
    [(_, value)] = read_values(tmp_path / "b" / "rollouts.jsonl")
    assert (value["line"], value["reward"], value["environment"]) == (2, 1.0, "faulty_agent"), done.stderr


def test_a_run_does_not_decide_which_code_runs(tmp_path: Path) -> None:
    """It may come from somebody else: its files and settings are used only if they are given once more."""
    config, base, new = with_recordings(tmp_path / "e", PARIS), tmp_path / "a", tmp_path / "b"
    started = tmp_path / "started"
    code = tmp_path / "e" / CODE
    setting = f"{FAULTY}.fault=none"
    command("run", config, "-o", base, "--set", setting, "--judge", "a_judge=none")
    code.write_text(f"open({str(started)!r}, 'w')\n{code.read_text()}")
    lines = Path(shutil.copy(base / "rollouts.jsonl", tmp_path / "lines.jsonl"))
    for stored, given, missing in (
        (base, (), "--env PATH"),
        (base, ("--env", config), f"--set {setting}"),
        (base, ("--set", setting), "--env PATH"),
        (lines, (), "--env"),
    ):
        refused = command("rescore", stored, "-o", new, "--judge", "a_judge=none", *given, code=1)
        assert missing in refused.stderr
        assert not started.exists()
        assert not new.exists()
    command("rescore", base, "-o", new, "--env", config, "--set", setting, "--judge", "a_judge=none")
    assert started.exists()


def test_a_run_does_not_decide_that_code_of_its_answers_runs(tmp_path: Path) -> None:
    """A packaged environment that runs code would run that of somebody else's recorded answers."""
    base, new = tmp_path / "a", tmp_path / "b"
    command("run", "math_with_code", "-n", 1, "-o", base)
    refused = command("rescore", base, "-o", new, code=1)
    assert "--env math_with_code" in refused.stderr
    assert not new.exists()
    command("rescore", base, "-o", new, "--env", "math_with_code")


def test_a_run_does_not_decide_which_interpreter_starts(tmp_path: Path) -> None:
    config, base, new = with_recordings(tmp_path / "e", PARIS), tmp_path / "a", tmp_path / "b"
    command("run", config, "-o", base, "--judge", "a_judge=none")
    started, python = tmp_path / "started", tmp_path / "python"
    python.write_text(f"#!/bin/sh\ntouch {started}\n")
    python.chmod(0o755)
    described = json.loads((base / "run.json").read_text())
    described["settings"]["interpreter"] = str(python)
    (base / "run.json").write_text(json.dumps(described))
    refused = command("rescore", base, "-o", new, "--env", config, "--judge", "a_judge=none", code=1)
    assert f"@{python}" in refused.stderr
    assert not started.exists()
    described["settings"] |= {"interpreter": None, "nemo_gym": "0.5.1"}
    (base / "run.json").write_text(json.dumps(described))
    refused = command("rescore", base, "-o", new, "--env", config, "--judge", "a_judge=none", code=1)
    assert "--gym 0.5.1" in refused.stderr


@pytest.mark.parametrize(
    ("stored", "words", "told"),
    [
        ("nosuch", "", "nosuch holds no run: neither it nor a shard in it has a run.json"),
        ("empty", "", "empty: there are no rollouts"),
        ("silent.jsonl", "", "none of its 1 rollouts is stored with what its policy said"),
        ("spoken.jsonl", "--judge-failed", "no rollout with a failed judge is stored"),
        ("spoken.jsonl", "", "no environment 'nosuch'"),
        ("spoken.jsonl", "--env mcqaa", "no environment 'mcqaa'"),
        ("spoken.jsonl", "--env mcqa", "rows.jsonl"),
        ("rows.jsonl", "", "rows.jsonl:1: not a rollout of gymgate or of NeMo Gym's collector"),
    ],
)
def test_what_cannot_be_rescored_is_one_line(stored: str, words: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "run.json").write_text('{"format": 1, "settings": {"policy": null}, "extent": {}}')
    line = {"row_key": "0" * 16, "occurrence": 0, "repeat": 0, "seed": None, "environment": "nosuch"}
    line |= {
        "status": "completed",
        "reward": 1.0,
        "calls": [],
        "line": 1,
        "source": str(tmp_path / "rows.jsonl"),
    }
    (tmp_path / "silent.jsonl").write_text(json.dumps({**line, "result": {"reward": 1.0}}) + "\n")
    result = {"response": {"output": [{"role": "assistant", "content": "x"}]}}
    (tmp_path / "spoken.jsonl").write_text(json.dumps({**line, "result": result}) + "\n")
    (tmp_path / "rows.jsonl").write_text('{"responses_create_params": {"input": "q"}}\n')
    done = command("rescore", tmp_path / stored, "-o", tmp_path / "new", *words.split(), code=1)
    assert told in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
