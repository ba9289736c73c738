"""Command lines and files that are made to be hard to read: one line, no traceback, in bounded time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gymgate.core.errors import ConfigError, DataError, MissingExtraError
from gymgate.gym.catalog.parse import parse_yaml, read_yaml
from gymgate.rollouts.row import TaskKey
from gymgate.runs.counted.aggregate import read_runs
from gymgate.runs.described.spec import read_spec
from gymgate.runs.stored.rows import RowReader

LAUGHS = "\n".join(
    ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))]
)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (LAUGHS, "aliases"),
        ("a: &a\n  b: *a", "itself"),
        (f"a: {'9' * 6000}", "4300"),
        ("[" * 5000, "."),
        ("a: [", "."),
    ],
)
def test_yaml_that_cannot_be_used_is_refused_at_once(text: str, word: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=word):
        parse_yaml(text)
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match="config") as refused:
        read_yaml(tmp_path / "config.yaml", "config")
    assert "\n" not in str(refused.value)


def test_yaml_with_aliases_is_read() -> None:
    assert parse_yaml("a: &a [1, {b: 2}]\nc: [*a, *a]")["c"] == [[1, {"b": 2}]] * 2


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["list"], "/dev/full"),
        (["list", "mcqa"], "/dev/full"),  # less than a buffer holds
        (["info", "x" * 5000], None),
        (["run", f"{LAUGHS}.yaml"], None),
    ],
)
def test_a_full_output_and_a_long_name_are_one_line(words: list[str], output: str | None) -> None:
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with Path(output or "/dev/null").open("w") as target:
        done = subprocess.run(
            [sys.executable, "-m", "gymgate", *words],
            stdout=target,
            env=buffered,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("gymgate: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["run.json", "rows.txt", "rollouts.jsonl", "failures.jsonl"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_run_is_made_of_files(kind: str, name: str, tmp_path: Path) -> None:
    """A pipe never says anything, and a device never stops."""
    extent = {"rollouts": 1, "rows": 1, "repeats": 1, "seeds": None, "shard": [1, 1]}
    settings = {"policy": {}, "environments": []}
    (tmp_path / "run.json").write_text(json.dumps({"format": 1, "settings": settings, "extent": extent}))
    (tmp_path / "rows.txt").write_text("0" * 16)
    (tmp_path / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to("/dev/zero")
    words = [sys.executable, "-m", "gymgate", "aggregate", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert str(tmp_path / name) in done.stderr
    assert "Traceback" not in done.stderr


def test_what_a_run_links_to_is_not_shown(tmp_path: Path) -> None:
    """Errors are copied into tickets."""
    secret = tmp_path / "secret"
    secret.write_text("canary-in-a-file\n")
    run = tmp_path / "run"
    run.mkdir()
    extent = {"rollouts": 1, "rows": 1, "repeats": 1, "seeds": None, "shard": [1, 1]}
    described = json.dumps({"format": 1, "settings": {"policy": {}, "environments": []}, "extent": extent})
    for name in ("run.json", "rows.txt", "rollouts.jsonl"):
        (run / "run.json").write_text(described)
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(secret)
        words = [sys.executable, "-m", "gymgate", "aggregate", str(run)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
        assert (done.returncode, "canary" in done.stdout + done.stderr) == (1, False), done.stderr
        (run / name).unlink()


@pytest.mark.parametrize("name", ["run.json", "rows.txt"])
def test_a_file_of_a_run_that_is_too_long_is_refused(name: str, tmp_path: Path) -> None:
    """Gigabytes that take no room on a disk would fill the memory."""
    extent = {"rollouts": 1, "rows": 1, "repeats": 1, "seeds": None, "shard": [1, 1]}
    settings = {"policy": {}, "environments": []}
    (tmp_path / "run.json").write_text(json.dumps({"format": 1, "settings": settings, "extent": extent}))
    with (tmp_path / name).open("wb") as file:
        file.truncate(8 << 30)
    with pytest.raises(DataError, match="MiB"):
        read_runs([tmp_path])


def test_a_device_without_an_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="MiB"):
        read_yaml(Path("/dev/zero"), "--set")
    with pytest.raises(ConfigError, match="MiB"):
        read_spec(Path("/dev/zero"))


def test_too_few_open_files_are_one_line() -> None:
    line = f"ulimit -n 14; exec {sys.executable} -m gymgate check mcqa"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    assert "open files" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("source", ["hf:owner/name", "hf:/sys", "/sys"])
def test_no_dataset_is_loaded_because_a_run_names_it(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    task = TaskKey("e", "0" * 16, 0)
    with pytest.raises(ConfigError, match="--dataset"):
        RowReader().read(source, task, 1)
    with pytest.raises(MissingExtraError):
        RowReader([source]).read(source, task, 1)
