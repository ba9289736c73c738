"""verl's own trainer with nothing in the model's place: verl has no engine for a CPU. Everything else in it is real."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import transfer_queue as tq
from omegaconf import DictConfig
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import PPOTrainerSync

from support.verl_parts import LOGPROB


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
