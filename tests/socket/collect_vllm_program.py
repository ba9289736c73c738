"""A small OpenAI-compatible server in vLLM's place: it takes the same options, and binds as vLLM does.

VLLM_NOTES is a directory where each process leaves what it was called with. Asked for the model `broken`, it ends with
an error; asked for `slow`, it listens and answers 503.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="vllm", allow_abbrev=False)
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model_tag")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--data-parallel-size", type=int, default=1)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--max-model-len", type=int)
    return parser.parse_args()


wanted = arguments()


class Handler(BaseHTTPRequestHandler):
    """Lists the model; answers with its pid and the last message."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer({"data": [{"id": wanted.model_tag}], "pid": os.getpid()})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        message = {"role": "assistant", "content": f"{os.getpid()} {body['messages'][-1]['content']}"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
        answer = {"id": "c", "object": "chat.completion", "created": 0, "model": wanted.model_tag}
        self._answer({**answer, "choices": [choice], "usage": usage})

    def _answer(self, value: dict[str, Any]) -> None:
        content = json.dumps(value).encode()
        self.send_response(503 if wanted.model_tag == "slow" else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing."""


class Server(ThreadingHTTPServer):
    """Binds beside a socket that holds the port; as vLLM 0.31, with `SO_REUSEPORT` only where processes share it."""

    request_queue_size = 1024

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if wanted.data_parallel_size > 1:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self.socket.bind(self.server_address)


def main() -> None:
    notes = {"argv": sys.argv[1:], "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"), "pid": os.getpid()}
    (Path(os.environ["VLLM_NOTES"]) / f"{os.getpid()}.json").write_text(json.dumps(notes))
    if wanted.model_tag == "broken":
        raise SystemExit("ValueError: no such model: broken")
    Server((wanted.host, wanted.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
