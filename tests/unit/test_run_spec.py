"""The description of a run: from a command line, from a file, and printed by `--dry-run`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from gymgate.cli import cli
from gymgate.cli.options import Option
from gymgate.cli.run import command
from gymgate.core.config import Config, StackConfig
from gymgate.core.errors import ConfigError, DataError, OptionError
from gymgate.integrations.trl.spec import NeMoGymSpec
from gymgate.integrations.verl.worker import LoopConfig
from gymgate.runs.described.spec import RunSpec, read_spec

WORDS = (
    "mcqa calendar -n 5 -r 4 --seeds 2 -b http://a/v1,http://b/v1 -m M --dialect responses --max-retries 0 --sampling top_p=1 "
    '--judge j=m@http://j/v1 --judge *=policy --set mcqa:a.b=[1,{"c":null}] --sandbox docker --routing process --gym 0.6.0 '
    "--timeout 7 --max-calls none --hang-timeout none --stock-servers -c 3 --retries policy=9 -o DIR --stop-after-failures 0 "
    "--bodies --env-var HOME --ray auto --cpus-per-stack 2"
)


def dry_run(*words: str | Path) -> dict[str, Any]:
    done = CliRunner().invoke(command, [*map(str, words), "--dry-run"], catch_exceptions=False)
    value: dict[str, Any] = json.loads(done.stdout)
    return value


def test_what_a_dry_run_prints_describes_the_same_run(tmp_path: Path) -> None:
    printed = dry_run(*WORDS.split())
    (tmp_path / "spec.json").write_text(json.dumps(printed))
    assert dry_run("--spec", tmp_path / "spec.json") == printed
    spec = RunSpec.model_validate(printed)
    assert (spec.rows, spec.repeats, spec.seeds) == (5, 4, (0, 1))
    assert (spec.limits.timeout_s, spec.limits.max_calls, spec.stack.hang_timeout_s) == (7, None, None)
    assert spec.stack.stock_servers
    assert (spec.pace.concurrency, spec.pace.budgets["policy"], spec.pace.budgets["timeout"]) == (3, 9, 1)
    assert [each.sandbox for each in spec.stack.environments] == ["docker"] * 2
    assert dict(spec.stack.environments[0].overrides) == {"a.b": (1, {"c": None})}


def test_a_spec_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    spec = tmp_path / "spec.json"
    spec.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=re.escape(str(spec))):
        read_spec(spec)


def test_a_file_is_overridden_by_options(tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text("""
repeats = 8
[stack]
environments = ["mcqa", {name = "calendar", agent = "a"}]
[policy]
base_url = "http://a/v1"
model = "M"
sampling = {temperature = 0.5, top_p = 1}
[limits]
max_calls = 9
""")
    printed = dry_run("--spec", tmp_path / "spec.toml", "--timeout", "5", "--sampling", "top_p=0.9")
    assert (printed["repeats"], printed["limits"]) == (
        8,
        {"timeout_s": 5, "max_calls": 9, "context_overflow": "answer"},
    )
    assert printed["policy"]["sampling"] == {"temperature": 0.5, "top_p": 0.9}
    assert [each["agent"] for each in printed["stack"]["environments"]] == [None, "a"]
    printed = dry_run("example_multi_step", "-b", "http://b/v1", "--spec", tmp_path / "spec.toml", "-r", "2")
    assert [each["name"] for each in printed["stack"]["environments"]] == ["example_multi_step"]
    assert (printed["repeats"], printed["policy"]["base_url"], printed["policy"]["model"]) == (
        2,
        "http://b/v1",
        "M",
    )


def test_keys_and_headers_are_not_printed(tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text(
        json.dumps(
            {"stack": {"environments": ["mcqa"]}, "policy": {"base_url": "http://a/v1", "api_key": "s3cret"}}
        )
    )
    words = ("--spec", tmp_path / "spec.json", "--header", "x-team=s3cret")
    assert "s3cret" not in json.dumps(dry_run(*words))
    assert not {"api_key", "headers"} & dry_run(*words)["policy"].keys()


@pytest.mark.parametrize(
    ("name", "text"), [("x.toml", "a ="), ("x.json", "{"), ("x.json", "[]"), ("missing.toml", None)]
)
def test_a_file_that_describes_no_run_is_named(name: str, text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=name):
        dry_run("--spec", tmp_path / name)


def test_a_value_in_the_place_of_a_table_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text('policy = "http://a/v1"\nstack = {environments = "mcqa"}')
    with pytest.raises(ConfigError, match="'policy'"):
        dry_run("--spec", tmp_path / "x.toml")


def test_fields_of_the_stack_may_stand_beside_it(tmp_path: Path) -> None:
    (tmp_path / "flat.toml").write_text('environments = "mcqa"\nray = "auto"\n[stack]\nlinger_s = 5')
    stack = dry_run("--spec", tmp_path / "flat.toml")["stack"]
    assert (stack["environments"][0]["name"], stack["linger_s"], stack["ray"]["address"]) == (
        "mcqa",
        5,
        "auto",
    )
    (tmp_path / "twice.toml").write_text('linger_s = 1\n[stack]\nenvironments = ["mcqa"]\nlinger_s = 5')
    with pytest.raises(ConfigError, match=r"twice\.toml: linger_s is given twice"):
        dry_run("--spec", tmp_path / "twice.toml")
    with pytest.raises(ValueError, match="must be set in it"):
        RunSpec.model_validate({"stack": StackConfig(environments=("mcqa",)), "linger_s": 1})  # type: ignore[arg-type]


def test_a_trainers_settings_are_those_of_a_run() -> None:
    flat: dict[str, Any] = {"ray": "auto", "models": {"*": "policy"}, "limits": {"max_calls": 3}}
    run = RunSpec.model_validate({"environments": "mcqa", **flat})
    trl = NeMoGymSpec("mcqa", sandbox="docker", seed=7, **flat).settings
    verl = LoopConfig.model_validate({"environments": "mcqa", **flat})
    assert (run.stack.ray, run.stack.models) == (trl.stack.ray, trl.stack.models)
    assert run.stack.model_copy(update={"share": "machine"}) == verl.stack
    assert (trl.seed, trl.stack.environments[0].sandbox) == (7, "docker")
    # a limit that is set leaves the others at the trainer's default
    limits = [each.limits for each in (run, trl, verl)]
    assert [(each.timeout_s, each.max_calls) for each in limits] == [(3600, 3), (1500, 3), (1800, 3)]


@pytest.mark.parametrize(
    "wrong",
    [{"rowss": 1}, {"stack": 3}, {"limits": {"timeout_s": 0}}, {"stack": {"linger": 1}}, {"stack": "x"}],
)
def test_a_setting_that_trl_does_not_know_is_named_on_one_line(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))) as refused:
        NeMoGymSpec("mcqa", **wrong)
    assert "\n" not in str(refused.value)


def test_a_run_needs_an_environment_or_rows() -> None:
    with pytest.raises(OptionError, match="--spec FILE"):
        dry_run()


def test_options_take_types_bounds_and_defaults_from_fields() -> None:
    options = {each.opts[-1]: each for each in command.params if isinstance(each, Option) and each.field}
    assert len(options) > 20
    for option in options.values():
        assert option.field is not None
        cls, name = option.field
        assert issubclass(cls, Config)
        assert cls.model_fields[name].description
    assert isinstance(options["--repeats"].type, click.IntRange)
    assert (options["--repeats"].type.min, options["--repeats"].default) == (1, 1)
    assert options["--max-calls"].type.convert("none", None, None) is None
    assert isinstance(options["--routing"].type, click.Choice)
    assert options["--env-var"].multiple
    assert options["--bodies"].is_flag


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("nosuchenv", "nosuchenv"),
        ("mcqa --config nosuch", "nosuch"),
        ("mcqa --data nosuchdata", "nosuchdata"),
        ("mcqa --data nosuch.jsonl", "nosuch.jsonl"),
        ("nosuch.jsonl --env mcqa", "nosuch.jsonl"),
        ("./nosuch/mine.yaml", "nosuch/mine.yaml"),
    ],
)
@pytest.mark.parametrize("command", ["run", "slurm"])
def test_what_is_not_there_is_refused_before_a_dry_run_prints_anything(
    command: str, words: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = ["slurm", "-o", "x", "--shards", "2", "--dry-run", "--"]
    arguments = [*before, *words.split()] if command == "slurm" else ["run", *words.split(), "--dry-run"]
    done = CliRunner().invoke(cli, arguments)
    assert isinstance(done.exception, ConfigError | DataError)
    assert value in str(done.exception)
    assert done.stdout == ""


def test_rows_that_another_job_makes_may_come_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = ["slurm", "-o", "x", "--shards", "2", "--sbatch", "dependency=afterok:7", "--dry-run", "--"]
    assert CliRunner().invoke(cli, [*job, "mcqa", "--data", "later.jsonl"]).exit_code == 0
    assert isinstance(CliRunner().invoke(cli, [*job, "nosuchenv"]).exception, ConfigError)
