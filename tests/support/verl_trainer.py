"""verl's own trainer with nothing in the model's place: verl has no engine for a CPU. Everything else in it is real."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transfer_queue as tq
from omegaconf import DictConfig
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import AgentLoopManagerTQ, PPOTrainerSync

from gymgate.core.config import RuntimeConfig
from gymgate.gym.runtime import ensure_runtime
from support.ray_cluster import ray_on_loopback
from support.verl_parts import LOGPROB, Scripted, example_rows

QUEUE = (
    "data.dataloader_num_workers=0",
    "data.shuffle=false",  # a prompt stays with its worker, where a plan counts its sessions
    "transfer_queue.enable=true",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    "trainer.v1.sampler.custom_sampler.path=pkg://gymgate.verl",
    "trainer.v1.sampler.custom_sampler.name=NeMoGymReplayBuffer",
    "trainer.logger=[file]",
    "trainer.val_before_train=false",
    "trainer.test_freq=1",
    "trainer.save_freq=-1",
)
"""Of a trainer's config: NeMo Gym's replay buffer, verl's log as a file, a validation after each step."""


@contextmanager
def running_queue(config: DictConfig) -> Iterator[None]:
    """Ray and verl's TransferQueue, on this machine's loopback."""
    variables = {"PYTHONPATH": str(Path(__file__).parents[1]), "TRANSFER_QUEUE_ENABLE": "1"}
    with ray_on_loopback(num_cpus=3, object_store_memory=200_000_000, runtime_env={"env_vars": variables}):
        tq.init(config.transfer_queue)
        yield
        tq.close()


def manager_of(config: DictConfig, environments: Sequence[str], plan: Sequence[str]) -> AgentLoopManagerTQ:
    """verl's manager of agent loops, over servers that follow a plan (see `Scripted`)."""
    site = ensure_runtime(RuntimeConfig()).site
    server = Scripted([row for name in environments for row in example_rows(site, name)], plan)
    return AgentLoopManagerTQ.create(
        config=config, llm_client=server, teacher_client=None, reward_loop_worker_handles=[]
    )


class Weights:
    """In the place of the actor's workers: every token has the logprob that the scripted servers sampled it with."""

    def __init__(self) -> None:
        self._dispatch_info = {"actor": [0]}
        self.trained: list[dict[str, list[Any]]] = []

    def compute_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["input_ids"])
        lengths = data["input_ids"].offsets().diff().tolist()
        filled = [torch.full((length,), LOGPROB) for length in lengths]
        made = torch.nested.as_nested_tensor(filled, layout=torch.jagged)
        fields = TensorDict({"log_probs": made, "entropy": made.clone()}, batch_size=[len(batch.keys)])
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
        return batch

    def update_actor(self, batch: KVBatchMeta) -> dict[str, Any]:
        """What would be learned from: by row, its key and tag, mask, advantage and reward."""
        fields = ["response_mask", "advantages", "rm_scores"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        rows = {name: [row.tolist() for row in data[name].unbind()] for name in fields}
        self.trained.append({**rows, "key": list(batch.keys), "tag": list(batch.tags)})
        return {"metrics": {"mfu": [0.0], "loss": [0.0]}}


class CPUTrainer(PPOTrainerSync):
    """Data loaders, replay buffer, advantages, validation, metrics, logger and the loop over steps are verl's."""

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        self.weights = Weights()

    def _setup(self) -> None:
        self._init_tokenizer()
        self._init_dataloader()
        self._init_dump_executor()
        self.actor_rollout_wg = self.weights
        self.global_steps = 0
        self.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
        self.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 1)
        self.checkpoint_manager = SimpleNamespace(
            update_weights=lambda *args: None, sleep_replicas=lambda *args: None
        )
