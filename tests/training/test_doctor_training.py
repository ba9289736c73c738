"""`gymgate doctor` before a training that samples in this process; tests/engine asks it about a server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import orjson
import pytest

pytest.importorskip("torch", reason="training tests need torch: see docs/training.md")
pytest.importorskip("trl", reason="training tests need trl: see docs/training.md")

from click.testing import CliRunner

from gymgate.cli.doctor import command
from gymgate.doctor.sampling_checks import check_two_turns
from gymgate.tokens import TokenPolicy
from gymgate.tokens.conversation import make_renderer
from gymgate.tokens.engines import HuggingFaceEngine
from support.judged_trl import judged
from support.trl_rows import tiny

pytestmark = [pytest.mark.gym, pytest.mark.timeout(240), pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("tiny")
    model, tokenizer, _ = tiny()
    model.save_pretrained(made)
    tokenizer.save_pretrained(made)
    return str(made)


def doctor(*arguments: str) -> tuple[int, dict[str, tuple[bool | None, str]]]:
    """Exit code, and the checks by name."""
    done = CliRunner().invoke(command, [*arguments, "--json"])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    checks = orjson.loads(done.stdout)
    return done.exit_code, {check["name"]: (check["ok"], check["detail"]) for check in checks}


def test_a_model_in_this_process(folder: str) -> None:
    code, checks = doctor("--trl", "--model", folder, "--renderer", "qwen3")
    assert code == 0, checks
    assert checks["two turns"][0] is True


@pytest.mark.parametrize("length", [4, 60])
def test_a_model_without_room_for_two_turns(length: int) -> None:
    """The first prompt has 33 ids; it may have room, or the second one may have none."""
    model, tokenizer, _ = tiny()
    policy = TokenPolicy(HuggingFaceEngine(model), make_renderer(tokenizer, "qwen3"), max_model_len=length)
    finding = asyncio.run(check_two_turns(policy))
    assert finding.ok is False
    assert f"{length} ids" in finding.detail


def test_each_missing_thing_is_one_line(folder: str) -> None:
    code, checks = doctor("--trl", "mcqa")
    assert code == 1
    assert checks["policy"][1].startswith("none named; --vllm URL")
    code, checks = doctor("--model", folder, "--renderer", "no-such")
    assert code == 1
    assert "No renderer config registered" in checks["policy"][1]
    code, checks = doctor("--model", folder, "--renderer", "qwen3", "no_such_environment")
    assert code == 1
    assert "no_such_environment" in checks["environments"][1]


def test_a_judge_that_is_the_policy_is_no_part_of_the_rollout(folder: str, tmp_path: Path) -> None:
    """Its answers are sampled as it asks, which is no mistake."""
    environment, rows = judged(tmp_path)
    _, checks = doctor("--model", folder, "--renderer", "qwen3", "--data", rows, environment)
    ok, detail = checks["judged_agent"]
    assert (ok, "1 calls, 1 training row" in detail) == (True, True), checks
    assert checks["judged_agent sampling"][0] is True
