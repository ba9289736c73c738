"""What ran is what a run says of itself, and a resume with anything else is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gymgate.core.config import EnvironmentConfig, RuntimeConfig, StackConfig
from gymgate.gym.runtime import ensure_runtime
from gymgate.stack import acquire_sync
from gymgate.stack.client.daemons import find_daemons
from support.checks import PARIS, recorded
from support.faulty import row, with_recordings
from support.json_output import read_output
from support.stacks import SIMPLE
from support.upstream import Seen, chat_answer, upstream_in_thread

# The first use of a release installs it.
pytestmark = [pytest.mark.gym, pytest.mark.warm, pytest.mark.timeout(900)]

OLD = RuntimeConfig(version="0.6.0")
COMMAND = [sys.executable, "-m", "gymgate"]
SETTING = f"{SIMPLE}.resources_servers.{SIMPLE}.description"
ITALY = recorded("of Italy?", "It is Rome.", 1.0)


def command(*words: object, code: int = 0, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*COMMAND, *map(str, words)], capture_output=True, text=True, timeout=600, check=False, cwd=cwd
    )
    assert done.returncode == code, done.stderr
    return done


def settings(run: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((run / "run.json").read_text())["settings"]
    return value


def rollouts(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]


@contextmanager
def model(name: str, says: str) -> Iterator[str]:
    """The URL of an endpoint that lists one model, and answers whatever model is asked for."""

    async def answer(seen: Seen) -> web.Response:
        if seen.path.endswith("models"):
            return web.json_response({"object": "list", "data": [{"id": name, "object": "model"}]})
        return web.json_response(chat_answer(says))

    with upstream_in_thread(answer) as serving:
        yield serving.url


def test_the_release_of_an_interpreter_is_stored(tmp_path: Path) -> None:
    old = str(ensure_runtime(RuntimeConfig(version="0.6.0")).python)
    run = tmp_path / "a"
    command("run", SIMPLE, "-o", run, "--gym", old)
    assert (settings(run)["nemo_gym"], settings(run)["interpreter"]) == ("0.6.0", old)
    refused = command("run", SIMPLE, "-o", run, "-r", 2, code=1).stderr
    assert "nemo_gym: '0.6.0' there, '0.7.0' here" in refused
    assert len(rollouts(run)) == 5
    command("rescore", run, "-o", tmp_path / "b", "--gym", f"0.6.0@{old}")
    assert settings(tmp_path / "b")["nemo_gym"] == "0.6.0"


def test_the_settings_of_a_joined_stack_are_stored(tmp_path: Path) -> None:
    """Also those that the run does not give. A run on a stack with others is refused."""
    run, spec = tmp_path / "a", tmp_path / "spec.toml"

    @contextmanager
    def held(value: str) -> Iterator[None]:
        environment = EnvironmentConfig(name=SIMPLE, overrides={SETTING: value})
        with acquire_sync(StackConfig(environments=environment, runtime=OLD)) as stack:  # type: ignore[arg-type]
            path = find_daemons().choose(stack.call(stack.stack.status())["pid"]).command.socket_path
            spec.write_text(f'[stack]\nenvironments = ["{SIMPLE}"]\nserver = "{path}"\n')
            yield

    with model("m", "Hello.") as url:
        words = ("run", "--spec", spec, "-o", run, "-n", 2, "-b", url, "--gym", OLD.version)
        with held("one"):
            assert "runtime.version" in command(*words[:-2], code=1).stderr
            command(*words)
            stored = settings(run)
            assert stored["nemo_gym"] == "0.6.0"
            assert stored["environments"][0]["overrides"] == [[SETTING, "one"]]
            command(*words, "-r", 2)
        assert len(rollouts(run)) == 4
        with held("two"):
            assert "overrides" in command(*words, "-r", 3, code=1).stderr
    assert len(rollouts(run)) == 4


def test_another_model_behind_a_judge_is_refused(tmp_path: Path) -> None:
    config, run = with_recordings(tmp_path / "e", PARIS, ITALY), tmp_path / "a"
    with model("strict-8b", "yes") as first, model("mild-1b", "no") as second:
        command("run", config, "-o", run, "--judge", f"a_judge={first}")
        assert settings(run)["judges"]["a_judge"]["model"] == "strict-8b"
        refused = command("run", config, "-o", run, "-r", 2, "--judge", f"a_judge={second}", code=1).stderr
        assert "'strict-8b' there, 'mild-1b' here" in refused
    assert len(rollouts(run)) == 2


def test_replicas_of_different_models_are_refused(tmp_path: Path) -> None:
    with model("good-8b", "yes") as first, model("bad-1b", "no") as second:
        refused = command("run", SIMPLE, "-b", f"{first},{second}", code=1).stderr
        assert all(word in refused for word in ("good-8b", "bad-1b", second))


def test_an_environment_has_one_name(tmp_path: Path) -> None:
    """Wherever its config is, and whether a row ran or was refused before it could."""
    config = with_recordings(tmp_path / "one", PARIS)
    copy = with_recordings(tmp_path / "other", PARIS)
    rows = tmp_path / "rows.jsonl"
    known = {**row("of France?"), "wanted": "Paris"}
    unknown = {**known, "agent_ref": {"name": "nobody"}}
    rows.write_text("".join(json.dumps(each) + "\n" for each in (known, unknown)))
    judge = ("--judge", "a_judge=none")
    command("run", config, "-o", tmp_path / "a", *judge)
    command("run", copy.parents[1], "-o", tmp_path / "b", *judge)
    assert {each["environment"] for each in rollouts(tmp_path / "a")} == {"faulty"}
    compared = read_output("compare", command("compare", tmp_path / "a", tmp_path / "b", "--json").stdout)
    [environment] = compared["compared"][0]["environments"]
    assert (environment["environment"], environment["pairs"]) == ("faulty", 1)
    command("run", copy, "-o", tmp_path / "a", "-r", 2, *judge)  # the same content in another place
    with (copy.parents[1] / "app.py").open("a") as grader:
        grader.write("# another grader\n")
    refused = command("run", copy, "-o", tmp_path / "a", "-r", 3, *judge, code=1).stderr
    assert "resources_servers/faulty/app.py" in refused
    with model("m", "Paris") as url:
        words = ("run", config, "--data", rows, "-o", tmp_path / "c", "-b", url, "--json", *judge)
        summary = read_output("run", command(*words, code=1).stdout)
    counts = {name: (each["rollouts"], each["failed"]) for name, each in summary["environments"].items()}
    assert counts == {"faulty": (2, 1)}


def test_the_kind_of_an_environment_names_no_other(tmp_path: Path) -> None:
    for name, run in ((SIMPLE, "a"), (f"resources_servers/{SIMPLE}", "b")):
        command("run", name, "-o", tmp_path / run)
    compared = read_output("compare", command("compare", tmp_path / "a", tmp_path / "b", "--json").stdout)
    [environment] = compared["compared"][0]["environments"]
    assert (environment["environment"], environment["pairs"]) == (SIMPLE, 5)
