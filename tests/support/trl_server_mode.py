"""TRL's server mode without a GPU.

TRL's client refuses every device but CUDA, so these two of its methods are replaced; everything else of TRL runs as it is.

| replaced in `trl.generation.vllm_client.VLLMClient` | by |
| --- | --- |
| `init_communicator`: joins vLLM's workers in an NCCL group | a POST to the same route without an address |
| `update_named_params`: announces the tensors, then broadcasts them over NCCL | the same announcement with the path of a file |
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from benchmarks.engine.weights import FileWeights


def weights_over_files(monkeypatch: pytest.MonkeyPatch, base_url: str) -> FileWeights:
    """Replace the two methods; returns the transfer, which counts the updates."""
    transfer = FileWeights(base_url)

    def init_communicator(client: Any, device: Any) -> None:
        assert client.get_server_info()["weight_transfer_config"]["backend"] == "file"
        transfer.init_weight_transfer()

    def update_named_params(client: Any, metadata: Any, named_params: Iterator[tuple[str, Any]]) -> None:
        client._start_weight_update()
        transfer.send_file(named_params)
        client._finish_weight_update()

    client = "trl.generation.vllm_client.VLLMClient"
    monkeypatch.setattr(f"{client}.init_communicator", init_communicator)
    monkeypatch.setattr(f"{client}.update_named_params", update_named_params)
    return transfer
