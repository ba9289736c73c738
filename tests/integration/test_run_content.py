"""A run has one grader, one config and one set of variables: a resume with others is refused, with the same it works."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gymgate
from gymgate.core.errors import ConfigError
from support.checks import PARIS, recorded
from support.faulty import with_recordings

pytestmark = [pytest.mark.gym, pytest.mark.warm, pytest.mark.timeout(600)]

ITALY = recorded("of Italy?", "It is Rome.", 1.0)


def run(config: Path, output: Path, *words: str, code: int = 0, **variables: str) -> str:
    """Run it from the directory that its repository is in; return what it says."""
    command = [
        sys.executable,
        "-m",
        "gymgate",
        "run",
        str(config),
        "-o",
        str(output),
        "--judge",
        "a_judge=none",
        *words,
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=config.parents[3],
        env={**os.environ, **variables},
    )
    assert done.returncode == code, done.stderr
    return done.stderr


def stored(output: Path) -> int:
    return len((output / "rollouts.jsonl").read_text().splitlines())


def test_a_resume_with_another_grader_config_or_variable_is_refused(tmp_path: Path) -> None:
    config, output = with_recordings(tmp_path / "mine", PARIS, ITALY), tmp_path / "run"
    variables = ("--env-var", "MODE", "--env-var", "A_TOKEN")
    run(config, output, *variables, MODE="easy", A_TOKEN="one")
    assert stored(output) == 2
    grader = config.parents[1] / "app.py"
    again = (config, output, *variables, "-r", "2")
    same = {"MODE": "easy", "A_TOKEN": "two"}  # a renewed key
    before = grader.read_text()

    grader.write_text(f"{before}\n# another grader\n")
    assert "resources_servers/faulty/app.py" in run(*again, code=1, **same)
    grader.write_text(before)
    text = config.read_text()
    config.write_text(text.replace("description:", "description: other #", 1) + "\n")
    assert config.read_text() != text
    refused = run(*again, code=1, **same)
    assert "content.config" in refused
    config.write_text(text)
    refused = run(*again, code=1, **{**same, "MODE": "difficult"})
    assert "variables.MODE" in refused
    assert "difficult" not in (output / "run.json").read_text() + refused
    assert stored(output) == 2

    run(*again, **same)
    assert stored(output) == 4


def test_a_resume_of_the_same_content_elsewhere_works(tmp_path: Path) -> None:
    """On another node, after a checkout: other paths and times, and rows that came on top."""
    config, output = with_recordings(tmp_path / "mine", PARIS, ITALY), tmp_path / "run"
    rows = config.parents[1] / "data" / "example.jsonl"
    run(config, output, "--data", str(rows), "--replay-file", str(rows.with_name("example_rollouts.jsonl")))
    moved = tmp_path / "other" / "node"
    shutil.copytree(tmp_path / "mine", moved, copy_function=shutil.copyfile)
    shutil.rmtree(tmp_path / "mine")
    shutil.move(output, tmp_path / "moved-run")
    there = moved / config.relative_to(tmp_path / "mine")
    rows = there.parents[1] / "data" / "example.jsonl"
    words = ("--data", str(rows), "--replay-file", str(rows.with_name("example_rollouts.jsonl")), "-r", "2")
    run(there, tmp_path / "moved-run", *words)
    assert stored(tmp_path / "moved-run") == 4


def test_a_resume_with_another_function_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    config = with_recordings(tmp_path / "mine", PARIS, ITALY)
    output = tmp_path / "run"

    def evaluate(says: str, repeats: int) -> list[float | None]:
        name = f"policies_{says.lower()}_{repeats}"
        (tmp_path / f"{name}.py").write_text(f"def policy(body):\n    return {says!r}\n")
        module = __import__(name)
        stack = gymgate.StackConfig(environments=(str(config),), models={"a_judge": "none"})
        evaluation = gymgate.evaluate(stack, policy=module.policy, repeats=repeats, output=output)
        return [rollout.reward for rollout in evaluation.rollouts]

    assert evaluate("Paris", 1) == [1.0, 0.0]
    with pytest.raises(ConfigError, match=r"policy\.source"):
        evaluate("Rome", 2)
    assert sorted(map(str, evaluate("Paris", 2))) == ["0.0", "0.0", "1.0", "1.0"]


def test_a_replayed_file_that_changed_is_refused(tmp_path: Path) -> None:
    config, output = with_recordings(tmp_path / "mine", PARIS, ITALY), tmp_path / "run"
    answers = tmp_path / "answers.jsonl"
    answers.write_text(f"{PARIS}\n{ITALY}\n")
    run(config, output, "--replay-file", str(answers))
    wrong = json.loads(ITALY)
    wrong["response"]["output"][0]["content"][0]["text"] = "It is Milan."
    answers.write_text(f"{PARIS}\n{json.dumps(wrong)}\n")
    assert "policy.rollouts" in run(config, output, "--replay-file", str(answers), "-r", "2", code=1)
