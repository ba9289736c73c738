"""A policy small enough to train on a CPU in a minute: a random Qwen3 of two layers over a tokenizer of single characters.

It speaks Qwen3's chat format, so the `renderers` package knows how to render and parse it.
"""

from __future__ import annotations

from renderers import create_renderer
from renderers.configs import Qwen3RendererConfig
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CHARACTERS = 'abcdefghijklmnopqrstuvwxyz \n.,:<>/{}"0123456789_'
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One id per character."""
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *MARKS, *CHARACTERS, "<unk>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token) for token in MARKS])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", unk_token="<unk>"
    )
    made.chat_template = CHAT_TEMPLATE
    return made


def make_model(tokenizer: PreTrainedTokenizerFast, **shape: int) -> Qwen3ForCausalLM:
    """About 100,000 random weights; `shape` sets fields of `Qwen3Config`."""
    small = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
    }
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            **{**small, **shape},
        )
    )


def make_renderer(tokenizer: PreTrainedTokenizerFast) -> object:
    """Qwen3's."""
    return create_renderer(tokenizer, Qwen3RendererConfig())
