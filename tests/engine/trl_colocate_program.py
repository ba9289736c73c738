"""GRPO with vLLM in the trainer's process, on a CPU; writes what happened to FOLDER/result.json.

    python trl_colocate_program.py FOLDER MODEL_DIRECTORY

TRL and vLLM run as they are, except for what `on_cpu` replaces, because TRL starts vLLM for a GPU.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import pytest  # noqa: E402
import trl.generation.vllm_generation as generation_module  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from gymgate.trl import NeMoGymSpec  # noqa: E402
from support.trl_rows import ENVIRONMENT, ONE_LETTER, arguments  # noqa: E402


def on_cpu(patch: pytest.MonkeyPatch) -> None:
    """Replace the type that vLLM computes in, and the loading of weights.

    | TRL | here |
    | --- | --- |
    | no `dtype`, so vLLM takes bfloat16 | float32, to compare logprobs |
    | `load_weights` into the running model | the same within vLLM's own reload, which packs weights for the CPU again |
    """
    start = generation_module.LLM
    sync_weights = generation_module.VLLMGeneration.sync_weights

    def start_in_float32(**wanted: Any) -> Any:
        return start(**{**wanted, "dtype": "float32", "enforce_eager": True})

    def reload_weights(generation: Any) -> None:
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        engine = generation.llm.llm_engine
        model = engine.model_executor.driver_worker.model_runner.model
        initialize_layerwise_reload(model)
        sync_weights(generation)
        finalize_layerwise_reload(model, engine.model_config)
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)

    patch.setattr(generation_module, "LLM", start_in_float32)
    patch.setattr(generation_module.VLLMGeneration, "sync_weights", reload_weights)


def record_sleep(trainer: GRPOTrainer) -> list[str]:
    """Let vLLM sleep between batches, as `vllm_enable_sleep_mode` does where it can; return the calls as they come.

    vLLM refuses the option on a CPU. There, `sleep` and `wake_up` only hold and release the scheduler.
    """
    llm, calls = trainer.vllm_generation.llm, []
    sleep, wake_up = llm.sleep, llm.wake_up

    def recorded_sleep(level: int) -> None:
        calls.append(f"sleep {level}")
        sleep(level=level)

    def recorded_wake_up(tags: list[str]) -> None:
        calls.append(f"wake {' '.join(tags)}")
        wake_up(tags=tags)

    llm.sleep, llm.wake_up = recorded_sleep, recorded_wake_up
    trainer.vllm_generation.enable_sleep_mode = True
    llm.sleep(level=2)
    trainer.vllm_generation._llm_weights_sleeping = True
    return calls


def main(folder: Path, model_directory: str) -> None:
    patch = pytest.MonkeyPatch()
    on_cpu(patch)
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    options = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        "max_steps": 2,
        "optim": "sgd",
        "learning_rate": 0.1,
        "temperature": 0.9,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.1,
        "vllm_max_model_length": 512,
    }
    with NeMoGymSpec(ENVIRONMENT, data=ONE_LETTER, limits={"timeout_s": 120}, score_truncated=True) as spec:
        trainer = GRPOTrainer(
            model=model,
            args=GRPOConfig(**arguments(folder, **options)),
            processing_class=tokenizer,
            train_dataset=spec.train_dataset,
            rollout_func=spec.rollout_func,
            reward_funcs=spec.reward_funcs,
        )
        calls = record_sleep(trainer)
        before = {name: value.detach().clone() for name, value in model.named_parameters()}
        trainer.train()
        result = {
            "log": [entry for entry in trainer.state.log_history if "reward" in entry],
            "changed": any(bool((value != before[name]).any()) for name, value in model.named_parameters()),
            "calls": calls,
        }
        report(folder, result)
        result["evaluations"] = [trainer.evaluate(spec.train_dataset.select([0])) for _ in range(2)]
        result["left"] = trainer.vllm_generation.llm.llm_engine.get_num_unfinished_requests()
        report(folder, result)


def report(folder: Path, result: dict[str, Any]) -> None:
    (folder / "result.json").write_text(json.dumps(result, default=float))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
