"""`gymgate eval run` without verifiers: its command line, and its closing table."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from gymgate.cli import eval as eval_command
from gymgate.cli.eval_args import (
    is_replayed,
    read_settings,
    resume_args,
    verifiers_args,
    with_taskset,
)
from gymgate.cli.eval_report import RunWatcher, print_report, read_metrics
from gymgate.config import RuntimeConfig
from gymgate.errors import ConfigError, PolicyError
from gymgate.integrations.knobs import Knobs
from gymgate.integrations.verifiers.knobs import knobs_of


def arguments(args: list[str], **given: Any) -> list[str]:
    """The verifiers command line for options on our command line; the others have their defaults."""
    default = eval_command.run.make_context("run", []).params
    return verifiers_args(args, default | given, [*given])


@pytest.mark.parametrize(
    ("args", "taskset"),
    [
        ([], "nemo-gym-env"),
        (["gsm8k", "-v"], None),
        (["--env.agent.max-turns", "3"], "nemo-gym-env"),
        (["@", "run.toml"], None),
        (["--env.taskset.id", "gsm8k"], None),
    ],
)
def test_taskset_is_ours_unless_something_names_one(args: list[str], taskset: str | None) -> None:
    assert with_taskset(args) == ([taskset, *args] if taskset else args)


def test_options_become_verifiers_flags_and_nothing_is_pushed_unasked() -> None:
    argv = arguments(
        ["--env.agent.max-turns", "3"],
        environments=("mcqa", "calendar"),
        repeats=4,
        urls="http://h/v1",
        concurrency=9,
    )
    assert argv == [
        *("nemo-gym-env", "--env.agent.max-turns", "3", "-r", "4", "-c", "9"),
        *("--env.taskset.env", "mcqa,calendar", "--client.base-url", "http://h/v1", "--no-push"),
    ]
    assert "--no-push" not in arguments([], push=True)


def test_the_concurrency_is_ours_unless_something_names_one(tmp_path: Path) -> None:
    assert arguments(["gsm8k"])[:3] == ["gsm8k", "-c", "64"]
    file = tmp_path / "run.toml"
    file.write_text("max_concurrent = 3\n")
    assert "-c" not in arguments(["@", str(file)])
    assert "-c" not in arguments(["--max-concurrent", "3"])


def test_shared_options_reach_the_knobs_and_the_sampling() -> None:
    argv = arguments(
        [],
        judges=("my-judge=http://j/v1", "*=policy", "sim=m@http://s/v1"),
        settings=("a.b=3", "a.c={}"),
        sampling=("temperature=0.5", "stop=[x]"),
        env_vars=("HOME",),
        gym=RuntimeConfig(version="0.6.0", interpreter="/venv/bin/python"),
        hang_timeout=0.0,
        timeout=7.0,
    )
    settings = read_settings(argv)
    knobs = knobs_of(settings)
    stack = knobs.stack_config()
    models = {
        name: item if isinstance(item, str) else (item.base_url, item.model) for name, item in stack.models
    }  # type: ignore[union-attr]
    assert models == {"*": "policy", "my-judge": ("http://j/v1", None), "sim": ("http://s/v1", "m")}
    assert stack.environments[0].overrides == (("a.b", 3), ("a.c", {}))
    assert stack.env_vars == ("HOME",)
    assert stack.runtime == RuntimeConfig(version="0.6.0", interpreter="/venv/bin/python")
    assert (stack.hang_timeout_s, knobs.timeout_s) == (None, 7.0)
    assert (settings["sampling.temperature"], settings["sampling.stop"]) == ("0.5", '["x"]')


@pytest.mark.parametrize(
    ("args", "given", "message"),
    [
        (["gsm8k"], {"data": "x"}, "--env.taskset.data is a setting of nemo-gym-env, which taskset 'gsm8k'"),
        ([], {"urls": "http://a/v1,http://b/v1"}, "verifiers calls one endpoint"),
        ([], {"resume": "outputs/x", "data": "x"}, "--resume takes every setting from the saved run"),
        ([], {"judges": ("x=nourl",)}, "--judge 'x=nourl'"),
    ],
)
def test_options_that_do_not_fit_are_refused(args: list[str], given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        arguments(args, **given)


def test_settings_come_from_files_then_flags(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'model = "a"\n[env.taskset]\nenv = ["mcqa", "calendar"]\n[client]\nbase-url = "http://h/v1"\n'
    )
    settings = read_settings(["@", str(file), "--model=b", "--env.taskset.max-calls", "3", "--rich"])
    assert settings == {
        "model": "b",
        "env.taskset.env": ["mcqa", "calendar"],
        "client.base_url": "http://h/v1",
        "env.taskset.max_calls": "3",
        "rich": True,
    }
    assert knobs_of(settings).environment_names() == ("mcqa", "calendar")
    assert knobs_of({"env.taskset.env": "a, b"}).environment_names() == ("a", "b")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("missing.toml", None, "cannot be read"),
        ("bad.toml", "= 3", "bad.toml"),
        ("bad.json", "{", "bad.json"),
        ("list.yaml", "- 1", "has no settings"),
        ("run.ini", "x", "its name must end in .toml"),
    ],
)
def test_a_config_file_that_cannot_be_read_is_one_line(
    tmp_path: Path, name: str, text: str | None, said: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        read_settings(["@", str(tmp_path / name)])
    assert "\n" not in str(caught.value)


def test_resume_names_the_saved_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not the directory of a saved run"):
        resume_args(str(tmp_path))
    saved = tmp_path / "configs" / "resolved" / "eval.json"
    saved.parent.mkdir(parents=True)
    saved.write_text("{}")
    assert resume_args(str(tmp_path)) == ["@", str(saved), "--resume"]


def test_a_model_without_an_endpoint_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match="needs an endpoint"),
        eval_command._policy(Knobs(env="mcqa"), {"model": "m"}),
    ):
        pass


def test_an_endpoint_that_is_no_url_is_refused() -> None:
    settings = {"client.base_url": "nourl", "model": "m"}
    with (
        pytest.raises(ConfigError, match="-b 'nourl' is not a URL"),
        eval_command._policy(Knobs(env="mcqa"), settings),
    ):
        pass


def test_an_unreachable_endpoint_is_one_line() -> None:
    settings = {"client.base_url": "http://127.0.0.1:1/v1"}
    policy = eval_command._policy(Knobs(env="mcqa"), settings)
    with pytest.raises(PolicyError, match=r"127\.0\.0\.1:1"), policy:
        pass


def test_a_resumed_replay_is_known_by_its_key_variable() -> None:
    assert is_replayed({})
    assert is_replayed({"client.base_url": "http://h/v1", "client.api_key_var": "GYMGATE_REPLAY_KEY"})
    assert not is_replayed({"client.base_url": "http://h/v1"})


def test_the_runners_log_says_where_the_run_is_and_a_notice_is_dropped() -> None:
    def record(message: str, *args: object) -> logging.LogRecord:
        return logging.LogRecord("runner", logging.INFO, "", 0, message, args, None)

    watcher = RunWatcher()
    assert watcher.filter(record("running %dx%d rollouts on %s", 2, 3, "m"))
    assert watcher.filter(record("results: %s", Path("outputs/x")))
    assert not watcher.filter(record("vf-eval will be deprecated - move on"))
    assert (watcher.run, watcher.wanted) == (Path("outputs/x"), 6)


def _episode(environment: str, start: float, **trace: object) -> str:
    timing = {"start": start, "scoring": {"start": start, "end": start + 2}}
    task = {"data": {"gym": {"environment": environment}}}
    return json.dumps({"task": task, "traces": [{"ok": True, "timing": timing, **trace}], "errors": []})


def _said(status: str, **fields: object) -> dict[str, object]:
    return {"nemo_gym": {"status": status, **fields}}


def test_the_table_counts_what_was_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two scored, of which one was truncated; two without a score, one masked, one failed; one kept from before."""
    part = {"score": 9.0, "weight": 0.0}
    reward = {"reward": {"score": 0.5, "weight": 1.0}, "part": part}
    error = {"type": "ProviderError", "message": "upstream 500:\n no"}
    lines = [
        _episode("mcqa", 100, rewards=reward),
        _episode("mcqa", 101, rewards={"reward": None}),
        _episode("mcqa", 102, ok=False, errors=[error]),
        _episode("mcqa", 10, rewards={"reward": {"score": 1.0}}),
        _episode("mcqa", 103, rewards={"part": part}, info=_said("completed")),
        _episode("mcqa", 104, rewards={"reward": {"score": 0.0}}, info=_said("truncated", reward=0.0)),
        _episode("mcqa", 105, rewards={"part": part}, info=_said("masked", reward=0.0)),
    ]
    (tmp_path / "traces.jsonl").write_text("\n".join(lines) + "\n")
    environments, tasks = read_metrics(tmp_path, since=50)
    metrics = environments["mcqa"]
    assert (metrics.rollouts, metrics.failed, metrics.scored, metrics.reward_sum) == (7, 1, 3, 1.5)
    assert metrics.outcomes == {"completed": 2, "truncated": 1, "unscored": 2, "masked": 1, "failed": 1}
    assert metrics.mean_reward == 0.5
    assert metrics.rate == 6 / 7
    print_report(environments, tasks, tmp_path, {"wide": False, "ks": None})
    out = capsys.readouterr()
    assert out.out.splitlines()[2].split()[:7] == ["mcqa", "7", "1", "1", "2", "1", "0.500"]
    assert "1 x ProviderError: upstream 500: no" in out.err
    assert "resume" not in out.err
    print_report(environments, tasks, tmp_path, {"wide": True, "ks": None}, replayed=True, complete=False)
    out = capsys.readouterr()
    assert out.out.splitlines()[2].split()[-2:] == ["0.9", "replayed"]
    assert f"gymgate eval run --resume {tmp_path}" in out.err
    assert "-b http://host:8000/v1 -m MODEL" in out.err
