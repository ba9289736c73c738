"""`gymgate doctor` before a training, against the token server and a real environment."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

pytest.importorskip("torch", reason="training tests need torch: see docs/training.md")
pytest.importorskip("trl", reason="training tests need trl: see docs/training.md")

from click.testing import CliRunner
from trl_support import ENVIRONMENT, tiny

from gymgate.cli.doctor import command

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


def test_a_training_that_can_start(folder: str, token_server_url: str) -> None:
    code, checks = doctor(
        *("--trl", "--vllm", token_server_url, "--model", folder, "--renderer", "qwen3"), ENVIRONMENT, "mcqa"
    )
    assert code == 0, checks
    for agent in ("letter_share_simple_agent", "mcqa_simple_agent"):
        assert "1 calls, 1 training row" in checks[agent][1]
        assert checks[f"{agent} lengths"][0] is True
        assert checks[f"{agent} ids"] == (True, "the text, tokenised again, gives the ids that were sampled")
        assert checks[f"{agent} sampling"][1].startswith("temperature 1, top_p 1")
    assert checks["two turns"][0] is True
    assert "are those of the server's chat template" in checks["chat template"][1]
    assert checks["temperature"] == (True, "at temperature 0 an answer repeats")
    assert checks["trl"][0] is True


def test_a_model_in_this_process(folder: str) -> None:
    code, checks = doctor("--trl", "--model", folder, "--renderer", "qwen3")
    assert code == 0, checks
    assert checks["two turns"][0] is True


def test_a_renderer_of_another_model_is_found(folder: str, token_server_url: str) -> None:
    _, checks = doctor("--vllm", token_server_url, "--model", folder, "--renderer", "nemotron-3")
    ok, told = checks["chat template"]
    assert ok is None
    assert "differ from the server's chat template at" in told
    assert told.endswith("name the model's renderer with --renderer")


def test_each_missing_thing_is_one_line(folder: str, token_server_url: str, tmp_path: Path) -> None:
    code, checks = doctor("--vllm", token_server_url, "--model", str(tmp_path / "nothing"))
    assert code == 1
    assert "name its directory: --model DIR" in checks["policy"][1]
    code, checks = doctor("--vllm", token_server_url, "--model", folder, "--renderer", "no-such")
    assert code == 1
    assert "No renderer config registered" in checks["policy"][1]
    code, checks = doctor("--trl", "mcqa")
    assert code == 1
    assert checks["policy"][1].startswith("none named; --vllm URL")
    code, checks = doctor(
        *("--vllm", token_server_url, "--model", folder, "--renderer", "qwen3"), "no_such_environment"
    )
    assert code == 1
    assert "no_such_environment" in checks["environments"][1]
