"""Two ranks on one machine that sample on one vLLM server."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch: run ./dev engine")
pytest.importorskip("trl", reason="needs trl: run ./dev engine")

from benchmarks.engine.weights import FileWeights
from test_trl_ranks import ranks_of
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.gym, pytest.mark.heavy, pytest.mark.timeout(1300)]


def test_no_rank_samples_while_weights_are_sent(tmp_path: Path, vllm_url: str, model_directory: Path) -> None:
    """Only the main process sends them, and only it knows when the server has them."""
    try:
        ranks = ranks_of(tmp_path, vllm_url, str(model_directory), timeout_s=1200)
    finally:
        model = AutoModelForCausalLM.from_pretrained(model_directory, dtype="float32")
        FileWeights(vllm_url).send_weights(model.named_parameters())
    assert [rank["early"] for rank in ranks] == [[], []]
    assert [rank["batches"] for rank in ranks] == [[3, 3], [3, 3]]
    for entry in ranks[0]["log"]:
        assert entry["sampling/sampling_logp_difference/max"] < 1e-3
        assert entry["nemo_gym/failed"] == 0
