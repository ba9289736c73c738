"""One rank of a training on two: writes the rewards' log, what it rolled out, and the stack it used to FOLDER/RANK.json.

The second rank's policy fails, but for one rollout of its last batch.

With the address of a vLLM server and the directory of its model it trains that and samples there, and writes too which ranks
sampled while weights were sent.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import pytest  # noqa: E402
import torch  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from gymgate.core.errors import PolicyError  # noqa: E402
from gymgate.integrations.trl.engine import TRLServerEngine  # noqa: E402
from gymgate.tokens import Sample  # noqa: E402
from gymgate.tokens.engines import CallableEngine  # noqa: E402
from gymgate.trl import NeMoGymSpec  # noqa: E402
from support.trl_rows import ENVIRONMENT, ONE_LETTER, arguments, tiny  # noqa: E402

STEPS = 4
SAMPLES_BY_S = 5.0
"""A rank that does not wait for the weights samples within this time after the transfer began."""


def watch_transfers(folder: Path, url: str, early: list[str]) -> None:
    """Hold each transfer of weights until another rank samples, or for `SAMPLES_BY_S`; `early` gets those that did."""
    patch = pytest.MonkeyPatch()
    from trl.generation.vllm_client import VLLMClient

    from support.trl_server_mode import weights_over_files

    weights_over_files(patch, url)

    send, sample = VLLMClient.update_named_params, TRLServerEngine.generate
    sampling = folder / f"sampling-{os.environ['RANK']}"

    def held(client: Any, metadata: Any, named_params: Iterator[tuple[str, Any]]) -> None:
        for left in folder.glob("sampling-*"):
            left.unlink()  # of the step before, in which every rank sampled and was waited for
        until = time.monotonic() + SAMPLES_BY_S
        while time.monotonic() < until and not early:
            early.extend(path.name for path in folder.glob("sampling-*"))
            time.sleep(0.01)
        send(client, metadata, named_params)

    async def marked(engine: TRLServerEngine, *args: Any, **kwargs: Any) -> Any:
        sampling.touch()
        return await sample(engine, *args, **kwargs)

    patch.setattr(VLLMClient, "update_named_params", held)
    patch.setattr(TRLServerEngine, "generate", marked)


def failing_engine(tokenizer: Any, batches: list[int]) -> CallableEngine:
    """A policy that fails, and says letters that score 0 once in the last batch."""
    said: list[list[int]] = []

    def sample(prompt: list[int], sampling: dict[str, Any]) -> Sample:
        if len(batches) < STEPS or said:
            raise PolicyError("out of memory", retryable=False)
        said.append(tokenizer.encode("bbb<|im_end|>", add_special_tokens=False))
        return Sample(said[0], [-1.0] * len(said[0]), "stop")

    return CallableEngine(sample)


def main(folder: Path, url: str | None = None, model_directory: str | None = None) -> None:
    torch.set_num_threads(1)
    model, tokenizer, _ = tiny()
    if model_directory is not None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(model_directory, dtype="float32")
        tokenizer = AutoTokenizer.from_pretrained(model_directory)
    batches: list[int] = []
    servers: Any = None
    early: list[str] = []
    server: dict[str, Any] = {}
    if url is not None:
        watch_transfers(folder, url, early)
        server = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "learning_rate": 0.1}
    engine = failing_engine(tokenizer, batches) if url is None and os.environ["RANK"] == "1" else None
    renderer = None if url else "qwen3"
    with NeMoGymSpec(
        ENVIRONMENT, data=ONE_LETTER, engine=engine, renderer=renderer, score_truncated=True
    ) as spec:

        def rollout_func(prompts: list[Any], trainer: Any) -> dict[str, Any]:
            nonlocal servers
            batches.append(len(prompts))
            made = spec.rollout_func(prompts, trainer)
            assert spec._loop is not None
            (environment,) = spec._loop.call(spec._runner._stack.value.status())["environments"].values()
            servers = {name: server["pid"] for name, server in environment["servers"].items()}
            return made

        trainer = GRPOTrainer(
            model=model,
            args=GRPOConfig(
                **arguments(
                    folder,
                    per_device_train_batch_size=3,
                    num_generations=6,
                    max_completion_length=8,
                    max_steps=2 if url else STEPS,
                    optim="sgd",  # AdamW's state would take a gigabyte more on each rank
                    **server,
                )
            ),
            processing_class=tokenizer,
            train_dataset=spec.train_dataset,
            rollout_func=rollout_func,
            reward_funcs=spec.reward_funcs,
        )
        trainer.train()
        log = [entry for entry in trainer.state.log_history if "reward" in entry]
        told = {
            "batches": batches,
            "servers": servers,
            "log": log,
            "share": spec.settings.stack.share,
            "early": early,
        }
        (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
