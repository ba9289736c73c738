"""`gymgate eval run`: its command line, verifiers' settings from it, and its closing table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
import orjson
import pytest

pytest.importorskip("verifiers.v1", reason="verifiers is not installed")

from verifiers.v1.episode import WireEpisode

from gymgate.cli import eval as eval_command
from gymgate.cli import main
from gymgate.cli.eval import Line, read_line, resumed_line
from gymgate.core.config import RuntimeConfig
from gymgate.core.errors import ConfigError, PolicyError
from gymgate.integrations.eval_options import EvalOptions
from gymgate.integrations.verifiers import evaluation
from gymgate.integrations.verifiers.evaluation import (
    closing_rows,
    complete,
    metrics_of,
    parse_settings,
    policy_of,
    taskset_of,
)
from gymgate.integrations.verifiers.policy import check_policy
from gymgate.runs.counted.account import Account


@pytest.fixture(autouse=True)
def own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """verifiers' parser reads them from `sys.argv`, which is put back."""
    monkeypatch.setattr(sys, "argv", ["gymgate"])


def line_of(context: click.Context) -> Line:
    return resumed_line(context) if context.params["resume"] else read_line(context)


def read(*words: str) -> Line:
    """What a command line says."""
    with eval_command.run.make_context("run", [*words]) as context:
        return line_of(context)


def settings_of(*words: str) -> Any:
    with eval_command.run.make_context("run", [*words]) as context:
        return parse_settings(line_of(context).argv, 64, dict(context.params["sampling"]))


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
    assert read(*args, "--push").argv == ([taskset, *args] if taskset else args)


def test_options_become_verifiers_flags_and_nothing_is_pushed_unasked() -> None:
    options = ("--env", "mcqa", "--env", "calendar", "-r", "4", "-b", "http://h/v1", "-c", "9")
    argv = read("--env.agent.max-turns", "3", *options).argv
    assert argv == [
        *("nemo-gym-env", "--env.agent.max-turns", "3", "-r", "4", "-c", "9"),
        *("--env.taskset.env", "mcqa,calendar", "--client.base-url", "http://h/v1", "--no-push"),
    ]
    assert "--no-push" not in read("--push").argv


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ([], True),
        (["nemo_gym_env", "--env.agent.max-turns", "3", "--run.name", "x"], True),
        (["gsm8k"], False),
        (["@", "run.toml"], False),
        (["--env.taskset.agent-processes", "8"], False),
        (["--client.base-url", "http://h/v1"], False),
        (["--dry-run"], False),
    ],
)
def test_the_stack_is_known_early_unless_verifiers_own_arguments_may_change_it(
    args: list[str], told: bool
) -> None:
    assert (read(*args).eval_options is not None) == told


