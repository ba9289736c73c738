"""What commands refuse before anything is started: one line, and exit code 2 where the command line is wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gymgate.cli import main
from gymgate.core.config import RuntimeConfig
from gymgate.core.errors import ConfigError
from gymgate.core.extras import install_command
from gymgate.gym.runtime import ensure_runtime
from gymgate.stack.ray import nodes as ray_nodes


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("data prepare mcqa --input {tmp}/none.jsonl", "--input '{tmp}/none.jsonl'"),
        ("data prepare mcqa -o /dev/null/x", "/dev/null/x"),
        ("run mcqa -m m", "-m "),
        ("run mcqa --data nope.jsonl", "'nope.jsonl'"),
        ("run mcqa --data ~no_such_user/x.jsonl", "begins with ~"),
        ("slurm -o {tmp}/s --shards 2 --dry-run -- mqca -b http://h/v1", "near names: mcqa"),
        ("run {tmp}/raw.jsonl", "{tmp}/raw.jsonl:1: "),
        ("run mcqa --wait-for-policy 3", "--wait-for-policy"),
        ("run mcqa -o {tmp}/x -m m", "-m "),
        ("check mcqa -m m", "-m "),
        (
            "check mcqa --record /dev/null/x",
            "/dev/null/x",
        ),
        ("check mcqa --record {tmp}/file", "{tmp}/file"),
        ("check mcqa --record {tmp}", "mcqa-0.7.0.json"),
        ("check mcqa calendar --config mcqa", "--config"),
        ("check mcqa -n 3", " -b"),
        ("check", "--all"),
        ("check mcqa calendar --set a=1", "--set"),
        ("check no_such_environment", "'no_such_environment'"),
        (
            "check {tmp}/a/x.yaml {tmp}/b/x.yaml --record {tmp}",
            "/b/x.yaml",
        ),
        ("check mcqa --sandbox enroot", "'enroot'"),
        (
            "check mcqa --sandbox nosuch",
            "'nosuch'",
        ),
        ("check {tmp}/no.yaml", "'{tmp}/no.yaml'"),
    ],
)
def test_one_line_and_code_1(
    words: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "raw.jsonl").write_text('{"question": "q"}\n')
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    for name in ("a", "b"):
        (tmp_path / name / "x.yaml").write_text("x: {responses_api_agents: {x: {entrypoint: app.py}}}")
    (kept := tmp_path / "resources_servers" / "mcqa-0.7.0.json").parent.mkdir()
    kept.write_text("{}")
    with pytest.raises(SystemExit) as ended:
        main([word.format(tmp=tmp_path) for word in words.split()])
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("gymgate: ")
    assert told.format(tmp=tmp_path) in line
    assert ended.value.code == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("run mcqa --set foo", "--set 'foo'"),
        ("run mcqa --set @", "--set '@'"),
        ("run mcqa --set a=[", "--set 'a=['"),
        ("run mcqa --judge j=x", "'x'"),
        ("run mcqa --judge j", "--judge 'j'"),
        ("run mcqa -b nourl -m m", "'nourl'"),
        ("run mcqa -b http://127.0.0.1:9/v1 -m m --sampling x", "--sampling 'x'"),
        ("run mcqa -o x -b http://127.0.0.1:9/v1 -m m --sampling t=.nan", "nan"),
        (
            "run mcqa -o x -b http://127.0.0.1:9/v1 -m m --sampling t={a:[.inf]}",
            "inf",
        ),
        ("run mcqa -o x --shard 5", "--shard '5'"),
        ("run mcqa -o x --shard 5/4", "5/4"),
        ("run mcqa -o x --seeds a", "--seeds 'a'"),
        ("aggregate x --keep 1 -o y.csv", "--keep '1'"),
        ("data prepare mcqa --arg x", "--arg 'x'"),
        ("setup --gym abc", "'abc'"),
        ("serve-policy --command foo_'{port}", '--command "foo_\'{port}"'),
        ("serve-policy m --run echo_'x", '--run "echo_\'x"'),
        ("serve-policy --sandbox-command x' --sandbox-url http://h:1 --run y", '--sandbox-command "x\'"'),
        ("serve-policy m --port 65535 --replicas 3 --dry-run", "65537"),
        ("slurm -o x --serve m'x -- mcqa", '--serve "m\'x"'),
        ("check mcqa --timeout -1", "'--timeout': -1.0"),
        ("check mcqa --memory 0", "'--memory': 0.0"),
        ("check mcqa --max-constant-reward nan", "nan"),
        ("run mcqa -n 0", "'-n'"),
        ("cache clean --unused-for 30", "'30'"),
        ("nosuch", "'nosuch'"),
        ("export x -o x.csv", "'--to'"),
        ("slurm -o x --shards 2 --dry-run -- mcqa -b http://h/v1 --judge j", "--judge 'j'"),
    ],
)
def test_what_does_not_fit_the_command_line_is_code_2(
    words: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    [line] = capsys.readouterr().err.splitlines()
    assert told in line
    assert ended.value.code == 2


def test_a_mistyped_directory_has_near_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "warehouse" / "configs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["run", "warehuose"])
    [line] = capsys.readouterr().err.splitlines()
    assert "warehouse" in line.partition("near names")[2]


def test_ray_is_missing_before_rows_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray_nodes, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        main(["run", "mcqa", "-o", str(tmp_path / "x"), "--ray", "auto"])
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("gymgate: ")
    assert line.endswith(install_command("ray"))
    assert ended.value.code == 1


@pytest.mark.parametrize("version", ["", "abc", "0.7.0 ; x", "../0.7.0", "-r x"])
def test_a_release_is_a_version(version: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(repr(version))):
        ensure_runtime(RuntimeConfig(version=version))


@pytest.mark.parametrize(
    "words",
    [
        "run mcqa --timeout inf",
        "run mcqa --timeout nan",
        "run mcqa --hang-timeout inf",
        "run mcqa --wait-for-policy nan",
        "run mcqa -o x --timeout inf",
        "check mcqa --timeout nan",
        "data prepare mcqa --prepare-timeout inf",
    ],
)
def test_seconds_are_finite(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert words.split()[-1] in capsys.readouterr().err
    assert ended.value.code == 2
