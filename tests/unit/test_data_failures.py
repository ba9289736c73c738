"""What fails in NeMo Gym's interpreter becomes one line that says what to do; the program itself, without NeMo Gym."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gymgate.cli import main
from gymgate.core.errors import DataError, GymgateError, NeedMissingError, SetupError
from gymgate.core.files import filling, replacing, sha256_of
from gymgate.gym.preparation.diagnosis import failure, missing_package, refusal
from gymgate.gym.preparation.prepare import _earlier
from gymgate.gym.preparation.program import run_program


def link(
    type_: str, message: str = "it says\n why", status: int | None = None, name: str | None = None
) -> dict[str, Any]:
    return {"type": type_, "message": message, "status": status, "name": name}


@pytest.mark.parametrize(
    ("chain", "cls", "said"),
    [
        ([link("GatedRepoError", status=401)], NeedMissingError, "MINE"),
        ([link("HfHubHTTPError", status=403)], NeedMissingError, "MINE"),
        ([link("DatasetNotFoundError", "doesn't exist")], NeedMissingError, "MINE"),
        ([link("RemoteEntryNotFoundError", status=404)], DataError, "it says why"),
        ([link("EmptyDatasetError"), link("HTTPStatusError", status=404)], DataError, "not there"),
        ([link("LocalEntryNotFoundError")], NeedMissingError, "it says why"),
        (
            [link("URLError"), link("gaierror", "no such host")],
            NeedMissingError,
            "no such host",
        ),
        ([link("HTTPError", "Bad Gateway", status=502)], NeedMissingError, "Bad Gateway"),
        ([link("ModuleNotFoundError", name="tiktoken.core")], NeedMissingError, "--with PACKAGE"),
        ([link("KeyError", "'problem'")], SetupError, "KeyError: 'problem'"),
        ([link("CalledProcessError", "['git', 'clone', 'x']")], NeedMissingError, "git "),
        ([], SetupError, "log.txt"),
    ],
)
def test_each_failure_is_one_line(chain: list[dict[str, Any]], cls: type[GymgateError], said: str) -> None:
    error = failure(
        {"doing": "train: downloading", "chain": chain}, "mcqa", "MINE", Path("log.txt"), has_token=False
    )
    assert type(error) is cls
    assert str(error).startswith("mcqa: train: downloading: ")
    assert said in str(error)
    assert "\n" not in str(error)


def test_a_network_that_is_off_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYMGATE_OFFLINE", "1")
    error = failure(
        {"doing": "x", "chain": [link("OfflineModeIsEnabled")]},
        "mcqa",
        "MINE",
        Path("log.txt"),
        has_token=True,
    )
    assert str(error).startswith("mcqa: x: ")
    assert "GYMGATE_OFFLINE" in str(error)


def test_a_token_without_access_is_told_apart() -> None:
    error = failure(
        {"doing": "x", "chain": [link("GatedRepoError")]}, "mcqa", "MINE", Path("log.txt"), has_token=True
    )
    assert "no access" in str(error)


def test_refusals_name_their_class() -> None:
    assert type(refusal({"error": "DataError", "message": "no rows"}, "mcqa")) is DataError
    assert missing_package({"chain": [link("KeyError"), link("ModuleNotFoundError", name="a.b")]}) == "a"


def order(workspace: Path) -> dict[str, Any]:
    stage = workspace / "stage"
    stage.mkdir()
    parse = {"initial": {}, "overrides": [], "config_paths": []}
    return {
        "workspace": str(workspace), "stage": str(stage), "site": str(workspace), "roots": [], "parse": parse,
        "editable": False,
    }  # fmt: skip


def test_the_program_tells_what_failed(tmp_path: Path) -> None:
    """Here, nothing is there to parse a config with."""
    events = list(run_program(Path(sys.executable), order(tmp_path), {}, tmp_path / "log", 60))
    assert [event["event"] for event in events] == ["step", "failed"]
    assert missing_package(events[-1]) == "nemo_gym"
    assert "ModuleNotFoundError" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(("timeout_s", "said"), [(60.0, "3: last words"), (0.5, "0.5 s")])
def test_a_program_that_ends_or_hangs_is_an_error(timeout_s: float, said: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    command = "echo last words >&2; exit 3" if timeout_s > 1 else "sleep 600"
    python.write_text(f"#!/bin/sh\n{command}\n")
    python.chmod(0o755)
    with pytest.raises(SetupError, match=said):
        list(run_program(python, {}, dict(os.environ), tmp_path / "log", timeout_s))


def test_closing_the_events_ends_the_program_and_what_it_started(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\nimport json, os, subprocess\nchild = subprocess.Popen(['sleep', '600'])\n"
        "event = {'event': 'step', 'pids': [os.getpid(), child.pid]}\n"
        "os.write(1, json.dumps(event).encode() + b'\\n')\nchild.wait()\n"
    )
    python.chmod(0o755)
    events = run_program(python, {}, dict(os.environ), tmp_path / "log", 60)
    pids = next(events)["pids"]
    events.close()
    for pid in pids:
        state = subprocess.run(
            ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False
        ).stdout
        assert state.strip()[:1] in ("", "Z"), f"process {pid} is still there"


def test_the_umask_is_read_and_never_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For as long as another one was set, files of other threads had its permissions."""
    before = os.umask(0o027)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(os, "umask", None)
            with replacing(tmp_path / "rows.jsonl") as file:
                file.write(b"{}")
            with filling(tmp_path / "directory"):
                pass
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("rows.jsonl", "directory")] == [
        0o640,
        0o750,
    ]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    with replacing(path) as file:
        file.write(b"one")
    assert (path.read_bytes(), sha256_of(path)[:8]) == (b"one", "7692c3ad")

    class Stopped(BaseException): ...

    def stop() -> None:
        with replacing(path) as file:
            file.write(b"two")
            raise Stopped

    with pytest.raises(Stopped):
        stop()
    assert [(each.name, each.read_bytes()) for each in path.parent.iterdir()] == [("rows.jsonl", b"one")]
    with pytest.raises(DataError, match="cannot write"), replacing(path / "below" / "rows.jsonl"):
        pass


@pytest.mark.parametrize(
    ("arguments", "said", "status"),
    [
        (["aime24", "gsm8k"], "'gsm8k'", 1),
        (["aime24", "--input", "x", "--", "--task", "y"], "--input", 1),
        (["aime24", "--arg", "split"], "write KEY=VALUE", 2),
        (["aime24", "--arg", "split=["], "not YAML", 2),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_made(
    arguments: list[str], said: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["data", "prepare", *arguments])
    assert ended.value.code == status
    message = capsys.readouterr().err
    assert said in message
    assert message.count("\n") == 1


def test_a_pipe_in_place_of_a_manifest_is_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "manifest.json")
    assert _earlier(tmp_path) is None