def test_the_early_stack_is_the_one_that_the_taskset_will_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where verifiers' parser turns the texts of flags into numbers."""
    line = read(
        *("--judge", "my-judge=http://j/v1", "--judge", "*=policy", "--judge", "sim=m@http://s/v1"),
        *("--set", "a.b=3", "--set", "a.c={}", "--set", "d=[1, 2]", "--set", "e='4'"),
        *("--env-var", "HOME", "--env-var", "PATH", "--gym", "0.6.0@/venv/bin/python"),
        *("--hang-timeout", "none", "--timeout", "7", "--agent-processes", "8"),
        *("--config", "one", "--config", "two.yaml"),
    )
    config = parse_settings(line.argv, 64)
    taskset = taskset_of(config)
    assert line.eval_options is not None
    assert taskset is not None
    assert taskset.run_spec() == line.eval_options.run_spec()
    stack = taskset.run_spec().stack
    models = {
        name: item if isinstance(item, str) else (item.base_url, item.model) for name, item in stack.models
    }  # type: ignore[union-attr]
    assert models == {"*": "policy", "my-judge": ("http://j/v1", None), "sim": ("http://s/v1", "m")}
    assert stack.environments[0].overrides == (("a.b", 3), ("a.c", {}), ("d", (1, 2)), ("e", 4))
    assert stack.environments[0].config == ("one", "two.yaml")
    assert stack.env_vars == ("HOME", "PATH")
    assert stack.runtime == RuntimeConfig(version="0.6.0", interpreter="/venv/bin/python")
    assert (stack.hang_timeout_s, taskset.timeout_s, stack.agent_processes) == (None, 7.0, 8)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("gsm8k --data x", "'gsm8k'"),
        ("-b http://a/v1,http://b/v1", "-b"),
        ("--resume outputs/x --data x", "data"),
        ("--env.taskset.max-calls 3 --resume outputs/x", "--env.taskset.max-calls"),
        ("--judge x=nourl", "--judge 'x=nourl'"),
        ("--env a --env b --agent x", "agent"),
        ("--env a --env b --set a:x=1", "--set"),
    ],
)
def test_options_that_do_not_fit_are_refused(words: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(*words.split())
    assert said in str(caught.value)


def test_settings_come_from_files_then_flags(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'model = "a"\nmax_concurrent = 3\n[env.taskset]\nid = "nemo_gym_env"\nenv = ["mcqa", "calendar"]\n'
        '[client]\nbase_url = "http://h/v1"\n'
    )
    config = settings_of("@", str(file), "--env.taskset.max-calls", "3", "--model", "b")
    taskset = taskset_of(config)
    assert taskset is not None
    assert (taskset.environment_names(), taskset.max_calls) == (("mcqa", "calendar"), 3)
    assert policy_of(config) == {
        "url": "http://h/v1",
        "model": "b",
        "key_variable": "OPENAI_API_KEY",
        "ask": True,
    }
    assert (config.max_concurrent, config.push) == (3, False)
    assert settings_of("@", str(file), "-c", "5").max_concurrent == 5
    assert settings_of().max_concurrent == 64


def test_sampling_keeps_the_types_of_its_values(tmp_path: Path) -> None:
    """Also of fields that verifiers does not know; they override a file's, as flags do."""
    file = tmp_path / "run.toml"
    file.write_text('[sampling]\ntop_p = 0.9\ntemperature = 1.0\n[env.taskset]\nid = "nemo-gym-env"\n')
    sampling = settings_of(
        *(
            "@",
            str(file),
            "--sampling",
            "temperature=0.5",
            "--sampling",
            "stop=[x]",
            "--sampling",
            "min_p=null",
        )
    ).sampling
    assert sampling.model_dump(exclude_unset=True) == {
        "top_p": 0.9,
        "temperature": 0.5,
        "stop": ["x"],
        "min_p": None,
    }
    with pytest.raises(ConfigError) as caught:
        settings_of("--sampling", "temperature=hot")
    assert "temperature" in str(caught.value)


def test_without_a_policy_there_is_none_and_verifiers_own_tasksets_keep_verifiers_own() -> None:
    config = settings_of()
    assert policy_of(config).items() >= {"url": None, "model": None}.items()
    other = settings_of("--env.id", "single-agent", "--env.taskset.id", "nemo-gym-env")
    assert taskset_of(other) is not None


def test_the_runs_name_has_the_model_that_is_found_later(tmp_path: Path) -> None:
    config = settings_of("-o", str(tmp_path))
    path = complete(config, ("http://h/v1", "KEY", "Org/Model"))
    assert path.parent == tmp_path
    assert "--org--model--" in path.name
    assert (config.model, config.client.base_url, config.client.api_key_var) == (
        "Org/Model",
        "http://h/v1",
        "KEY",
    )
    assert complete(settings_of("--run.name", "x"), ("http://h/v1", "KEY", "m")).name == "x"


@pytest.mark.parametrize(
    ("name", "text"), [("missing.toml", None), ("bad.toml", "= 3"), ("unknown.toml", "[env.taskset]\nenvv=1")]
)
def test_a_config_file_that_cannot_be_read_ends_the_command(
    tmp_path: Path, name: str, text: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        settings_of("nemo-gym-env", "@", str(tmp_path / name))
    assert "\n" not in str(caught.value)
    assert ("envv" if name == "unknown.toml" else name) in str(caught.value)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--env.taskset.max-calls 3 --envv mcqa", "near names of gymgate's own: --env"),
        ("nemo-gym", "near names of gymgate's own: nemo-gym-env"),
        ("nemo-gym-env --env.taskset.rows x", "--env.taskset.rows"),
    ],
)
def test_what_verifiers_refuses_is_one_line(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["eval", "run", *words.split()])
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("gymgate: ")
    assert said in line


