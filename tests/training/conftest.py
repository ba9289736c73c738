"""For tests with real trainers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # `examples` as a package

from token_server_support import token_server


@pytest.fixture(scope="session")
def token_server_url() -> Iterator[str]:
    """The address of one token server (a tiny random model) for the whole session; see `examples/token_server`."""
    pytest.importorskip("torch", reason="the token server needs torch: see docs/training.md")
    with token_server() as url:
        yield url


@pytest.fixture(scope="session")
def tiny_tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The token server's tokenizer on disk, for clients that load theirs by name."""
    pytest.importorskip("transformers", reason="needs transformers: see docs/training.md")
    from examples.trl.tiny_policy import make_tokenizer

    path = tmp_path_factory.mktemp("tiny") / "tokenizer"
    make_tokenizer().save_pretrained(path)
    return path
