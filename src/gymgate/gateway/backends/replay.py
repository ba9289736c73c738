"""The replay policy as a backend: answers from recorded rollouts or from a script."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from gymgate.config import Dialect
from gymgate.errors import UnknownConversationError
from gymgate.gateway.backends.base import BackendAnswer
from gymgate.gateway.replay.answer import recorded_answer, response_object
from gymgate.gateway.replay.conversation import Item, is_policy_item, items_of
from gymgate.gateway.replay.index import ReplayIndex, load_index
from gymgate.gateway.replay.recording import Recording, pair_rows, recorded_rollouts

__all__ = ["Recording", "ReplayBackend", "ScriptBackend", "pair_rows", "recorded_rollouts"]

ScriptTurn = str | Item | Sequence[Item]
"""What a scripted turn says: a text, one output item or several."""
Script = Sequence[ScriptTurn] | Callable[[list[Item]], ScriptTurn]


class ReplayBackend:
    """Answers a conversation with what the policy said next when it was recorded.

    A conversation is known by what was said so far, so any number of rollouts, keyless ones included, share one
    backend. Where only tools answered otherwise than recorded, the recorded turn is given and the answer's
    details say `tool_output_differs`. One that is not known is an `UnknownConversationError`.
    """

    dialect: ClassVar[Dialect] = "responses"
    model: ClassVar[str] = "replay"

    def __init__(
        self, paths: Iterable[str | Path], *, index: int | None = None, strict: bool = False
    ) -> None:
        self._paths = tuple(str(path) for path in paths)
        self._pinned = index
        self._strict = strict
        self._index: ReplayIndex | None = None

    @classmethod
    def load(
        cls, paths: Iterable[str | Path], index: int | None = None, *, strict: bool = False
    ) -> ReplayBackend:
        """A backend over JSONL files, read by its first call.

        `index` pins one recording (0-based, over all files); `strict` refuses a conversation in which a tool
        answered otherwise than recorded.
        """
        return cls(paths, index=index, strict=strict)

    @staticmethod
    def script(turns: Script) -> ScriptBackend:
        """A policy for tests: the n-th turn of a list, or what a function of the conversation returns.

        In a list, n is the number of turns that the conversation already holds, those in its input included.
        """
        return ScriptBackend(turns)

    def preload(self) -> ReplayIndex:
        """Read the files now; `DataError` for a malformed one, `ConfigError` for a pinned index they lack."""
        if self._index is None:
            self._index = load_index(self._paths, self._pinned)
        return self._index

    async def call(self, body: dict[str, Any], *, raw: bytes | None = None) -> BackendAnswer:
        index = self._index if self._index is not None else await asyncio.to_thread(self.preload)
        match = index.find(body, strict=self._strict)
        details = {"recording": match.recording.name, "index": match.recording.index, "turn": match.turn}
        for note in ("tool_output_differs", "observation_missing"):
            if getattr(match, note):
                details[note] = True
        return BackendAnswer(recorded_answer(match, body), details=details)

    async def close(self) -> None:
        """Nothing is held open."""


class ScriptBackend:
    """Says what a script says; see `ReplayBackend.script`."""

    dialect: ClassVar[Dialect] = "responses"
    model: ClassVar[str] = "replay"

    def __init__(self, turns: Script) -> None:
        self._turns = turns
        self._calls = itertools.count()

    async def call(self, body: dict[str, Any], *, raw: bytes | None = None) -> BackendAnswer:
        conversation = items_of(body)
        turn, number = _turns_taken(conversation), next(self._calls)
        said = self._say(conversation, turn)
        items: Sequence[Item] = (
            [{"role": "assistant", "content": said}]
            if isinstance(said, str)
            else [said]
            if isinstance(said, Mapping)
            else said
        )
        answer = response_object(items, body, response_id=f"resp_script_{number}")
        return BackendAnswer(answer, details={"turn": turn})

    def _say(self, conversation: list[Item], turn: int) -> ScriptTurn:
        if callable(self._turns):
            return self._turns(conversation)
        if turn >= len(self._turns):
            raise UnknownConversationError(
                f"scripted policy: asked for turn {turn + 1}, the script has {len(self._turns)}",
                endpoint="script",
                status_code=422,
                retryable=False,
            )
        return self._turns[turn]

    async def close(self) -> None:
        """Nothing is held open."""


def _turns_taken(conversation: list[Item]) -> int:
    """Runs of the policy's own items: the turns it has taken, if the environment spoke after each."""
    runs = itertools.groupby(conversation, key=is_policy_item)
    return sum(1 for own, _ in runs if own)
