"""vLLM's routes that sample token ids, answered by a script that plays the counter environment's rows."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from typing import Any, Self

from aiohttp import web
from examples.trl.tiny_policy import make_tokenizer

from gymgate.tokens import TokenTurn
from support.upstream import Seen, upstream_in_thread

ENVIRONMENT = "example_session_state_mgmt"
CALLS = (
    '<tool_call>\n{"name": "increment_counter", "arguments": {"count": 1}}\n</tool_call>',
    '<tool_call>\n{"name": "increment_counter", "arguments": {"count": 2}}\n</tool_call>',
    '<tool_call>\n{"name": "get_counter_value", "arguments": {}}\n</tool_call>',
)
"""What the first row asks for, turn by turn."""
TOKENIZER = make_tokenizer()
REFUSED = 400


class TokenServer:
    """Answers `/v1/completions` and `/inference/v1/generate`.

    `begin` says what becomes of the rollout that begins with its Nth request, from 0. "calls": every tool call of the row,
    then an answer; "answer": an answer at once; "cut": one that ends at its length limit; "say TEXT"; "refuse": HTTP 400;
    "no logprobs".
    """

    def __init__(self) -> None:
        self.begin: Callable[[int], str] = lambda number: "calls"
        self.turns: list[TokenTurn] = []
        self.finished: list[str] = []
        """Sessions that SkyRL's client ended."""
        self.together: threading.Barrier | None = None
        """Where the first requests of rollouts wait for each other."""
        self._begun = itertools.count()
        self._lock = threading.Lock()
        self._serving = upstream_in_thread(self._script)
        self.url = ""

    async def _script(self, seen: Seen) -> web.Response:
        if seen.request.method == "GET":
            return web.json_response({"data": [{"id": "tiny", "max_model_len": 4096}]})
        if seen.path == "/finish_session":  # of SkyRL's router
            self.finished.append(seen.request.query["session_id"])
            return web.json_response({})
        body, session = seen.body, seen.headers.get("X-Session-ID", "")
        answer = await asyncio.to_thread(self.answer, body.get("token_ids") or body["prompt"], session)
        if answer is None:
            return web.json_response({"error": {"message": "no such model"}}, status=REFUSED)
        return web.json_response(answer)

    def plan(self, prompt: list[int], session: str) -> str:
        """What becomes of the rollout of a session that begins with this prompt."""
        return self.begin(next(self._begun))

    def answer(self, prompt: list[int], session: str = "") -> dict[str, Any] | None:
        """A completion of the prompt, with its logprobs as both routes have them; `None` to refuse."""
        done = prompt.count(TOKENIZER.convert_tokens_to_ids("<tool_response>"))
        plan = "calls"
        if not done:
            if self.together is not None:
                self.together.wait(timeout=60)
            plan = self.plan(prompt, session)
        if plan == "refuse":
            return None
        calls = plan in ("calls", "no logprobs") and done < len(CALLS)
        said = plan.removeprefix("say ") if plan.startswith("say ") else "the counter is at 6."
        ids = TOKENIZER.encode(CALLS[done] if calls else said, add_special_tokens=False)
        ids += [TOKENIZER.eos_token_id] * (plan != "cut")
        logprobs = [-0.001 * (position + 1) - done for position in range(len(ids))]
        with self._lock:
            self.turns.append(TokenTurn(prompt, ids, logprobs))
        choice = {
            "index": 0,
            "text": "",
            "token_ids": ids,
            "finish_reason": "length" if plan == "cut" else "stop",
        }
        if plan != "no logprobs":
            tokens = [f"token_id:{each}" for each in ids]
            content = [
                {"token": token, "logprob": value} for token, value in zip(tokens, logprobs, strict=True)
            ]
            choice["logprobs"] = {"tokens": tokens, "token_logprobs": logprobs, "content": content}
        return {"choices": [choice]}

    def __enter__(self) -> Self:
        self.url = self._serving.__enter__().url.removesuffix("/v1")
        return self

    def __exit__(self, *exc: object) -> None:
        self._serving.__exit__(None, None, None)
