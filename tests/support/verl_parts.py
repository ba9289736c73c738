"""What the tests with verl share: its config, a tiny model on disk, and generation servers that follow recorded rollouts.

Imported in Ray's workers too, so nothing here needs pytest.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_module
from omegaconf import DictConfig
from renderers.configs import Qwen3RendererConfig
from renderers.qwen3 import Qwen3Renderer
from transformers import Qwen3Config
from verl.workers.rollout.replica import TokenOutput

from support.conversations import tokenizer

BLEND = ("workplace_assistant", "math_with_judge", "mcqa")
SLOWER = {
    "math_with_judge": {
        "name": "math_with_judge",
        "overrides": [
            ["math_with_judge.resources_servers.math_with_judge.library_verifier_timeout_seconds", 100]
        ],
    }
}
"""It verifies in a process of its own for each answer, and what takes longer than 10 s scores 0; 64 at once do here."""
PROMPT_LENGTH, RESPONSE_LENGTH = 24_000, 8_000
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VERSION = 7
"""Of the weights that the scripted servers say they sample with."""
LOGPROB = -0.25


def save_model(folder: Path) -> str:
    """A tokenizer and the config of a two-layer Qwen3; verl's workers read both, and no weights."""
    made = tokenizer()
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(made), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    return str(folder)


def make_config(folder: Path, environments: Sequence[str], *overrides: str, **loop: Any) -> DictConfig:
    """verl's own trainer config with NeMo Gym's agent loop and dataset in it, as docs/training.md says."""
    model = folder / "model"
    if not model.exists():
        save_model(model)
    entry = {
        "name": "nemo_gym",
        "_target_": "gymgate.verl.NeMoGymAgentLoop",
        "environments": [SLOWER.get(name, name) for name in environments],
        "renderer": "qwen3",
        "limits": {"timeout_s": 200},
        "stack": {"state_dir": str(folder / "state")},
        **loop,
    }
    (folder / "agent.yaml").write_text(yaml.safe_dump([entry]))
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(
            "ppo_trainer",
            [
                f"actor_rollout_ref.model.path={model}",
                "actor_rollout_ref.rollout.name=vllm",
                "actor_rollout_ref.rollout.calculate_log_probs=true",
                f"actor_rollout_ref.rollout.agent.agent_loop_config_path={folder / 'agent.yaml'}",
                "actor_rollout_ref.rollout.agent.default_agent_loop=nemo_gym",
                "actor_rollout_ref.rollout.agent.num_workers=2",
                f"data.max_prompt_length={PROMPT_LENGTH}",
                f"data.max_response_length={RESPONSE_LENGTH}",
                "data.train_files={" + ",".join(f"{name}:example" for name in environments) + "}",
                "data.val_files=${data.train_files}",
                "data.custom_cls.path=pkg://gymgate.verl",
                "data.custom_cls.name=NeMoGymDataset",
                "algorithm.adv_estimator=grpo",
                "trainer.device=cpu",
                *overrides,
            ],
        )


class Scripted:
    """Stands in for verl's `LLMServerClient`: token ids in, token ids out, for rows whose answers are known.

    A row is known by the user's text in its prompt. What its sessions do, in the order they come, goes by `plan`: `right` gives
    the row's answer, `wrong` leaves a part of it out, `cut` ends at a length limit, `broken` fails as a dying server does.
    """

    def __init__(
        self,
        rows: Iterable[Mapping[str, Any]],
        plan: Sequence[str] = ("right",),
        *,
        together: int = 1,
        spelled: bool = False,
    ) -> None:
        """`together` holds the first calls of sessions until so many of them wait; `spelled` samples a token per letter."""
        self.spelled = spelled
        self.scripts = {user_text(row): script(row) for row in rows}
        self.plan = tuple(plan)
        self.together = together
        self.sessions: dict[str, dict[str, int]] = {}
        """Of each text: the answers that each of its sessions got."""
        self.waiting = 0
        self.enough: asyncio.Event | None = None
        self.asked: list[dict[str, Any]] = []

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> TokenOutput:
        self.asked.append(sampling_params)
        self.waiting += 1
        self.enough = self.enough or asyncio.Event()
        if self.waiting >= self.together:
            self.enough.set()
        await self.enough.wait()
        return self._answer(request_id, tokenizer().decode(prompt_ids))

    def _answer(self, request_id: str, shown: str) -> TokenOutput:
        text = max((text for text in self.scripts if text in shown), key=len)
        sessions = self.sessions.setdefault(text, {})
        number = sessions[request_id] = sessions.get(request_id, -1) + 1
        way = self.plan[[*sessions].index(request_id) % len(self.plan)]
        if way == "broken":
            raise RuntimeError("CUDA out of memory")
        turns = [turn for turn in self.scripts[text] if turn != self.scripts[text][0] or way != "wrong"]
        ids = spelled_out(turns[number]) if self.spelled else encoded(turns[number])
        ids, reason = (ids[:3], "length") if way == "cut" else (ids, "completed")
        steps = dict.fromkeys(("global_steps", "min_global_steps", "max_global_steps"), VERSION)
        return TokenOutput(
            token_ids=ids, log_probs=[LOGPROB] * len(ids), stop_reason=reason, extra_fields=steps
        )


def encoded(text: str) -> list[int]:
    """As one reads it."""
    ids: list[int] = tokenizer().encode(text, add_special_tokens=False)
    return ids


def spelled_out(text: str) -> list[int]:
    """As nobody would encode it: one token for each letter outside of marks."""
    parts = re.split(r"(<\|im_end\|>|</?tool_call>)", text)
    pieces = [piece for part in parts for piece in ([part] if part.startswith("<") else part)]
    return [token for piece in pieces for token in encoded(piece)]


class Forgetful(Qwen3Renderer):
    """Renders every turn anew, as a template does that no renderer can extend."""

    config_class = Qwen3RendererConfig

    def bridge_to_next_turn(self, *args: Any, **kwargs: Any) -> None:
        return None


def user_text(row: Mapping[str, Any]) -> str:
    """What the user says in a row."""
    source = row["responses_create_params"]["input"]
    return (
        source if isinstance(source, str) else next(i["content"] for i in source if i.get("role") == "user")
    )


def script(row: Mapping[str, Any]) -> list[str]:
    """The turns of a policy that gets a row right, as Qwen3 samples them: a call a turn, or an answer; then a closing word."""
    calls = [
        {"name": call["name"], "arguments": json.loads(call["arguments"])}
        for call in row.get("ground_truth", ())
    ]
    if "expected_call" in row:
        calls = [row["expected_call"]]
    if "expected_count" in row:
        steps = row["expected_count"] - row["initial_count"]
        calls = [{"name": "increment_counter", "arguments": {"count": steps}}]
    turns = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls] + ["Done."]
    if not calls:
        answer = row["expected_answer"].removeprefix("\\(").removesuffix("\\)")
        turns = [f"\\boxed{{{answer}}}", "I do not know."]
    return [f"{turn}<|im_end|>" for turn in turns]


def example_rows(site: Path, environment: str) -> list[dict[str, Any]]:
    """The rows that an installed nemo-gym ships with an environment."""
    path = site / "resources_servers" / environment / "data/example.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
