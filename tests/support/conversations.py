"""Conversations with tools and reasoning, played between a scripted policy of ids and an agent; nothing is downloaded."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from renderers import create_renderer
from renderers.configs import (
    GLM45RendererConfig,
    Nemotron3RendererConfig,
    Qwen3RendererConfig,
    Qwen35RendererConfig,
)
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from gymgate.tokens import TokenConversation, TokenPolicy
from gymgate.tokens.engines import CallableEngine, Sample
from gymgate.tokens.messages import renderable

CONFIGS = {
    "qwen3": Qwen3RendererConfig,
    "qwen3.5": Qwen35RendererConfig,
    "nemotron3": Nemotron3RendererConfig,
    "glm4.5": GLM45RendererConfig,
}
SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
]
MARKS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} a record",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}},
            },
        },
    }
    for name in ("search", "update")
]


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, as real models have: many ways to write one text in ids, of which encoding gives one."""
    corpus = [
        json.dumps(TOOLS),
        *("the tool found no such record in the calendar, so I will search again" for _ in range(4)),
        "\n\n assistant user system tool_call arguments name query limit",
    ]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(corpus, trainer)
    made.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )


@cache
def renderer(name: str, retention: str | None = None) -> Any:
    """The real renderer of a model family over `tokenizer`."""
    return create_renderer(tokenizer(), CONFIGS[name](thinking_retention=retention))


@dataclass(frozen=True)
class Turn:
    """What the policy says, and in which pieces it happens to sample the text; then what the agent answers."""

    reasoning: str
    content: str
    calls: tuple[tuple[str, str, int], ...]
    """Name, query and limit of each tool call."""
    pieces: tuple[int, ...]
    """Lengths, cycled through, of the stretches of text that are each encoded by themselves."""
    reply: str
    """Every tool's result; or the user's next message."""
    cut: bool = False
    """The answer ends at its length limit, before the turn is closed."""


@dataclass(frozen=True)
class Story:
    """A conversation."""

    renderer: str
    retention: str | None
    system: str | None
    user: str
    turns: tuple[Turn, ...]


def sampled_ids(story: Story, turn: Turn) -> list[int]:
    """Ids that a policy of this family could sample to say `turn`: its own format, in pieces that encoding would not choose."""
    chosen = renderer(story.renderer, story.retention)
    start = [{"role": "user", "content": "x"}]
    said: dict[str, Any] = {"role": "assistant", "content": turn.content, "reasoning_content": turn.reasoning}
    if turn.calls:
        said["tool_calls"] = [
            {"type": "function", "function": {"name": name, "arguments": {"query": query, "limit": limit}}}
            for name, query, limit in turn.calls
        ]
    shown = chosen.render_ids(start, tools=TOOLS, add_generation_prompt=True)
    whole = chosen.render_ids([*start, said], tools=TOOLS)
    common = sum(
        1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(shown, whole, strict=False))
    )
    stops = set(chosen.get_stop_token_ids())
    ids = list(itertools.takewhile(lambda token: token not in stops, whole[common:]))
    pieced = _in_pieces(ids, turn.pieces)
    if turn.cut:
        return pieced[: max(1, len(pieced) * 2 // 3)]
    return [*pieced, _closing(whole[common:], stops, called=bool(turn.calls))]


def _closing(rendered: Sequence[int], stops: set[int], *, called: bool) -> int:
    """The stop token that the template closes a turn with; GLM's opens the next one."""
    opener = tokenizer().convert_tokens_to_ids("<|observation|>" if called else "<|user|>")
    return next((token for token in rendered if token in stops), opener)


def _in_pieces(ids: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """The same text in other ids; marks and special tokens stay whole."""
    coder, out = tokenizer(), []
    fixed = {coder.convert_tokens_to_ids(token) for token in (*SPECIAL, *MARKS)}
    widths = itertools.cycle(lengths)
    for is_fixed, run in itertools.groupby(ids, key=fixed.__contains__):
        stretch = list(run)
        text = coder.decode(stretch)
        if is_fixed or "\ufffd" in text:
            out += stretch
            continue
        while text:
            width = next(widths)
            out += coder.encode(text[:width], add_special_tokens=False)
            text = text[width:]
    return out


@dataclass(frozen=True)
class Played:
    """A story, played."""

    conversation: TokenConversation
    requests: list[list[dict[str, Any]]]
    """The messages of each call."""
    answers: list[dict[str, Any]]
    sampled: list[list[int]]


async def play(story: Story) -> Played:
    """An agent that runs every tool it is asked to and otherwise has its user say something."""
    sampled = [sampled_ids(story, turn) for turn in story.turns]
    engine = CallableEngine(_Script(sampled, [turn.cut for turn in story.turns]))
    policy = TokenPolicy(engine, renderer(story.renderer, story.retention), sampling={"temperature": 1.0})
    played = Played(policy.conversation(), [], [], sampled)
    messages = [{"role": "system", "content": story.system}] if story.system else []
    messages.append({"role": "user", "content": story.user})
    for turn in story.turns:
        played.requests.append(list(messages))
        answer = await played.conversation({"messages": messages, "tools": TOOLS})
        played.answers.append(answer)
        said = answer["choices"][0]["message"]
        messages.append(said)
        calls = said.get("tool_calls") or []
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": turn.reply} for call in calls]
        if not calls:
            messages.append({"role": "user", "content": turn.reply})
    return played


def plain_prompts(story: Story, played: Played) -> list[list[int]]:
    """What a client that keeps text and renders the history anew for every call would have shown."""
    chosen = renderer(story.renderer, story.retention)
    return [
        list(chosen.render_ids(renderable(messages), tools=TOOLS, add_generation_prompt=True))
        for messages in played.requests
    ]


def drifted(prompts: Sequence[Sequence[int]], sampled: Sequence[Sequence[int]]) -> int:
    """How many prompts, after the first, do not begin with the previous one's ids and what was sampled after them."""
    seen = [[*prompt, *ids] for prompt, ids in zip(prompts, sampled, strict=True)]
    return sum(list(after[: len(ids)]) != ids for ids, after in zip(seen, prompts[1:], strict=False))


class _Script:
    """A policy function that says its lines."""

    def __init__(self, lines: Sequence[list[int]], cut: Sequence[bool]) -> None:
        self.lines = iter(zip(lines, cut, strict=True))

    def __call__(self, prompt_ids: list[int], sampling: dict[str, Any]) -> Sample:
        ids, cut = next(self.lines)
        logprobs = [-0.001 * (position + 1) for position in range(len(ids))]
        return Sample(list(ids), logprobs, "length" if cut else "stop", (1, 1))
