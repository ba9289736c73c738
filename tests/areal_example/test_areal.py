"""examples/areal with AReaL's real rollout engine, agent workflow and proxy server; a script samples the tokens."""

from __future__ import annotations

import itertools
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gymgate

pytestmark = [pytest.mark.gym, pytest.mark.timeout(900)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "areal"
ADMIN = "the-proxys-key"
TASK_S = 200


def post(url: str, value: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(value).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def token_server() -> Iterator[Any]:
    from support.token_server import TokenServer

    with TokenServer() as server:
        yield server


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """AReaL's own configuration of its rollouts, with a tokenizer that renders tool calls as Qwen3 does."""
    import trl
    from areal.api.cli_args import AgentConfig, InferenceEngineConfig
    from examples.trl.tiny_policy import make_tokenizer

    home = tmp_path_factory.mktemp("areal")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates/qwen3.jinja").read_text()
    tokenizer.save_pretrained(home / "tokenizer")
    return InferenceEngineConfig(
        experiment_name="gymgate",
        trial_name="test",
        fileroot=str(home),
        backend="vllm:d1",
        tokenizer_path=str(home / "tokenizer"),
        max_concurrent_rollouts=8,
        consumer_batch_size=8,
        max_head_offpolicyness=1_000,
        setup_timeout=60,
        request_timeout=60,
        request_retries=1,
        agent=AgentConfig(
            agent_cls_path="agent.NeMoGymAgent", admin_api_key=ADMIN, tool_call_parser="hermes"
        ),
    )


@pytest.fixture(scope="module")
def proxy(config: Any, token_server: Any) -> Iterator[str]:
    """AReaL's proxy server, set up by the calls that its controller makes; its URL."""
    from aiohttp.test_utils import unused_port
    from areal.infra.rpc.serialization import serialize_value

    home, port = Path(config.fileroot), unused_port()
    command = [sys.executable, "-m", "areal.experimental.openai.proxy.proxy_rollout_server"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--nfs-record-root", str(home / "names")]
    command += [
        "--experiment-name",
        "gymgate",
        "--trial-name",
        "test",
        "--role",
        "proxy",
        "--worker-index",
        "0",
    ]
    with (home / "proxy.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "1"}
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 400  # its imports take a minute on a busy machine
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None, (home / "proxy.log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.2)
        engine = {"engine": "areal.engine.vllm_remote.RemotevLLMEngine"}
        post(f"{url}/create_engine", {**engine, "init_kwargs": serialize_value({"config": config})})
        address = token_server.url.removeprefix("http://")
        kwargs = serialize_value({"engine_id": "proxy", "addr": address, "train_data_parallel_size": 1})
        post(f"{url}/call", {"method": "initialize", "args": serialize_value([]), "kwargs": kwargs})
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
        print((home / "proxy.log").read_text()[-4000:])


@contextmanager
def engine_of(config: Any, token_server: Any) -> Iterator[Any]:
    """AReaL's rollout engine, as in a training."""
    from areal.engine.vllm_remote import RemotevLLMEngine

    made = RemotevLLMEngine(config)
    made.initialize("rollout", token_server.url.removeprefix("http://"), 1)
    try:
        yield made
    finally:
        made.destroy()


@pytest.fixture(scope="module")
def engine(config: Any, proxy: str, token_server: Any) -> Iterator[Any]:
    with engine_of(config, token_server) as made:
        yield made


@pytest.fixture(scope="module", autouse=True)
def stack() -> Iterator[None]:
    """The rollouts' stack, which ends with the tests."""
    from support.token_server import ENVIRONMENT

    with gymgate.acquire_sync(gymgate.StackConfig(environments=(ENVIRONMENT,), share="machine")):
        yield


def row(**changes: Any) -> dict[str, Any]:
    """The first row, as `train.py` gives rows to AReaL."""
    from support.token_server import ENVIRONMENT

    read_rows = runpy.run_path(str(EXAMPLE / "train.py"))["read_rows"]
    value = {**json.loads(read_rows(ENVIRONMENT, "example")[0]["nemo_gym_row"]), **changes}
    return {"nemo_gym_row": json.dumps({name: each for name, each in value.items() if each is not None})}


def roll_out(engine: Any, proxy: str, data: dict[str, Any], group_size: int = 1) -> dict[str, Any] | None:
    """What AReaL trains on for a row; `None` if it rejects it."""
    from support.token_server import ENVIRONMENT

    settings = {"environment": ENVIRONMENT, "max_tokens": 256, "linger_s": 0.0}
    task = engine.submit(
        data,
        workflow="agent.NeMoGymAgent",
        workflow_kwargs=settings,
        group_size=group_size,
        proxy_addr=proxy,
    )
    found: dict[str, Any] | None = engine.wait_for_task(task, timeout=TASK_S)
    return found


def test_each_turn_is_trained_on_with_the_reward(engine: Any, proxy: str, token_server: Any) -> None:
    """Three tool calls and an answer: the ids that were sampled, with their logprobs, and Gym's reward on each."""
    token_server.turns.clear()
    trained = roll_out(engine, proxy, row())
    assert trained is not None
    assert trained["rewards"].tolist() == [1.0] * 4
    assert len(token_server.turns) == 4
    for number, turn in enumerate(token_server.turns):
        prompt, sampled = [*turn.prompt_ids], [*turn.completion_ids]
        size = len(prompt) + len(sampled)
        assert trained["input_ids"][number, :size].tolist() == prompt + sampled
        assert trained["loss_mask"][number, :size].tolist() == [0] * len(prompt) + [1] * len(sampled)
        logprobs = [0.0] * len(prompt) + list(turn.logprobs or [])
        assert trained["logprobs"][number, :size].tolist() == pytest.approx(logprobs)
        assert int(trained["attention_mask"][number].sum()) == size


def test_an_agent_in_a_process_of_its_own(config: Any, proxy: str, token_server: Any) -> None:
    """`rollout.agent.mode=subproc`: the URL and the key come as environment variables."""
    apart = replace(config, agent=replace(config.agent, mode="subproc", subproc_max_workers=1))
    with engine_of(apart, token_server) as engine:
        trained = roll_out(engine, proxy, row())
    assert trained is not None
    assert trained["rewards"].tolist() == [1.0] * 4


def test_a_wrong_answer_is_a_reward_of_0(engine: Any, proxy: str) -> None:
    trained = roll_out(engine, proxy, row(expected_count=7))
    assert trained is not None
    assert trained["rewards"].tolist() == [0.0] * 4


def test_a_failed_rollout_is_rejected(engine: Any, proxy: str, token_server: Any) -> None:
    token_server.begin = lambda number: "refuse"
    try:
        assert roll_out(engine, proxy, row()) is None
    finally:
        token_server.begin = lambda number: "calls"


def test_a_rollout_without_a_reward_is_rejected(engine: Any, proxy: str) -> None:
    assert roll_out(engine, proxy, row(expected_count=None)) is None


@pytest.mark.parametrize(("refused", "rewards"), [((0,), [1.0] * 8), ((1, 2, 3, 4), None)])
def test_a_group_with_refused_calls(
    engine: Any, proxy: str, token_server: Any, refused: tuple[int, ...], rewards: list[float] | None
) -> None:
    """A call that is refused once is made again, and trained on once. A rollout that fails takes its group with it."""
    begun = itertools.count()
    token_server.begin = lambda number: "refuse" if next(begun) in refused else "calls"
    try:
        trained = roll_out(engine, proxy, row(), group_size=2)
    finally:
        token_server.begin = lambda number: "calls"
    assert (trained["rewards"].tolist() if trained is not None else None) == rewards
