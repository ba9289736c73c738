"""What `gymgate collect` takes, and what it refuses before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from gymgate.cli.collect import command
from gymgate.cli.collect_plan import endpoint_list
from gymgate.errors import ConfigError


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
        ("http://a/v1,b:8000", "'b:8000' is no URL"),
        ("http://a/v1,", "'' is no URL"),
        ("http://a/v1,http://a/v1/", "is there twice"),
        ("slurm:8000", "not in a Slurm job"),
        ("slurm", "'slurm' is no URL"),
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
        (("-m", "x"), "-m: there is no endpoint for it"),
        (
            ("--sampling", "top_p=1", "--wait-for-policy", "0"),
            "--sampling and --wait-for-policy: there is no endpoint",
        ),
        (("-b", "http://a/v1", "--replay-file", "f"), "--replay-file needs no endpoint"),
        (("-b", "http://a/v1", "--sampling", "seed=1"), "use --seeds"),
        (("--seeds", "1,1"), "given more than once"),
        (("--shard", "5/4"), "5/4"),
        (("--retries", "x=1"), "write N or CLASS=N"),
    ],
)
def test_what_does_not_belong_together(tmp_path: Path, arguments: tuple[str, ...], reason: str) -> None:
    done = CliRunner().invoke(command, ["mcqa", "-o", str(tmp_path / "run"), *arguments])
    assert isinstance(done.exception, ConfigError), done.output
    assert reason in str(done.exception)
    assert not (tmp_path / "run").exists()


def test_a_run_in_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    done = CliRunner().invoke(command, ["mcqa", "-o", str(tmp_path / "x")])
    assert "is a file; a run needs a directory" in str(done.exception)
