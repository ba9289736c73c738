"""A learning curve: a real model learns a packaged NeMo Gym environment with TRL's GRPOTrainer, on a CPU.

    ./dev engine python -m benchmarks curve --out runs/curve                      # three seeds; 40 minutes on two idle cores
    ./dev engine python -m benchmarks curve --set chain_sum --seeds '' --out DIR  # only the score at the start

The model is SmolLM2-135M-Instruct with LoRA adapters. Held-out rows, which training never sees, are scored by `gymgate.collect`
before and after, with training's sampling. Every part is kept in --out: the same command continues where it was stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import gymgate
from benchmarks.curve_picture import draw
from benchmarks.curve_rows import SETS, RowSet, make_rows
from benchmarks.engine.model import real_model
from benchmarks.machine import describe, numbers, print_table
from gymgate.runs.counted.statistics import mean, standard_error

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # its import warns
TEMPERATURE = 1.0
CHECKPOINT_STEPS = 5
CONSTANTS = 10
"""Most frequent answers of the held-out rows, each tried as the answer to every row."""


def main() -> None:
    """Measure, train, measure again, for each seed; write results.json and curve.svg."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", choices=SETS, default="word_forms")
    parser.add_argument("--seeds", type=lambda text: numbers(text) if text else [], default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=4, help="a step")
    parser.add_argument("--completions", type=int, default=8, help="a prompt")
    parser.add_argument("--threads", type=int, help="of torch; fewer than the cores where other work runs")
    parser.add_argument("--train", type=int, default=320, help="rows")
    parser.add_argument("--held-out", type=int, default=160, help="rows")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    options = parser.parse_args()
    if options.threads:
        import torch

        torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    rows = SETS[options.set]
    train, held_out = make_rows(options.set, options.train, options.held_out, options.out)
    start = kept(options.out / "start.json", lambda: score_start(rows, held_out, options.out))
    seeds = [
        kept(
            options.out / f"seed-{seed}.json",
            lambda seed=seed: learn(rows, train, held_out, seed, options),
        )
        for seed in options.seeds
    ]
    machine = describe("torch", "transformers", "trl", "peft")
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    results = {"settings": settings, "machine": machine, "start": start, "seeds": seeds}
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    show(results)
    if seeds:
        (options.out / "curve.svg").write_text(draw(results))


def kept(path: Path, make: Any) -> dict[str, Any]:
    """Return what the file holds; make it first where it is missing."""
    if not path.exists():
        path.write_text(json.dumps(make()))
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def score_start(rows: RowSet, held_out: Path, out: Path) -> dict[str, Any]:
    """Score the model as it is, and constant answers."""
    model, tokenizer = load()
    before = score(rows, held_out, out / "before", *sampled_by(model, tokenizer, rows), seed=0)
    answers = Counter(json.loads(line)[rows.answer_field] for line in held_out.read_text().splitlines())
    constants = {
        answer: score(rows, held_out, None, constant_policy(answer))["mean"]
        for answer, _ in answers.most_common(CONSTANTS)
    }
    best = max(constants, key=lambda answer: constants[answer])
    return {"before": before, "best_constant": constants[best], "constant": best}


def learn(
    rows: RowSet, train: Path, held_out: Path, seed: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Train with one seed, then score the held-out rows."""
    from peft import LoraConfig  # type: ignore[import-not-found]  # only in .venv-train and .venv-engine
    from transformers import set_seed
    from trl import GRPOConfig, GRPOTrainer

    from gymgate.trl import NeMoGymSpec

    set_seed(seed)
    model, tokenizer = load()
    folder = options.out / f"trainer-{seed}"
    arguments = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=options.prompts * options.completions,
        num_generations=options.completions,
        max_completion_length=rows.max_tokens,
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant",
        max_steps=options.steps,
        temperature=TEMPERATURE,
        logging_steps=1,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_steps=CHECKPOINT_STEPS,
        save_total_limit=1,
        seed=seed,
    )
    with NeMoGymSpec(rows.environment, data=str(train), seed=seed, score_truncated=True) as spec:
        trainer = GRPOTrainer(
            model=model,
            args=arguments,
            processing_class=tokenizer,
            train_dataset=spec.train_dataset,
            rollout_func=spec.rollout_func,
            reward_funcs=spec.reward_funcs,
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
        trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))
    after = score(
        rows,
        held_out,
        options.out / f"after-{seed}",
        *sampled_by(trainer.model.merge_and_unload(), tokenizer, rows),
        seed=seed,
    )
    steps = [entry for entry in trainer.state.log_history if "reward" in entry]
    return {
        "seed": seed,
        "training_rewards": [step["reward"] for step in steps],
        "flat_groups": [step["frac_reward_zero_std"] for step in steps],
        "after": after,
        "training_s": sum(step["step_time"] for step in steps),
    }


def load() -> tuple[Any, Any]:
    """Return model and tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = real_model()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="float32")
    return model, AutoTokenizer.from_pretrained(directory)


