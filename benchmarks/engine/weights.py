"""New weights for a vLLM server by way of a safetensors file, where vLLM's own engines need NCCL and so GPUs.

`register` runs in vLLM's processes (an entry point in `plugin/`); `FileWeights` is the trainer's side.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import orjson

BACKEND = "file"


def register() -> None:
    """Make `--weight-transfer-config '{"backend": "file"}'` known to vLLM."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    # vLLM loads plugins in each of its processes, in some of them twice.
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "benchmarks.engine.worker", "FileWeightTransferEngine"
        )


class FileWeights:
    """Sends weights to the server at `base_url`. Server and trainer share a file system.

    `mode` is what `/pause` does with running requests: `keep`, `wait` or `abort`.
    """

    def __init__(self, base_url: str, *, mode: str = "keep", timeout_s: float = 120.0) -> None:
        self.base_url = base_url.rstrip("/")
        self.mode = mode
        self.timeout_s = timeout_s
        self.updates = 0

    def init_weight_transfer(self) -> None:
        """Check that the server has the engine."""
        self.call("init_weight_transfer_engine", {"init_info": {}})

    def pause(self) -> None:
        """Hold the server: it makes no step after this."""
        self.call(f"pause?mode={self.mode}")

    def resume(self) -> None:
        """Let the server go on."""
        self.call("resume")

    def send_weights(self, iterator: Iterable[tuple[str, Any]]) -> None:
        """Send every `(name, tensor)` as one update."""
        self.call("start_weight_update")
        self.send_file(iterator)
        self.call("finish_weight_update")

    def send_file(self, iterator: Iterable[tuple[str, Any]]) -> None:
        """Send tensors within an update that somebody else starts and finishes."""
        from safetensors.torch import save_file

        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in iterator}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "weights.safetensors"
            save_file(tensors, path)
            self.call("update_weights", {"update_info": {"path": str(path)}})
        self.updates += 1

    def call(self, route: str, body: dict[str, Any] | None = None) -> Any:
        """POST to a route of the server. Raises `RuntimeError` unless it answers 200."""
        request = Request(
            f"{self.base_url}/{route}",
            data=orjson.dumps(body or {}),
            headers={"Content-Type": "application/json"},
            method="POST",
        )
        try:
            with urlopen(request, timeout=self.timeout_s) as answer:
                return orjson.loads(answer.read() or b"null")
        except HTTPError as error:
            text = error.read().decode(errors="replace")[:300]
            raise RuntimeError(f"{self.base_url}/{route} answered {error.code}: {text}") from error