def test_resume_reads_the_saved_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        read("--resume", str(tmp_path))
    config = settings_of("-o", str(tmp_path), "--run.name", "x", "--dry-run")
    path = complete(config, ("http://127.0.0.1:7/v1", "GYMGATE_REPLAY_KEY", "replay"))
    assert evaluation.evaluate(config, path, lambda _: None) == []
    again = settings_of("--resume", str(path))
    assert again.resume
    assert policy_of(again).items() >= {"url": "http://127.0.0.1:7/v1", "model": "replay"}.items()
    assert complete(again, None) == path
    assert again.model_dump() == config.model_dump()


def test_a_directory_with_results_is_not_written_to(tmp_path: Path) -> None:
    config = settings_of("-o", str(tmp_path), "--run.name", "x")
    path = complete(config, ("http://h/v1", "KEY", "m"))
    path.mkdir()
    (tmp_path / "in").mkdir()
    (path / "traces.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError) as caught:
        evaluation.evaluate(config, path, lambda _: None)
    assert str(path) in str(caught.value)
    outside = settings_of("-o", str(tmp_path / "in"), "--run.dir", "../x", "--clean")
    with pytest.raises(ConfigError):
        evaluation.evaluate(outside, complete(outside, None), lambda _: None)
    assert (path / "traces.jsonl").exists()
    again = settings_of("-o", str(tmp_path), "--run.name", "x", "--clean", "--dry-run")
    evaluation.evaluate(again, complete(again, None), lambda _: None)
    assert not (path / "traces.jsonl").exists()


def test_a_model_without_an_endpoint_is_refused() -> None:
    with pytest.raises(ConfigError, match="'m'"):
        check_policy(EvalOptions(env="mcqa"), print, model="m")


def test_an_endpoint_that_is_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="'nourl'"):
        check_policy(EvalOptions(env="mcqa"), print, url="nourl", model="m")


def test_an_unreachable_endpoint_is_one_line() -> None:
    with pytest.raises(PolicyError, match=r"127\.0\.0\.1:1"):
        check_policy(EvalOptions(env="mcqa"), print, url="http://127.0.0.1:1/v1")


def _episode(environment: str, start: float, **trace: Any) -> Any:
    timing = {"start": start, "scoring": {"start": start, "end": start + 2}}
    task = {"type": "t", "data": {"idx": 0, "gym": {"environment": environment}}}
    common = {"task": task, "agent": {"config": {}}, "ok": True, "timing": timing}
    return WireEpisode.model_validate_json(orjson.dumps({"task": task, "traces": [common | trace]}))


def _said(status: str, **fields: object) -> dict[str, object]:
    return {"nemo_gym": {"status": status, **fields}}


def test_a_judges_failure_and_each_of_a_rows_repeats_are_told_apart() -> None:
    error = {"type": "RolloutFailed", "message": "gone"}
    said = _said("failed", error={"kind": "policy", "judge": True})
    episodes = [_episode("mcqa", 100, ok=False, errors=[error], info=said) for _ in range(2)]
    tasks, _ = metrics_of(episodes, since=0)
    assert str(Account.of(tasks.tasks.values(), tasks)) == "2 rollouts: none scored; 2 failed (2 by judge)"


