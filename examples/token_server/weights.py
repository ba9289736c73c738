"""A trainer's side of the token server's weight updates."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import requests
from safetensors.torch import save_file


class FileWeightTransfer:
    """TRL's `WeightTransferProtocol` (for `AsyncGRPOTrainer(weight_transfer=...)`) over a safetensors file.

    Server and trainer share a file system. `mode` is what `/pause` does with running requests: `keep`, `wait` or `abort`.
    """

    def __init__(self, base_url: str, *, mode: str = "keep", timeout_s: float = 60.0) -> None:
        self.base_url = base_url.rstrip("/")
        self.mode = mode
        self.timeout_s = timeout_s
        self.updates = 0

    def init_weight_transfer(self) -> None:
        """Nothing to set up beyond a server that answers."""
        self._call("init_weight_transfer_engine", {"init_info": {}})

    def pause(self) -> None:
        """No step is made after this."""
        self._call(f"pause?mode={self.mode}")

    def send_weights(self, iterator: Iterable[tuple[str, Any]]) -> None:
        """Every `(name, tensor)`, as one new version."""
        state = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in iterator}
        self._call("start_weight_update")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "weights.safetensors"
            save_file(state, path)
            self._call("update_weights", {"update_info": {"path": str(path)}})
        self._call("finish_weight_update")
        self.updates += 1

    def resume(self) -> None:
        """Sampling goes on."""
        self._call("resume")

    def destroy(self) -> None:
        """Nothing is held."""

    def _call(self, route: str, body: dict[str, Any] | None = None) -> None:
        answer = requests.post(f"{self.base_url}/{route}", json=body or {}, timeout=self.timeout_s)
        if answer.status_code != 200:
            raise RuntimeError(f"{self.base_url}/{route} answered {answer.status_code}: {answer.text[:300]}")
