"""What a trainer's arguments say of sampling, and where its model can be sampled from."""

from __future__ import annotations

import logging
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from gymgate.core.config import RolloutLimits
from gymgate.core.errors import ConfigError, PolicyError
from gymgate.integrations.trl.engine import (
    TRLServerEngine,
    check_timeout,
    model_engine,
    resolve,
    served_model,
    server_url,
    trainer_engine,
    trainer_sampling,
    vllm_awake,
)
from gymgate.integrations.trl.spec import NeMoGymSpec
from gymgate.tokens.engines import CallableEngine, ColocatedEngine, Sample


def test_sampling_is_what_the_trainer_set(caplog: pytest.LogCaptureFixture) -> None:
    args = SimpleNamespace(
        temperature=0.7,
        top_p=1.0,
        top_k=0,
        min_p=None,
        repetition_penalty=1.0,
        generation_kwargs={"min_p": 0.1, "stop": ["END"], "use_cache": True},
    )
    with caplog.at_level(logging.WARNING):
        made = trainer_sampling(args)
    expected = {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
    assert made == {**expected, "min_p": 0.1, "stop": ["END"]}
    assert "use_cache" in caplog.text


def test_the_servers_address() -> None:
    args = SimpleNamespace(
        vllm_mode="server", vllm_server_base_url=None, vllm_server_host="h", vllm_server_port=8
    )
    assert server_url(args) == "http://h:8"
    args.vllm_server_base_url = "http://there:9"
    assert server_url(args) == "http://there:9"


class Vllm:
    """TRL's `VLLMGeneration` in colocate mode; writes down what it is asked for."""

    def __init__(self, *, sleeps: bool = True, size: int = 1) -> None:
        self.mode, self.enable_sleep_mode, self.tensor_parallel_size = "colocate", sleeps, size
        self._llm_weights_sleeping = sleeps
        self.calls: list[str] = []
        config = SimpleNamespace(max_model_len=512)
        self.llm = SimpleNamespace(
            llm_engine=SimpleNamespace(model_config=config),
            wake_up=lambda tags: self.calls.append(f"wake {tags[0]}"),
            sleep=lambda level: self.calls.append(f"sleep {level}"),
        )

    def sync_weights(self) -> None:
        self.calls.append("weights")
        self._llm_weights_sleeping = False


def batch_of(vllm: Vllm) -> list[str]:
    """What vLLM is asked for around a batch of rollouts."""
    vllm.calls.clear()
    with vllm_awake(SimpleNamespace(vllm_generation=vllm)):
        vllm.calls.append("rollouts")
    return vllm.calls


def test_vllm_is_awake_with_weights_while_it_samples() -> None:
    vllm = Vllm()
    vllm.sync_weights()  # TRL does, after a step
    assert batch_of(vllm) == ["wake kv_cache", "rollouts", "sleep 2"]
    assert batch_of(vllm) == ["weights", "wake kv_cache", "rollouts", "sleep 2"]  # no step in between


def test_vllm_sleeps_again_after_an_error() -> None:
    vllm = Vllm()
    with pytest.raises(PolicyError), vllm_awake(SimpleNamespace(vllm_generation=vllm)):
        raise PolicyError("every rollout failed")
    assert vllm.calls == ["weights", "wake kv_cache", "sleep 2"]
    assert vllm._llm_weights_sleeping


def test_vllm_that_never_sleeps_is_left_alone() -> None:
    assert batch_of(Vllm(sleeps=False)) == ["rollouts"]
    with vllm_awake(SimpleNamespace()):
        """A trainer without vLLM."""


def test_vllm_in_the_trainers_process_samples() -> None:
    args = SimpleNamespace(vllm_mode="colocate")
    engine, limit = trainer_engine(SimpleNamespace(use_vllm=True, args=args, vllm_generation=Vllm()))
    assert isinstance(engine, ColocatedEngine)
    assert limit == 512
    with pytest.raises(ConfigError, match=r"vllm_tensor_parallel_size=2 .*; use vllm_tensor_parallel_size=1"):
        trainer_engine(SimpleNamespace(use_vllm=True, args=args, vllm_generation=Vllm(size=2)))


@pytest.mark.parametrize(("kind", "stage"), [("FSDP", None), ("DEEPSPEED", 3), ("MEGATRON_LM", None)])
def test_a_model_that_no_process_holds_is_refused(kind: str, stage: int | None) -> None:
    plugin = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=stage))
    accelerator = SimpleNamespace(distributed_type=SimpleNamespace(value=kind), state=plugin)
    trainer: Any = SimpleNamespace(accelerator=accelerator)
    with pytest.raises(ConfigError, match="vllm_mode='server'"):
        model_engine(trainer)


def test_a_thing_is_itself_or_made() -> None:
    renderer = SimpleNamespace(render_ids=len)
    assert resolve(renderer, "tokenizer", "render_ids") is renderer
    assert resolve(lambda tokenizer: [tokenizer], "tokenizer", "render_ids") == ["tokenizer"]
    assert resolve(None, "tokenizer", "render_ids") is None


async def test_a_rollout_is_seeded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM samples seeded requests one by one."""
    monkeypatch.setattr("gymgate.integrations.trl.engine.MAX_SEEDED_SESSIONS", 2)
    engine, asked = TRLServerEngine("http://127.0.0.1:9", "m", lambda: 4), []

    def server(prompt_ids: list[int], sampling: dict[str, Any]) -> Sample:
        asked.append(sampling.get("seed"))
        return Sample([5], [-0.5], "stop")

    engine.server = CallableEngine(server)  # type: ignore[assignment]
    for session in ("a", "b", "a", "b", "c", "a"):
        sample = await engine.generate([1], {"temperature": 1.0, "seed": 7}, session=session)
        assert sample.policy_version == (4, 4)
    seeds = [seed for seed in asked if seed is not None]
    assert [seed is not None for seed in asked] == [True, True, False, False, True, True]
    assert len(set(seeds)) == len(seeds)


class Models(BaseHTTPRequestHandler):
    """A vLLM server's list of models."""

    def do_GET(self) -> None:
        body = b'{"data": [{"id": "m", "max_model_len": 512}]}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


async def test_a_server_is_asked_for_its_model_also_in_an_event_loop() -> None:
    """As a notebook's cells are."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Models) as server:
        serving = Thread(target=server.serve_forever)
        serving.start()
        try:
            assert served_model(f"http://127.0.0.1:{server.server_port}/v1/") == ("m", 512)
        finally:
            server.shutdown()
            serving.join()


def test_a_server_that_does_not_answer_is_named() -> None:
    with pytest.raises(PolicyError, match=r"http://127\.0\.0\.1:9/v1/models"):
        served_model("http://127.0.0.1:9/v1/")


def test_a_rollout_ends_before_ranks_give_up_waiting_for_each_other() -> None:
    def check(ranks: int, timeout_s: float) -> None:
        args, accelerator = SimpleNamespace(ddp_timeout=1800), SimpleNamespace(num_processes=ranks)
        check_timeout(SimpleNamespace(args=args, accelerator=accelerator), timeout_s)

    check(1, 1800)
    for limits in ({}, {"max_calls": 5}, RolloutLimits(max_calls=5)):
        check(2, NeMoGymSpec("mcqa", limits=limits).settings.limits.timeout_s)
    with pytest.raises(ConfigError, match=r"timeout_s=1800.*ddp_timeout=1800"):
        check(2, 1800)
