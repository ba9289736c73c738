"""SkyRL's own data loader, inference client, checks, advantages and evaluation around rollouts on real Gym servers.

A script samples the tokens behind SkyRL's client. Nothing is trained: SkyRL's workers need GPUs.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from examples.skyrl.train import Config, NeMoGymExp
from skyrl.backends.skyrl_train.inference_servers.engine_utils import get_sampling_params_for_backend
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
from skyrl.train.generators.utils import (
    concatenate_generator_outputs,
    merge_stepwise_output,
    prepare_generator_input,
)
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils.trainer_utils import build_dataloader, validate_generator_output

import gymgate
from gymgate.core.errors import ConfigError, PolicyError
from gymgate.skyrl import GeneratorSettings, NeMoGymDataset, NeMoGymGenerator
from gymgate.tokens import TokenTurn
from support.agents import environment_with_forgetful_agent
from support.token_server import ENVIRONMENT, TOKENIZER, TokenServer

pytestmark = [pytest.mark.gym, pytest.mark.timeout(300)]

SAMPLES = 4


class PlannedServer(TokenServer):
    """Each rollout of a row, whose prompt holds `row NAME`, follows the next of the row's plans."""

    def __init__(self, plans: dict[str, list[str]]) -> None:
        super().__init__()
        self.plans = {name: iter(each) for name, each in plans.items()}
        self.planned: dict[str, str] = {}
        self._planning = threading.Lock()

    def plan(self, prompt: list[int], session: str) -> str:
        with self._planning:
            if session not in self.planned:
                (name,) = re.findall(r"row (\w+)", TOKENIZER.decode(prompt))[:1]
                self.planned[session] = next(self.plans[name])
            return self.planned[session]


def counter_row(name: str) -> dict[str, Any]:
    """The counter environment's first row, which "calls" solves and "answer" does not."""
    row: dict[str, Any] = json.loads(json.dumps(next(iter(gymgate.open_rows(ENVIRONMENT, "example"))).data))
    row["responses_create_params"]["input"][-1]["content"] += f" row {name}"
    return row


def make_config(folder: Path, rows: list[dict[str, Any]], *overrides: str) -> Config:
    """SkyRL's own config, as the example makes it, with the rows for training and evaluation."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    TOKENIZER.save_pretrained(folder / "model")
    settings = {
        "data.train_data": f"[{path}]",
        "data.val_data": f"{{{ENVIRONMENT}: {path}}}",
        "data.dataloader.num_workers": "0",
        "trainer.policy.model.path": str(folder / "model"),
        "trainer.placement.colocate_all": "false",
        "trainer.train_batch_size": str(len(rows)),
        "trainer.policy_mini_batch_size": str(len(rows)),
        "trainer.print_example_interval": "0",
        "generator.inference_engine.enable_ray_prometheus_stats": "false",  # of a Ray cluster
        "generator.n_samples_per_prompt": str(SAMPLES),
        "generator.max_input_length": "4096",
        "generator.sampling_params.max_generate_length": "256",
        "nemo_gym.environments": f"[{ENVIRONMENT}]",
        "nemo_gym.limits.timeout_s": "120",
        "nemo_gym.renderer": "qwen3",
        **dict(override.split("=", 1) for override in overrides),
    }
    return Config.read([f"{name}={value}" for name, value in settings.items()])


@asynccontextmanager
async def experiment(
    cfg: Config, server: TokenServer
) -> AsyncIterator[tuple[NeMoGymGenerator, RayPPOTrainer]]:
    """The generator and the trainer of the example, with SkyRL's client of the server, and one data-parallel rank."""
    made = NeMoGymExp(cfg)
    client = RemoteInferenceClient(
        proxy_url=server.url, server_urls=[server.url], data_parallel_size=1, tokenizer=made.tokenizer
    )
    generator = made.get_generator(cfg, made.tokenizer, client)
    trainer = RayPPOTrainer(
        cfg=cfg,
        tracker=None,
        tokenizer=made.tokenizer,
        train_dataset=made.train_dataset,
        eval_dataset=made.eval_dataset,
        inference_engine_client=client,
        generator=generator,
    )
    trainer.dispatch = SimpleNamespace(get_lcm_dp_size=lambda: 1)
    try:
        yield generator, trainer
    finally:
        await generator.close()
        await client.teardown()


def batch_of(
    cfg: Config, dataset: NeMoGymDataset, samples: int = SAMPLES
) -> tuple[dict[str, Any], list[str]]:
    """What SkyRL's trainer gives its generator for all rows, in order."""
    prompts = [prompt for batch in build_dataloader(cfg, dataset, is_train=False) for prompt in batch]
    sampling = get_sampling_params_for_backend("vllm", cfg.generator.sampling_params)
    made: tuple[dict[str, Any], list[str]] = prepare_generator_input(
        prompts, samples, sampling, "x", "train", 1
    )
    return made


