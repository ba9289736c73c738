"""What `--dry-run` prints is the run that its options describe, whatever they are and in whatever order."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from click.testing import CliRunner

from gymgate.cli.run import command
from gymgate.core.config import HTTPEndpoint, StackConfig
from gymgate.core.errors import ConfigError
from gymgate.gym.row_sources import RowSource
from gymgate.rollouts.row import make_row
from gymgate.runs.collected.run import Collection
from gymgate.runs.described.pace import DEFAULT_BUDGETS, Pace
from gymgate.runs.described.plan import RolloutPlan

ENVIRONMENT_OPTIONS = (
    "--set b=[1,{c: null}]",
    "--set a.b=x",
    "--set a.a={d: 1.5}",
    "--config other",
    "--agent someone",
    "--sandbox docker",
    "--routing process",
)
ENDPOINT_OPTIONS = (
    "-m M",
    "--dialect responses",
    "--max-retries 0",
    "--call-timeout 5",
    "--sampling top_p=1",
    "--sampling stop=[a,b]",
    "--sampling extra={a: 1}",
    "--wait-for-policy 3",
    "--api-key-var HOME",
)
RUN_OPTIONS = (
    "-n 5",
    "-r 3",
    "--seeds 2,7-9",
    "--data example",
    "-c 3",
    "--timeout 7.5",
    "--max-calls none",
    "--hang-timeout none",
    "--stock-servers",
    "--agent-processes 2",
    "--retries policy=9",
    "--retries 2",
    "--stop-after-failures 0",
    "--stall-warning 9",
    "--sync-every 0",
    "--bodies",
    "--judge j=m@http://j/v1",
    "--judge a=policy",
    "--judge *=none",
    "--judge-key-var *=HOME",
    "--gym 0.6.0",
    "--gym 0.7.0@/opt/python",
    "--ray auto --cpus-per-stack 2",
    "--env-var HOME",
    "--env-var PATH",
    "--gateway-host 172.17.0.1",
)


def described(*words: str | Path) -> str:
    """The text, which also tells the order of settings."""
    done = CliRunner().invoke(command, [*map(str, words), "--dry-run", "-o", "DIR"], catch_exceptions=False)
    return done.stdout


def split(option: str) -> list[str]:
    """The words of an option; a value may hold blanks."""
    name, _, value = option.partition(" ")
    return option.split(" ") if " --" in value else [name, *([value] if value else [])]


@pytest.mark.parametrize("seed", range(80))
def test_a_description_and_another_order_are_the_same_run(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    for name in (
        "open_catalog",
        "refuse_missing",
    ):  # the files and interpreters of these options are not here
        monkeypatch.setattr(f"gymgate.cli.run.{name}", lambda *_, **__: None)
    chosen = random.Random(seed)
    options = [each for each in RUN_OPTIONS if chosen.random() < 0.4]
    names = chosen.sample(["mcqa", "calendar", "xlam_fc"], chosen.choice([1, 1, 2]))
    if len(names) == 1:
        options += [each for each in ENVIRONMENT_OPTIONS if chosen.random() < 0.5]
    else:
        options += [f"--set {names[0]}:b=1", f"--set {names[1]}:a.b=2", f"--set {names[0]}:a.b=3"]
    if chosen.random() < 0.7:
        options += ["-b http://a/v1,http://b/v1"]
        options += [each for each in ENDPOINT_OPTIONS if chosen.random() < 0.4]
        options += ["--price 0.15,0.6"] * chosen.randint(0, 1)
    words = [word for option in options for word in split(option)]
    printed = described(*names, *words)
    (tmp_path / "spec.json").write_text(printed)
    assert described("--spec", tmp_path / "spec.json") == printed
    chosen.shuffle(options)
    ordered = [each for each in options if not each.startswith(("--retries", "--gym"))]
    ordered += [
        each for each in RUN_OPTIONS if each in options and each not in ordered
    ]  # the last one counts
    assert described(*names, *(word for option in ordered for word in split(option))) == printed


def test_retries_that_are_not_given_keep_their_default(tmp_path: Path) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text('[stack]\nenvironments = ["mcqa"]\n[pace.budgets]\npolicy = 5\n')
    assert json.loads(described("--spec", spec))["pace"]["budgets"] == {**DEFAULT_BUDGETS, "policy": 5}
    assert Pace(budgets={"data": 1}).budgets == {**DEFAULT_BUDGETS, "data": 1}
    with pytest.raises(ValueError, match="policy"):
        Pace(budgets={"policy": -1})


def test_one_seed_for_all_rollouts_is_refused() -> None:
    """Every repeat would be the same sample."""
    row = make_row({"responses_create_params": {"input": "hi"}}, "rows", 1)
    policy = HTTPEndpoint(base_url="http://h/v1", sampling={"temperature": 1, "seed": 1})
    with pytest.raises(ConfigError, match="seed"):
        Collection(StackConfig(environments=("mcqa",)), policy, RolloutPlan([RowSource([row], "mcqa")]))
