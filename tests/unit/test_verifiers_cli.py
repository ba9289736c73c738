"""`gymgate eval run` without verifiers: its command line, and its closing table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gymgate.cli import eval as eval_command
from gymgate.cli.eval_args import environment_names, read_settings, resume_args, split_taskset
from gymgate.cli.eval_report import print_report, read_tallies
from gymgate.config import RuntimeConfig
from gymgate.errors import ConfigError

NOTHING = {
    "environments": (),
    "data": None,
    "gym": None,
    "tasks": None,
    "rollouts": None,
    "concurrency": None,
    "base_url": None,
    "model": None,
    "api_key_var": None,
    "push": False,
    "resume": None,
}


@pytest.mark.parametrize(
    ("args", "taskset", "rest"),
    [
        ([], "nemo-gym-env", []),
        (["gsm8k", "-v"], "gsm8k", ["-v"]),
        (["--env.agent.max-turns", "3"], "nemo-gym-env", ["--env.agent.max-turns", "3"]),
        (["@", "run.toml"], None, ["@", "run.toml"]),
        (["--env.taskset.id", "gsm8k"], None, ["--env.taskset.id", "gsm8k"]),
    ],
)
def test_taskset_is_ours_unless_something_names_one(
    args: list[str], taskset: str | None, rest: list[str]
) -> None:
    assert split_taskset(args, "nemo-gym-env") == (taskset, rest)


def test_options_become_verifiers_flags_and_nothing_is_pushed_unasked() -> None:
    options = NOTHING | {"environments": ("mcqa", "calendar"), "rollouts": 4, "base_url": "http://h/v1"}
    taskset, argv = eval_command._arguments(["--env.agent.max-turns", "3"], options)
    assert taskset == "nemo-gym-env"
    assert argv == [
        *("--env.agent.max-turns", "3", "--env.taskset.env", "mcqa,calendar", "-r", "4"),
        *("--client.base-url", "http://h/v1", "--no-push"),
    ]
    assert "--no-push" not in eval_command._arguments([], NOTHING | {"push": True})[1]


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
    assert environment_names(settings, "x") == ["mcqa", "calendar"]
    assert environment_names({"env.taskset.env": "a, b"}, "x") == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("missing.toml", None, "cannot be read"),
        ("bad.toml", "= 3", "bad.toml"),
        ("bad.json", "{", "bad.json"),
        ("list.yaml", "- 1", "no settings"),
        ("run.ini", "x", "neither TOML"),
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
    with pytest.raises(ConfigError, match="no saved run"):
        resume_args(str(tmp_path))
    saved = tmp_path / "configs" / "resolved" / "eval.json"
    saved.parent.mkdir(parents=True)
    saved.write_text("{}")
    assert resume_args(str(tmp_path)) == ["@", str(saved), "--resume"]


def test_a_model_without_an_endpoint_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match="needs an endpoint"),
        eval_command._policy(["mcqa"], {"model": "m"}, RuntimeConfig()),
    ):
        pass


def test_an_endpoint_that_is_no_url_is_refused() -> None:
    settings = {"client.base_url": "nourl", "model": "m"}
    with (
        pytest.raises(ConfigError, match="-b 'nourl' is not a URL"),
        eval_command._policy(["mcqa"], settings, RuntimeConfig()),
    ):
        pass


def test_an_unreachable_endpoint_is_one_line() -> None:
    settings = {"client.base_url": "http://127.0.0.1:1/v1"}
    policy = eval_command._policy(["mcqa"], settings, RuntimeConfig())
    with pytest.raises(ConfigError, match="cannot be reached"), policy:
        pass


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
    tallies = read_tallies(tmp_path, since=50)
    tally = tallies["mcqa"]
    assert (tally.rollouts, tally.failed, tally.rewards) == (7, 1, [0.5, 1.0, 0.0])
    assert tally.outcomes == {"completed": 2, "truncated": 1, "unscored": 2, "masked": 1, "failed": 1}
    assert tally.mean_reward == 0.5
    assert tally.rate == 6 / 7
    print_report(tallies, tmp_path)
    out = capsys.readouterr()
    assert out.out.splitlines()[2].split() == ["mcqa", "7", "6", "1", "1", "2", "1", "0.500", "0.9"]
    assert "1 x ProviderError: upstream 500: no" in out.err