def advantages_of(trainer: RayPPOTrainer, output: dict[str, Any]) -> list[set[float]]:
    """The advantages that SkyRL gives the trained ids of each row; empty for a row without any."""
    uids = [id.instance_id for id in output["trajectory_ids"]]
    batch = trainer.convert_to_training_input(*trainer.postprocess_generator_output(output, uids))
    batch["values"] = None
    batch = trainer.compute_advantages_and_returns(batch)
    return [
        {round(value, 3) for value in row[mask.bool()].tolist()}
        for row, mask in zip(batch["advantages"], batch["loss_mask"], strict=True)
    ]


async def test_failed_and_truncated_rollouts_are_in_no_baseline(tmp_path: Path) -> None:
    """Groups: solved, not solved, failed and truncated; all failed; one solved, the others failed."""
    plans = {
        "a": ["calls", "answer", "refuse", "cut"],
        "b": ["refuse"] * SAMPLES,
        "c": ["calls", "refuse", "refuse", "refuse"],
    }
    cfg = make_config(tmp_path, [counter_row(name) for name in plans])
    with PlannedServer(plans) as server:
        async with experiment(cfg, server) as (_, trainer):
            batch, _ = batch_of(cfg, trainer.train_dataset)
            output = await trainer.generate(batch)  # which validates it
        validate_generator_output(len(batch["prompts"]), output, step_wise=True)
        assert [id.instance_id for id in output["trajectory_ids"]] == ["0", "0", "1", "2"]
        assert sorted(output["rewards"][:2]) == [0.0, 1.0]
        assert output["rewards"][2:] == [0.0, 1.0]
        assert output["stop_reasons"] == ["stop", "stop", "error", "stop"]
        assert [any(mask) for mask in output["loss_masks"]] == [True, True, False, False]
        assert trainer.all_metrics["nemo_gym/mean/failed"] == 8 / 12
        assert trainer.all_metrics["nemo_gym/mean/truncated"] == 1 / 12
        assert trainer.all_metrics["nemo_gym/mean/reward"] == pytest.approx(2 / 4)
        assert sorted(server.finished) == sorted(server.planned)
        check_ids(output, server.turns)
    solved = output["rewards"].index(1.0)
    advantages = advantages_of(trainer, output)
    assert advantages[solved] == {0.707}
    assert advantages[1 - solved] == {-0.707}
    assert advantages[2:] == [set(), set()]


def check_ids(output: dict[str, Any], turns: list[TokenTurn]) -> None:
    """Every id that is trained on, and its logprob, is one that the server sampled after exactly the ids before it."""
    sampled = {(tuple(turn.prompt_ids), tuple(turn.completion_ids)): turn for turn in turns}
    seen = 0
    for number, mask in enumerate(output["loss_masks"]):
        prompt, response = output["prompt_token_ids"][number], output["response_ids"][number]
        logprobs = output["rollout_logprobs"][number]
        start = 0
        for on, run in itertools.groupby(mask):
            end = start + len([*run])
            if on:
                turn = sampled[(*prompt, *response[:start]), tuple(response[start:end])]
                assert logprobs[start:end] == pytest.approx(turn.logprobs)
                seen += 1
            else:
                assert not any(logprobs[start:end]) or not any(mask)
            start = end
    assert seen > 1


async def test_segments_of_a_rollout_are_steps_with_one_advantage(tmp_path: Path) -> None:
    """An agent that starts over with a prompt of its own for its second call; one of its rollouts fails."""
    path = environment_with_forgetful_agent(tmp_path / "own")
    rows = [
        {
            "responses_create_params": {"input": [{"role": "user", "content": f"say it. row {name}"}]},
            "agent_ref": {"name": "agent"},
            "stamp": "counter",
        }
        for name in "ab"
    ]
    plans = {
        "a": ["answer", "answer", "say nothing", "refuse"],
        "b": ["answer", "answer", "say nothing", "say nothing"],
    }
    own = [f"nemo_gym.environments=[{path}]", f"nemo_gym.stack.component_roots=[{tmp_path / 'own'}]"]
    cfg = make_config(tmp_path, rows, *own, "data.val_data=[]")
    with PlannedServer(plans) as server:
        async with experiment(cfg, server) as (_, trainer):
            batch, _ = batch_of(cfg, trainer.train_dataset)
            output = await trainer.generate(batch)
        check_ids(output, server.turns)
    rewards = output["rewards"]
    assert output["is_last_step"] == [False, True] * 7
    assert sorted(rewards[:6:2]) == [0.0, 1.0, 1.0]
    assert sorted(rewards[6::2]) == [0.0, 0.0, 1.0, 1.0]
    assert rewards[::2] == rewards[1::2]
    merged = merge_stepwise_output({**output, "rollout_metrics": None})
    assert merged["response_ids"] == output["response_ids"]
    wanted = [{1.0: 0.577, 0.0: -1.155}[reward] for reward in rewards[:6]]
    wanted += [{1.0: 0.866, 0.0: -0.866}[reward] for reward in rewards[6:]]
    assert advantages_of(trainer, output) == [{value} for value in wanted]


