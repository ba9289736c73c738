"""Coverage-guided fuzzing of what reads strangers' bytes: paths, bodies, requests and answers in every dialect.

    pip install atheris && python tests/security/fuzz_parsers.py -max_total_time=300

Not part of the suite (atheris has no release for every Python); test_security_fuzz.py covers the same with hypothesis.
A crash is any exception but the typed refusals, or more than a second for one input (`-timeout`).
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(include=["gymgate.gateway"]):
    from gymgate.core import codec
    from gymgate.core.errors import GymgateError
    from gymgate.gateway.dialects import (
        ConversationMemory,
        encode_stream,
        translate_answer,
        translate_request,
    )
    from gymgate.gateway.dialects.reading import fault_of
    from gymgate.gateway.dialects.usage import usage_of
    from gymgate.gateway.requests import parse_path, take_routing_entry

DIALECTS: tuple[Any, ...] = ("responses", "chat", "messages")
SEEDS: tuple[dict[str, Any], ...] = (
    {
        "model": "m",
        "input": "hi",
        "tools": [{"type": "function", "name": "f", "parameters": {}}],
        "stream": True,
    },
    {
        "input": [
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"role": "user", "content": []},
        ]
    },
    {
        "messages": [{"role": "tool", "tool_call_id": "c", "content": "x"}],
        "tool_choice": "auto",
        "max_tokens": 5,
    },
    {"system": "s", "messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]}]},
    {
        "choices": [{"message": {"content": None, "tool_calls": [{"id": "c", "function": {"name": "f"}}]}}],
        "usage": {},
    },
    {
        "output": [{"type": "message", "content": [{"type": "output_text", "text": "x"}]}],
        "status": "completed",
    },
    {"content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}], "stop_reason": "tool_use"},
)


def one_input(data: bytes) -> None:
    """The first byte chooses dialects, the rest is the body (and the path)."""
    if not data:
        return
    source, target = DIALECTS[data[0] % 3], DIALECTS[data[0] // 3 % 3]
    parse_path(data[1:].decode(errors="replace"))
    try:
        body = codec.loads(data[1:])
    except ValueError:
        return
    if not isinstance(body, dict):
        return
    body, _ = take_routing_entry(body)
    for read in (_request, _answer):
        try:
            read(body, source, target)
        except GymgateError:
            continue


def _request(body: dict[str, Any], source: Any, target: Any) -> None:
    codec.dumps(translate_request(body, source, target, ConversationMemory()))


def _answer(body: dict[str, Any], source: Any, target: Any) -> None:
    if source != "messages" and fault_of(body, source) is not None:
        return
    answer = translate_answer(body, {"messages": [], "input": []}, source, target, ConversationMemory())
    usage_of(answer, target)
    list(encode_stream(answer, target, {}))
    codec.dumps(answer)


def write_start(directory: Path) -> list[str]:
    """Arguments for a corpus of every seed in every pair of dialects, and a dictionary of the words in them."""
    words = {"null", "true", "1e999", "\\ud800", "[[[[", "{}", "[]", '""'}
    corpus = directory / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(SEEDS):
        text = json.dumps(seed)
        words.update(re.findall(r'"\w+"', text))
        for choice in range(9):
            (corpus / f"{number}-{choice}").write_bytes(bytes([choice]) + text.encode())
    escaped = (word.replace("\\", "\\\\").replace('"', '\\"') for word in sorted(words))
    (directory / "words").write_text("".join(f'"{word}"\n' for word in escaped))
    return [f"-dict={directory / 'words'}", str(corpus)]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        atheris.Setup([*sys.argv, "-timeout=1", "-max_len=4096", *write_start(Path(name))], one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
