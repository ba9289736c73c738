"""The replay policy as a backend: recorded turns, as the Responses objects a model server would return."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from gymgate.core.config import Dialect
from gymgate.core.retrying import Note, unnoted
from gymgate.gateway.backends.base import BackendAnswer
from gymgate.gateway.dialects import answers
from gymgate.gateway.replay.conversation import Item
from gymgate.gateway.replay.index import Match, ReplayIndex, load_index

_COUNTS = {"input_tokens", "output_tokens", "total_tokens"}


class ReplayBackend:
    """Answers a conversation with the policy's next turn in its recording.

    A conversation is identified by its content so far, so any number of rollouts, keyless ones included, share one
    backend. The answer's details say whether it matches the recording exactly or loosely (`ReplayIndex`). Raises
    `UnknownConversationError` for a conversation that no recording holds.
    """

    dialect: ClassVar[Dialect] = "responses"
    model: ClassVar[str] = "replay"

    def __init__(self, paths: Iterable[str | Path], index: int | None = None) -> None:
        """Make a backend over JSONL files, which its first call reads. `index` pins one recording (0-based, over all files)."""
        self._paths = tuple(str(path) for path in paths)
        self._pinned = index
        self._index: ReplayIndex | None = None

    def preload(self) -> ReplayIndex:
        """Read the files now; `DataError` for a malformed one, `ConfigError` for a pinned index they lack."""
        if self._index is None:
            self._index = load_index(self._paths, self._pinned)
        return self._index

    async def call(
        self,
        body: dict[str, Any],
        *,
        raw: bytes | None = None,
        session: str | None = None,
        note: Note = unnoted,
    ) -> BackendAnswer:
        index = self._index if self._index is not None else await asyncio.to_thread(self.preload)
        match = index.find(body)
        recording, turn = match.recording, match.turn
        details = {
            "recording": recording.name,
            "index": recording.index,
            "turn": turn,
            "turns": len(recording.steps),
            "match": match.kind,
        }
        return BackendAnswer(recorded_answer(match, body), details=details)


def recorded_answer(match: Match, body: Mapping[str, Any]) -> dict[str, Any]:
    """Make the answer for the matched turn.

    A recording keeps the id and the end of its last call and the usage of all calls together. So usage is given only
    for a rollout of one call, and the ids of earlier calls are derived from the last one's.
    """
    recording, turn = match.recording, match.turn
    usage = recording.response.get("usage") if len(recording.steps) == 1 else None
    response, last = recording.response, turn == len(recording.steps) - 1
    recorded_id = str(response.get("id") or "")
    answer = make_response(
        match.step.output,
        body,
        response_id=recorded_id
        if last and recorded_id
        else _derive_id("resp", f"{recorded_id or recording.name}/{turn}"),
        model=str(response.get("model") or "") or None,
        created_at=int(response.get("created_at") or 0),
        usage=usage if isinstance(usage, dict) and usage.keys() >= _COUNTS else None,
    )
    if last and (details := response.get("incomplete_details")):
        answer.update(status="incomplete", incomplete_details=details)
    return answer


def make_response(
    output: Sequence[Item],
    body: Mapping[str, Any],
    *,
    response_id: str,
    model: str | None = None,
    created_at: int = 0,
    usage: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Make the Responses object that a recorded turn is answered with."""
    items = [complete_item(item, f"{response_id}-{n}") for n, item in enumerate(output)]
    return {
        **answers.response_object(items, body),
        "id": response_id,
        "created_at": created_at,
        "model": model or body.get("model") or ReplayBackend.model,
        "usage": usage,
    }


def complete_item(item: Item, seed: str) -> dict[str, Any]:
    """Return an output item with the fields that clients require; short forms (text as content) are expanded."""
    kind = item.get("type") or "message"
    if kind == "message":
        content = item.get("content", [])  # an empty text is a part, too
        return {
            **item,
            "id": item.get("id") or _derive_id("msg", seed),
            "type": "message",
            "role": "assistant",
            "status": item.get("status") or "completed",
            "content": [
                _complete_part(part) for part in ([content] if isinstance(content, str) else content or ())
            ],
        }
    if kind == "function_call":
        return {
            **item,
            "id": item.get("id") or _derive_id("fc", seed),
            "call_id": item.get("call_id") or _derive_id("call", seed),
            "status": item.get("status") or "completed",
        }
    if kind == "reasoning":
        return {**item, "id": item.get("id") or _derive_id("rs", seed), "summary": item.get("summary") or []}
    return dict(item)


def _complete_part(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        part = {"type": "output_text", "text": part}
    return {"annotations": [], **part} if part.get("type") == "output_text" else dict(part)


def _derive_id(prefix: str, seed: str) -> str:
    return f"{prefix}_{hashlib.blake2b(seed.encode(), digest_size=16).hexdigest()}"
