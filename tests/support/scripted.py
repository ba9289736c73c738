"""A scripted policy server for driving verifiers for real: chat, Responses, and vLLM's token endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from support.upstream import Seen, chat_answer, responses_answer, upstream

COUNTER_PLAN = [
    ("first one", "increment_counter", {"count": 1}),
    ("then two", "increment_counter", {"count": 2}),
    ("now look", "get_counter_value", {}),
]
"""What the first row of example_session_state_mgmt asks for; the fourth turn is text."""
FINAL = "The counter is at 6."
Turn = tuple[str, str, dict[str, Any]]


class ScriptedPolicy:
    """Plays `plan`, one tool call with reasoning per turn, then answers `FINAL`; counts what it was asked."""

    def __init__(self, plan: list[Turn] = COUNTER_PLAN) -> None:
        self.plan = plan
        self.calls: Counter[str] = Counter()
        self.keys: set[str] = set()
        """Authorization headers that calls came with."""
        self.fail: int | None = None
        """HTTP status to answer every call with."""
        self.fail_first: list[int] = []
        """HTTP statuses to answer the next calls with."""
        self.hang = False
        """Never answer."""
        self.tokenizer: Any = None
        self.base_url = ""

    def turn(self, results: int) -> Turn | None:
        """The turn after so many tool results."""
        return self.plan[results] if results < len(self.plan) else None

    async def chat(self, body: dict[str, Any]) -> web.Response:
        """Chat-completions."""
        if (refused := await self._counted("chat")) is not None:
            return refused
        turn = self.turn(sum(message["role"] == "tool" for message in body["messages"]))
        message: dict[str, Any] = {"role": "assistant", "content": FINAL, "reasoning_content": "done"}
        if turn is not None:
            function = {"name": turn[1], "arguments": json.dumps(turn[2])}
            call = {"id": f"call_{self.calls['chat']}", "type": "function", "function": function}
            message |= {"content": None, "reasoning_content": turn[0], "tool_calls": [call]}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if turn else "stop"}
        return web.json_response(chat_answer(model=body["model"], choices=[choice]))

    async def responses(self, body: dict[str, Any]) -> web.Response:
        """Responses."""
        if (refused := await self._counted("responses")) is not None:
            return refused
        turn = self.turn(sum(item.get("type") == "function_call_output" for item in body["input"]))
        number = self.calls["responses"]
        text = {"type": "output_text", "text": FINAL, "annotations": []}
        item: dict[str, Any] = {
            "id": f"msg_{number}",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [text],
        }
        if turn is not None:
            item = {
                "id": f"fc_{number}",
                "type": "function_call",
                "call_id": f"call_{number}",
                "name": turn[1],
                "arguments": json.dumps(turn[2]),
                "status": "completed",
            }
        thought = {"type": "summary_text", "text": turn[0] if turn else "done"}
        reasoning = {"id": f"rs_{number}", "type": "reasoning", "summary": [thought]}
        answer = responses_answer(id=f"resp_{number}", model=body["model"], output=[reasoning, item])
        return web.json_response(answer | {"tools": body.get("tools", [])})

    async def generate(self, body: dict[str, Any]) -> web.Response:
        """vLLM's `/inference/v1/generate`: token ids in, token ids and logprobs out."""
        if (refused := await self._counted("generate")) is not None:
            return refused
        prompt = self.tokenizer.decode(body["token_ids"])
        turn = self.turn(prompt.count("<tool_response>"))
        answer = FINAL
        if turn is not None:
            call = json.dumps({"name": turn[1], "arguments": turn[2]})
            answer = f"<tool_call>\n{call}\n</tool_call>"
        thought = turn[0] if turn else "done"
        ids = self.tokenizer.encode(
            f"<think>\n{thought}\n</think>\n\n{answer}<|im_end|>", add_special_tokens=False
        )
        logprobs = [{"token": f"token_id:{token}", "logprob": -0.5, "top_logprobs": []} for token in ids]
        choice = {
            "index": 0,
            "token_ids": ids,
            "logprobs": {"content": logprobs},
            "finish_reason": "stop",
        }
        return web.json_response({"request_id": "gen-1", "choices": [choice]})

    async def _counted(self, kind: str) -> web.Response | None:
        self.calls[kind] += 1
        if self.hang:
            await asyncio.Event().wait()
        status = self.fail_first.pop(0) if self.fail_first else self.fail
        if status is None:
            return None
        return web.json_response({"error": {"message": "no capacity today"}}, status=status)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[ScriptedPolicy]:
        """Serve on a loopback port; `base_url` ends in /v1."""
        routes = {
            "/v1/chat/completions": self.chat,
            "/v1/responses": self.responses,
            "/inference/v1/generate": self.generate,
        }

        async def script(seen: Seen) -> web.Response:
            if seen.path == "/v1/models":
                return web.json_response({"object": "list", "data": [{"id": "scripted", "object": "model"}]})
            self.keys.add(seen.request.headers.get("Authorization", ""))
            return await routes[seen.path](seen.body)

        async with upstream(script) as serving:
            self.base_url = serving.url
            yield self


MARK = "GYMGATE_TEST_MARK"
"""Environment variable, given to Gym's servers too (`env_vars`), by which a test finds what it started."""


def marked(value: str) -> list[int]:
    """Processes that carry the mark."""
    needle, found = f"{MARK}={value}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if needle in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


async def until_none_is_left(value: str, timeout_s: float = 8.0) -> None:
    """Wait until nothing carries the mark; `TimeoutError` if something stays."""
    async with asyncio.timeout(timeout_s):
        while marked(value):  # noqa: ASYNC110 - other processes set no event
            await asyncio.sleep(0.05)


def make_tokenizer(directory: Path) -> str:
    """Save a byte-level tokenizer with Qwen3's special tokens, for the renderer; its path."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: number for number, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    plain = [
        *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
        *("<think>", "</think>"),
    ]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in plain])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(directory)