def test_what_came_of_the_rollouts() -> None:
    """Two scored, of which one was truncated; two without a score, one masked, one failed; one kept from before."""
    part = {"score": 9.0, "weight": 0.0}
    reward = {"reward": {"score": 0.5, "weight": 1.0}, "part": part}
    error = {"type": "ProviderError", "message": "upstream 500:\n no"}
    episodes = [
        _episode("mcqa", 100, rewards=reward),
        _episode("mcqa", 101, rewards={"reward": None}),
        _episode("mcqa", 102, ok=False, errors=[error]),
        _episode("mcqa", 10, rewards={"reward": {"score": 1.0}}),
        _episode("mcqa", 103, rewards={"part": part}, info=_said("completed")),
        _episode("mcqa", 104, rewards={"reward": {"score": 0.0}}, info=_said("truncated", reward=0.0)),
        _episode("mcqa", 105, rewards={"part": part}, info=_said("masked", reward=0.0)),
    ]
    again = [{"type": "SandboxError", "message": "tried again"}] * 2
    episodes[0] = episodes[0].model_copy(update={"ok": True, "errors": again})
    episodes[2] = episodes[2].model_copy(update={"errors": again})
    tasks, rates = metrics_of(episodes, since=50)
    metrics = tasks.counts
    assert (metrics.rollouts, metrics.failed, metrics.scored, metrics.reward_sum) == (7, 1, 3, 1.5)
    assert metrics.outcomes == {"completed": 2, "truncated": 1, "unscored": 2, "masked": 1, "failed": 1}
    assert metrics.mean_reward == 0.5
    assert rates["mcqa"].per_s == 6 / 7
    assert metrics.causes == {"ProviderError: upstream 500: no": 1, "masked: no reason given": 1}
    assert len(tasks.tasks) == 1


def test_a_broken_environment_is_to_be_checked_and_its_rows_are_named_by_line(
    tmp_path: Path, capsys: Any
) -> None:
    error = {"type": "HarnessError", "message": "KeyError"}
    why = _said("failed", error={"kind": "environment"})
    episodes = [_episode("own", 100, ok=False, errors=[error], info=why) for _ in range(2)]
    for line, episode in enumerate(episodes, start=1):
        episode.task.data = episode.task.data.model_copy(update={"idx": line, "name": f"own:{line}"})
    rows, tasks = closing_rows(episodes, None, since=0)
    eval_command._print_end(rows, tasks, tmp_path, replayed=False)
    out = capsys.readouterr().err
    assert "gymgate check" in out
    assert "own:1, own:2" in out


@pytest.mark.parametrize("ours", [True, False])
def test_what_a_grader_accepts_is_said_of_nemo_gyms_alone(ours: bool, tmp_path: Path, capsys: Any) -> None:
    """Another taskset can have the name of a packaged environment, and has another grader."""
    rows, tasks = closing_rows([_episode("mcqa", 100, rewards={"reward": {"score": 0.0}})], None, since=0)
    eval_command._print_end(rows, tasks, tmp_path, ours=ours, replayed=False)
    assert ("was it in another form?" in capsys.readouterr().err) is ours


def test_the_closing_table(tmp_path: Path, capsys: Any) -> None:
    """Of a replayed run of which a rollout failed."""
    error = {"type": "ProviderError", "message": "no capacity"}
    episodes = [
        _episode("mcqa", 100, rewards={"reward": {"score": 1.0}}),
        _episode("mcqa", 101, ok=False, errors=[error]),
    ]
    rows, tasks = closing_rows(episodes, None, since=0)
    assert tasks.counts.failed == 1
    eval_command._print_end(rows, tasks, tmp_path, replayed=True, wide=True, is_example=True)
    out = capsys.readouterr()
    assert out.out.splitlines()[2].split()[-1] == "replayed"
    assert f"gymgate eval run --resume {tmp_path}" in out.err
    assert "1 x ProviderError: no capacity" in out.err
    eval_command._print_end(rows, tasks, tmp_path, replayed=False)
    assert "replayed" not in capsys.readouterr().out
    [row], _ = closing_rows(episodes, None, since=0, failed_as=0.0)
    assert (row["mean_reward"], row["mean_if_failed_0"]) == (0.5, None)
