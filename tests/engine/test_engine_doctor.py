"""`gymgate doctor` before a training: vLLM, the model it serves, and a real environment."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

pytest.importorskip("trl", reason="needs trl: run ./dev engine")

from click.testing import CliRunner

from gymgate.cli.doctor import command

pytestmark = [
    pytest.mark.gym,
    pytest.mark.heavy,
    pytest.mark.timeout(500),
    pytest.mark.filterwarnings("default"),
]

LETTERS = str(
    Path(__file__).parents[2]
    / "examples/own_environment/resources_servers/letter_share/configs/letter_share.yaml"
)


def doctor(*arguments: str | Path) -> tuple[int, dict[str, tuple[bool | None, str]]]:
    """Exit code, and the checks by name."""
    done = CliRunner().invoke(command, [*map(str, arguments), "--json"])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    checks = orjson.loads(done.stdout)
    return done.exit_code, {check["name"]: (check["ok"], check["detail"]) for check in checks}


def test_a_training_that_can_start(vllm_url: str, model_directory: Path) -> None:
    code, checks = doctor("--trl", "--vllm", vllm_url, "--model", model_directory, LETTERS)
    assert code == 0, {name: check for name, check in checks.items() if check[0] is False}
    assert "1 calls, 1 training row" in checks["letter_share_simple_agent"][1]
    assert checks["letter_share_simple_agent lengths"][0] is True
    assert checks["two turns"][0] is True
    assert " tool" in checks["chat template"][1]
    assert checks["temperature"][0] is True
    assert checks["trl"][0] is True


@pytest.mark.heavy
def test_each_missing_thing_is_one_line(vllm_url: str, model_directory: Path, tmp_path: Path) -> None:
    code, checks = doctor("--vllm", vllm_url, "--model", tmp_path / "nothing")
    assert code == 1
    assert "--model DIR" in checks["policy"][1]
    code, checks = doctor("--vllm", vllm_url, "--model", model_directory, "--renderer", "no-such")
    assert code == 1
    assert "No renderer config registered" in checks["policy"][1]


def test_a_renderer_of_another_model_is_refused(vllm_url: str, model_directory: Path) -> None:
    code, checks = doctor("--vllm", vllm_url, "--model", model_directory, "--renderer", "nemotron-3")
    assert code == 1
    assert "Special token '<think>' not found in tokenizer vocabulary" in checks["policy"][1]
