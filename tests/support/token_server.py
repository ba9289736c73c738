"""vLLM's routes that sample token ids, answered by a script that plays the counter environment's rows."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from examples.trl.tiny_policy import make_tokenizer

from gymgate.tokens import TokenTurn

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
    """Answers `/v1/completions`. `begin` says what becomes of the rollout that begins with its Nth request, from 0.

    "calls": every tool call of the row, then an answer; "answer": an answer at once; "refuse": HTTP 400; "no logprobs".
    """

    def __init__(self) -> None:
        self.begin: Callable[[int], str] = lambda number: "calls"
        self.turns: list[TokenTurn] = []
        self.together: threading.Barrier | None = None
        """Where the first requests of rollouts wait for each other."""
        self._begun = itertools.count()
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def answer(self, prompt: list[int]) -> dict[str, Any] | None:
        """A completion of the prompt, `None` to refuse."""
        done = prompt.count(TOKENIZER.convert_tokens_to_ids("<tool_response>"))
        plan = "calls"
        if not done:
            if self.together is not None:
                self.together.wait(timeout=60)
            plan = self.begin(next(self._begun))
        if plan == "refuse":
            return None
        text = CALLS[done] if plan != "answer" and done < len(CALLS) else "the counter is at 6."
        ids = [*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id]
        logprobs = [-0.001 * (position + 1) - done for position in range(len(ids))]
        with self._lock:
            self.turns.append(TokenTurn(prompt, ids, logprobs))
        tokens = [f"token_id:{each}" for each in ids]
        known = {} if plan == "no logprobs" else {"logprobs": {"tokens": tokens, "token_logprobs": logprobs}}
        choice = {"index": 0, "text": "", "token_ids": ids, "finish_reason": "stop", **known}
        return {"choices": [choice]}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(server: TokenServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(200, {"data": [{"id": "tiny", "max_model_len": 4096}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = server.answer(body["prompt"])
            self._send(REFUSED if answer is None else 200, answer or {"error": {"message": "no such model"}})

        def log_message(self, *_: Any) -> None:
            """Quiet."""

        def _send(self, status: int, value: Any) -> None:
            content = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    return Handler
