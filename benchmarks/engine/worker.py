"""The side of a weight update that runs in vLLM's worker process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


@dataclass
class FileInit(WeightTransferInitInfo):
    """Accepts nothing: a file needs no connection."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """Where the tensors are."""

    path: str


class FileWeightTransferEngine(WeightTransferEngine[FileInit, FileUpdate]):
    """Loads checkpoint-format weights from a file, as vLLM's NCCL engine loads those that it receives."""

    init_info_cls = FileInit
    update_info_cls = FileUpdate

    def init_transfer_engine(self, init_info: FileInit) -> None:
        """Do nothing."""

    def start_weight_update(self) -> None:
        """Prepare the model for checkpoint-format weights."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one file. Unlike the base class, without synchronizing an accelerator."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: FileUpdate) -> None:
        """Load one file."""
        self.model.load_weights(load_file(update_info.path).items())

    def finish_weight_update(self) -> None:
        """Put the loaded weights into the form that vLLM's kernels use.

        On a CPU, vLLM keeps a packed copy of the output layer, which it does not make again where that layer is the embedding.
        """
        finalize_layerwise_reload(self.model, self.model_config)
        head = self.model.lm_head
        head.quant_method.process_weights_after_loading(head)

    def shutdown(self) -> None:
        """Do nothing."""