async def test_an_evaluation_counts_truncated_rollouts_and_leaves_failed_ones_out(tmp_path: Path) -> None:
    plans = {"a": ["calls", "cut", "refuse"], "b": ["calls", "refuse", "refuse"]}
    rows = [counter_row(name) for name in plans]
    cfg = make_config(tmp_path, rows, "generator.eval_n_samples_per_prompt=3")
    with PlannedServer(plans) as server:
        async with experiment(cfg, server) as (_, trainer):
            metrics = await trainer.eval()
            assert server.planned
    assert metrics["eval/all/avg_score"] == pytest.approx(2 / 3)
    assert metrics["eval/all/pass_at_3"] == 1.0
    assert metrics["eval/all/nemo_gym/mean/failed"] == 0.5
    assert metrics[f"eval/{ENVIRONMENT}/avg_score"] == pytest.approx(2 / 3)


async def test_an_evaluation_in_which_every_rollout_fails_has_no_score(tmp_path: Path) -> None:
    cfg = make_config(tmp_path, [counter_row("a")])
    with PlannedServer({"a": ["refuse"]}) as server:
        async with experiment(cfg, server) as (_, trainer):
            metrics = await trainer.eval()
    assert math.isnan(metrics["eval/all/avg_score"])
    assert metrics["eval/all/nemo_gym/mean/failed"] == 1.0


async def test_groups_of_the_asynchronous_trainer_are_put_together(tmp_path: Path) -> None:
    """Its generator gets one group at a time, and outputs of several groups become one batch."""
    plans = {"a": ["calls", "calls", "answer", "refuse"], "b": ["refuse"] * SAMPLES}
    cfg = make_config(tmp_path, [counter_row(name) for name in plans])
    with PlannedServer(plans) as server:
        async with experiment(cfg, server) as (generator, trainer):
            batch, _ = batch_of(cfg, trainer.train_dataset)
            halves = [slice(0, SAMPLES), slice(SAMPLES, None)]
            outputs = [
                await generator.generate(
                    {key: value[half] if isinstance(value, list) else value for key, value in batch.items()}
                )
                for half in halves
            ]
    whole = concatenate_generator_outputs(outputs, step_wise=True)
    assert len(whole["response_ids"]) == 4
    assert whole["rollout_metrics"]["nemo_gym/mean/failed"] == pytest.approx((0.25 + 1) / 2)


async def test_a_training_in_which_every_rollout_fails_ends(tmp_path: Path) -> None:
    names = "abcdefgh"
    cfg = make_config(tmp_path, [counter_row(name) for name in names], "generator.n_samples_per_prompt=1")
    with PlannedServer({name: ["refuse"] * 3 for name in names}) as server:
        async with experiment(cfg, server) as (generator, trainer):
            batch, _ = batch_of(cfg, trainer.train_dataset, samples=1)
            for _ in range(2):
                output = await generator.generate(batch)
                assert not any(map(any, output["loss_masks"]))
            with pytest.raises(PolicyError, match="24 rollouts"):
                await generator.generate(batch)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("generator.step_wise_trajectories=false", "step_wise_trajectories"),
        ("trainer.algorithm.dynamic_sampling.type=filter", "filter"),
        ("generator.inference_engine.enable_return_routed_experts=true", "enable_return_routed_experts"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path: Path, override: str, named: str) -> None:
    cfg = make_config(tmp_path, [counter_row("a")], override)
    client = RemoteInferenceClient(
        proxy_url="http://127.0.0.1:9", server_urls=["http://127.0.0.1:9"], data_parallel_size=1
    )
    with pytest.raises(ConfigError, match=named):
        NeMoGymGenerator(cfg, TOKENIZER, client, GeneratorSettings.model_validate(cfg.nemo_gym))


def test_the_example_wants_enough_rows(tmp_path: Path) -> None:
    cfg = make_config(tmp_path, [counter_row("a")], "trainer.train_batch_size=2")
    with pytest.raises(SystemExit, match="1 rows"):
        NeMoGymExp(cfg)


def test_rows_reach_spawned_workers_of_the_data_loader(tmp_path: Path) -> None:
    cfg = make_config(tmp_path, [counter_row(name) for name in "ab"], "data.dataloader.num_workers=1")
    batches = list(build_dataloader(cfg, NeMoGymDataset(cfg.data.train_data), is_train=True))
    assert sorted(item["uid"] for batch in batches for item in batch) == ["0", "1"]
