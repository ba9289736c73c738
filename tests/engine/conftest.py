"""One vLLM server with a real model for all tests here."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [
    str(ROOT),
    str(ROOT / "tests/training"),
]  # `benchmarks`, `examples`; tests that also run with an engine


def pytest_configure(config: pytest.Config) -> None:
    """Show warnings instead of failing: vLLM and what it imports give deprecation warnings at import."""
    config.addinivalue_line("filterwarnings", "default")


@pytest.fixture(scope="session")
def vllm_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server's base URL, without `/v1`. It uses every core, so it refuses to run beside parallel workers.

    GYMGATE_VLLM_URL names one that runs already (`./dev engine python -m benchmarks.engine.server`).
    """
    pytest.importorskip("vllm", reason="needs vLLM: run ./dev engine")
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.fail("tests/engine shares one vLLM server: run it without -n")
    if url := os.environ.get("GYMGATE_VLLM_URL"):
        yield url
        return
    from benchmarks.engine.server import vllm_server

    with vllm_server(tmp_path_factory.mktemp("vllm") / "vllm.log") as url:
        yield url


@pytest.fixture(scope="session")
def model_directory() -> Path:
    """The served model's directory."""
    pytest.importorskip("gguf", reason="needs gguf: run ./dev engine")
    from benchmarks.engine.model import real_model

    return real_model()


@pytest.fixture(scope="session")
def tokenizer(model_directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_directory)


@pytest.fixture(scope="session")
def renderer(tokenizer: Any) -> Any:
    """The `renderers` package's default: it has none of its own for this model."""
    from gymgate.tokens.conversation import make_renderer

    return make_renderer(tokenizer)


@pytest.fixture
def model(model_directory: Path) -> Any:
    """A copy of the served model in this process, in float32 as it is served."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_directory, dtype="float32").eval()
