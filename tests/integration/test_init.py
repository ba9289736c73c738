"""An environment of `gymgate init` on real servers, at once: its check, its quality, a run, and its own tests."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gymgate import ensure_runtime
from gymgate.cli.init import TEMPLATE, write_environment
from gymgate.core.config import SUPPORTED_NEMO_GYM
from gymgate.core.errors import ConfigError
from gymgate.gym.runtime import open_catalog
from support.json_output import read_output
from support.stacks import runtime
from support.upstream import scripted_chat

pytestmark = [pytest.mark.gym, pytest.mark.warm, pytest.mark.timeout(300)]


def run(directory: Path, *command: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", *command]
    return subprocess.run(words, cwd=directory, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.parametrize("release", SUPPORTED_NEMO_GYM)
def test_it_passes_the_check_at_once(release: str, tmp_path: Path) -> None:
    assert run(tmp_path, "gymgate", "init", "letters").returncode == 0
    done = run(tmp_path, "gymgate", "check", "letters", "--no-flags", "--gym", release)
    assert (done.returncode, "letters: match 5/5" in done.stdout) == (0, True), done.stdout + done.stderr


def test_it_runs_with_recorded_answers_and_with_a_model(tmp_path: Path) -> None:
    write_environment("letters", tmp_path / "letters")
    done = run(tmp_path, "gymgate", "run", "letters", "--json")
    assert done.returncode == 0, done.stderr
    [row] = read_output("run", done.stdout)["environments"].values()
    assert (row["rollouts"], row["mean_reward"]) == (5, 0.8)
    with scripted_chat(lambda _: "42") as url:
        done = run(tmp_path, "gymgate", "run", "letters", "-b", url, "-m", "m", "--json")
    assert done.returncode == 0, done.stderr
    [row] = read_output("run", done.stdout)["environments"].values()
    assert (row["rollouts"], row["mean_reward"]) == (5, 0.2)


def test_the_catalog_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_environment("tool_use_2", tmp_path / "tool_use_2")
    environment = open_catalog().find("tool_use_2")
    assert (environment.name, [file.rows() for file in environment.data]) == ("tool_use_2", [5, 5])


def test_the_catalog_reads_one_of_several_by_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("letters", "words"):
        write_environment(name, tmp_path / "my repository")
    assert open_catalog().find("my repository/resources_servers/words").name == "words"
    with pytest.raises(ConfigError, match="my repository/resources_servers/letters"):
        open_catalog().find("my repository")


def test_its_tests_pass(tmp_path: Path) -> None:
    write_environment("letters", tmp_path)
    done = run(tmp_path, "pytest", "-q", "-p", "no:cacheprovider", "resources_servers/letters")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("release", SUPPORTED_NEMO_GYM)
def test_its_tests_pass_in_nemo_gyms_interpreter(release: str, tmp_path: Path) -> None:
    """As `gym env test` runs them: pytest in the server's directory, the repository on the path, and no gymgate."""
    write_environment("letters", tmp_path)
    packages = tmp_path / "pytest"
    packages.mkdir()
    for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py"):
        module = importlib.import_module(name)
        path = Path(str(module.__file__))
        path = path.parent if path.name == "__init__.py" else path
        (packages / path.name).symlink_to(path)
    python = ensure_runtime(runtime(release)).python
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path / "resources_servers" / "letters",
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{packages}"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed, 1 skipped" in done.stdout


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_nemo_gyms_own_command_runs_its_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`gym env test` makes a virtual environment of what requirements.txt lists, and runs pytest there."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2])  # `benchmarks`
    from benchmarks.gym_collector import Stock, installing_environment

    write_environment("letters", tmp_path)
    made = ensure_runtime(runtime())
    done = subprocess.run(
        [made.python.parent / "gym", "env", "test", "--resources-server", "letters", "--search-dir", "."],
        cwd=tmp_path,
        env=installing_environment(Stock(made, tmp_path, 0)),
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "5 passed" in done.stdout + done.stderr


def test_what_its_own_tests_need_makes_no_runtime_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_environment("letters", tmp_path / "letters")
    assert open_catalog().find("letters").config(None).requirements == ()


@pytest.mark.heavy
def test_it_meets_every_threshold_of_quality(tmp_path: Path) -> None:
    thresholds = (
        "--reproducible",
        "--deterministic",
        "--honest",
        "--clean-rows",
        "--max-constant-reward",
        "0.05",
    )
    done = run(tmp_path, "gymgate", "check", str(TEMPLATE), "--min-oracle-reward", "1", *thresholds, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    [record] = json.loads(done.stdout)
    assert (record["matched"], record["failures"]["missing"]) == (5, {"judge_down": "no judge is asked"})
