"""What lets an answer that was translated for an agent come back to its endpoint exactly as it was given.

An agent sends its history with every call. For each answer, the memory keeps the endpoint's own form of it (one
chat message, or a list of Responses items) under the fingerprints of the items or blocks the agent got. When a
run of those comes back, the endpoint gets its own form again, byte for byte, so that its prompt extends the
previous one. Fingerprints cover what the model wrote (text, reasoning, calls with ids) and nothing that an
agent's own validation may add, drop or reformat (item ids, statuses, nulls, white space in JSON arguments).
A run that was edited, or lost its reasoning, matches nothing and is translated from what was sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gymgate.config import Dialect
from gymgate.gateway.dialects._read import Json

Fingerprint = tuple[str, ...]
ReasoningStyle = tuple[str, ...]
"""Fields of a chat message that carry reasoning; `THINK_TAGS` stands for `<think>` in the content."""

BOTH_FIELDS: ReasoningStyle = ("reasoning_content", "reasoning")
THINK_TAGS: ReasoningStyle = ("<think>",)


class Mark(NamedTuple):
    """An item or block as the memory knows it."""

    fingerprint: Fingerprint
    id: str | None = None
    """Item id; where the agent kept it, it tells apart two answers that read the same."""


class Original(dict[str, object]):
    """A message or item as the endpoint gave it; translations pass it on untouched."""


class Run(NamedTuple):
    """One answer: what the agent got of it, and what the endpoint gave."""

    fingerprints: tuple[Fingerprint, ...]
    originals: tuple[Original, ...]


class ConversationMemory:
    """The answers of one rollout. Not thread-safe; a call costs time in proportion to the history it looks up."""

    def __init__(self) -> None:
        self._runs: dict[tuple[Dialect, Dialect], _Runs] = {}
        self._style: ReasoningStyle | None = None

    @property
    def reasoning_style(self) -> ReasoningStyle:
        """How this endpoint's chat messages carry reasoning; both known fields until it has shown one."""
        if self._style is None:
            self._style = BOTH_FIELDS  # from now on, so that the same history is always the same request
        return self._style

    def learn_reasoning_style(self, style: ReasoningStyle) -> None:
        """The first one seen, or assumed, stays."""
        if self._style is None:
            self._style = style

    def record(
        self, agent: Dialect, endpoint: Dialect, marks: Sequence[Mark], originals: Sequence[Json]
    ) -> None:
        """Remember that the agent got `marks` for what the endpoint gave as `originals`."""
        if marks:
            runs = self._runs.setdefault((agent, endpoint), _Runs())
            runs.add(marks, tuple(Original(original) for original in originals))

    def match(self, agent: Dialect, endpoint: Dialect, marks: Sequence[Mark], at: int) -> Run | None:
        """The longest recorded run that `marks` has at position `at`."""
        runs = self._runs.get((agent, endpoint))
        return None if runs is None else runs.match(marks, at)


class _Runs:
    """Runs by first fingerprint and length, so that a look-up costs a hash per length that occurs."""

    def __init__(self) -> None:
        self._by_start: dict[Fingerprint, dict[int, dict[tuple[Fingerprint, ...], Run]]] = {}
        self._by_id: dict[str, Run] = {}

    def add(self, marks: Sequence[Mark], originals: tuple[Original, ...]) -> None:
        run = Run(tuple(mark.fingerprint for mark in marks), originals)
        by_length = self._by_start.setdefault(run.fingerprints[0], {})
        by_length.setdefault(len(marks), {})[run.fingerprints] = run
        for mark in marks:
            if mark.id is not None:
                self._by_id[mark.id] = run

    def match(self, marks: Sequence[Mark], at: int) -> Run | None:
        by_length = self._by_start.get(marks[at].fingerprint, {})
        for length in sorted(by_length, reverse=True):
            here = tuple(mark.fingerprint for mark in marks[at : at + length])
            if (run := by_length[length].get(here)) is not None:
                named = self._by_id.get(marks[at].id or "")
                return named if named is not None and named.fingerprints == here else run
        return None
