"""What the doctor says of servers that sample: real ones on loopback, set up well and badly."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from click.testing import CliRunner

from gymgate.cli.doctor import command
from gymgate.doctor.server_checks import ServedModel, check_servers
from support.upstream import answering, upstream

MODELS = {"data": [{"id": "m", "max_model_len": 512}]}
GOOD = {
    "vllm_config": {
        "model_config": {"logprobs_mode": "processed_logprobs"},
        "weight_transfer_config": {"backend": "nccl"},
    }
}


@contextlib.asynccontextmanager
async def server(answers: dict[str, Any]) -> AsyncIterator[str]:
    """The URL of a server that answers by path."""
    async with upstream(answering(answers)) as serving:
        yield serving.url.removesuffix("/v1")


async def test_a_server_as_trl_wants_it() -> None:
    answers = {"/v1/models": MODELS, "/version": {"version": "0.29.0"}, "/server_info": GOOD}
    async with server(answers) as url:
        checks, served = await check_servers([f"{url}/v1"], "trl")
    assert served == ServedModel("m", 512)
    assert [check.ok for check in checks] == [True] * 4


async def test_each_fault_has_its_fix() -> None:
    bad = {"vllm_config": {"model_config": {"logprobs_mode": "raw_logprobs"}, "weight_transfer_config": None}}
    answers = {"/v1/models": MODELS, "/version": {"version": "0.17.0"}, "/server_info": bad}
    async with server(answers) as url, server({"/v1/models": MODELS}) as plain:
        checks, _ = await check_servers([url], "trl")
        without, _ = await check_servers([plain], "trl")
    told = " ".join(check.detail for check in checks if check.ok is False)
    for fix in (
        "pip install 'vllm>=0.22,<0.32'",
        "--logprobs-mode processed_logprobs",
        "--weight-transfer-config",
    ):
        assert fix in told
    assert "VLLM_SERVER_DEV_MODE=1" in without[-1].detail
    assert without[-1].ok is False


async def test_replicas_must_be_there_and_alike() -> None:
    other = {"data": [{"id": "other", "max_model_len": 512}]}
    async with (
        server({"/v1/models": MODELS}) as one,
        server({"/v1/models": other}) as two,
        server({}) as none,
    ):
        alike, served = await check_servers([one, one], "tokens")
        assert served == ServedModel("m", 512)
        assert not any(check.ok is False for check in alike)
        differ, served = await check_servers([one, two], "tokens")
        assert served is None
        assert f"{two}: other (512)" in differ[-1].detail
        gone, served = await check_servers([one, "http://127.0.0.1:9", none, "nonsense"], "tokens")
    assert served is None
    failed = [check.detail for check in gone if check.ok is False]
    assert len(failed) == 3
    assert failed[0].startswith("http://127.0.0.1:9 ")
    assert "vLLM" in failed[1]
    assert "nonsense " in failed[2]


def test_the_command_ends_with_one_line_for_a_server_that_is_not_there() -> None:
    done = CliRunner().invoke(command, ["--vllm", "http://127.0.0.1:9", "mcqa"])
    assert done.exit_code == 1
    assert done.output.count("http://127.0.0.1:9 ") == 1
    assert "Traceback" not in done.output