def sampled_by(model: Any, tokenizer: Any, rows: RowSet) -> tuple[Any]:
    """Return a policy: each rollout is one call, so each call is a conversation of its own."""
    from gymgate.tokens import TokenPolicy
    from gymgate.tokens.conversation import make_renderer
    from gymgate.tokens.engines import HuggingFaceEngine

    policy = TokenPolicy(
        HuggingFaceEngine(model, pad_token_id=tokenizer.pad_token_id),
        make_renderer(tokenizer),
        sampling={"temperature": TEMPERATURE, "max_tokens": rows.max_tokens},
    )

    async def ask(request: dict[str, Any]) -> dict[str, Any]:
        return await policy.conversation()(request)

    return (ask,)


def constant_policy(answer: str) -> Any:
    """Return a policy that gives every row one answer."""

    async def ask(request: dict[str, Any]) -> dict[str, Any]:
        message = {"role": "assistant", "content": answer}
        return {
            "id": "chatcmpl-constant",
            "object": "chat.completion",
            "created": 0,
            "model": "constant",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        }

    return ask


def score(
    rows: RowSet, held_out: Path, output: Path | None, policy: Any, *, seed: int | None = None
) -> dict[str, Any]:
    """Return the mean reward of one rollout per row and its standard error. A rollout that failed is an error here."""
    if seed is not None:
        import torch

        torch.manual_seed(seed)
    started = time.monotonic()
    found = asyncio.run(collect(rows.environment, held_out, output, policy))
    rewards = [reward for reward in found if reward is not None]
    expected = len(held_out.read_text().splitlines())
    if len(rewards) != expected or len(found) != expected:
        raise RuntimeError(f"{len(rewards)} of {expected} held-out rows have a reward")
    return {
        "mean": mean(rewards),
        "standard_error": standard_error(rewards),
        "n": len(rewards),
        "seconds": time.monotonic() - started,
    }


async def collect(environment: str, rows: Path, output: Path | None, policy: Any) -> list[float | None]:
    """Return the reward of every rollout."""
    collected = gymgate.collect(environment, rows, policy=policy, output=output, concurrency=64)
    async with contextlib.aclosing(collected) as rollouts:
        return [rollout.reward async for rollout in rollouts]


def show(results: dict[str, Any]) -> None:
    """Print the table."""
    start, before = results["start"], results["start"]["before"]
    print(f"{results['settings']['set']}, {results['machine']}")
    print(
        f"start {value(before)}, best constant answer {start['best_constant']:.3f} ({start['constant']!r})\n"
    )
    print_table(
        [
            "seed",
            "before",
            "after",
            "improvement / its standard error",
            "steps",
            "groups with equal rewards",
            "training, min",
            "scoring, min",
        ],
        [
            [
                str(seed["seed"]),
                value(before),
                value(seed["after"]),
                "n/a" if (gain := errors(before, seed["after"])) is None else f"{gain:.1f}",
                str(len(seed["training_rewards"])),
                f"{mean(seed['flat_groups']):.2f}" if seed.get("flat_groups") else "-",
                f"{seed['training_s'] / 60:.0f}",
                f"{seed['after']['seconds'] / 60:.0f}",
            ]
            for seed in results["seeds"]
        ],
    )


def value(measured: dict[str, Any]) -> str:
    """Mean and standard error."""
    error = measured["standard_error"]
    return f"{measured['mean']:.3f} ± {'n/a' if error is None else f'{error:.3f}'}"


def errors(before: dict[str, Any], after: dict[str, Any]) -> float | None:
    """Return the improvement in standard errors of the difference of two independent means; `None` if equal rewards say nothing
    of one."""
    known = before["standard_error"], after["standard_error"]
    return None if None in known else (after["mean"] - before["mean"]) / math.hypot(*known)
