"""Finds the recorded turn that answers a conversation, by a hash of the conversation so far: exactly or loosely."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from gymgate.core.errors import UnknownConversationError
from gymgate.gateway.replay.conversation import (
    Block,
    blocks_of,
    call_ids,
    exact_key,
    items_of,
    opening_keys,
    policy_key,
    prefix_keys,
    says_all_of,
)
from gymgate.gateway.replay.recording import Recording, Turn, recorded_rollout, recorded_rollouts

KEPT_INDEXES = 32
"""Number of indexes kept in memory for later rollouts, those used last."""


@dataclass(frozen=True, slots=True)
class Match:
    """The turn that answers a conversation."""

    recording: Recording
    turn: int
    """0-based."""
    kind: Literal["exact", "loose"] = "exact"
    """How the conversation compares with the recorded one: see `ReplayIndex`."""

    @property
    def step(self) -> Turn:
        return self.recording.steps[self.turn]


class ReplayIndex:
    """The turns of some recordings, found by conversation. Safe to use from several threads.

    An exact match is a conversation in which every role said what was recorded. In a loose one, the policy did, the
    conversation opens with the recorded first prompt, and system and user say everything that they say in the
    recording, in this order. Tools may have returned anything, and the environment may have said more: some
    agents leave out of their record what it says.
    """

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self.recordings = recordings
        self._exact: dict[bytes, list[Match]] = defaultdict(list)
        self._loose: dict[bytes, list[tuple[bytes, Match]]] = defaultdict(list)
        """By what the policy said so far, each turn with the key of its recording's first prompt."""
        self._begun: dict[bytes, Recording] = {}
        """The first recording with each beginning, by the beginning's key (`prefix_keys`)."""
        self._rotation: dict[bytes, Iterator[int]] = {}
        for recording in recordings:
            self._enter(recording)

    def find(self, body: Mapping[str, Any]) -> Match:
        """Return the turn that answers a Responses request; `UnknownConversationError` if there is none.

        Several recordings that agree so far are used in rotation, unless the request's call ids tell them apart.
        """
        items = items_of(body)
        blocks = blocks_of(items)
        # A turn that only reasons leaves no trace in the blocks: its prompt would match again, for ever.
        if not items or items[-1].get("type") != "reasoning":
            key = exact_key(blocks)
            if matches := self._exact.get(key) or self._find_loosely(blocks):
                return self._take(key, matches, call_ids(items))
        raise self._unknown(blocks)

    def _enter(self, recording: Recording) -> None:
        if not recording.steps:
            return
        for key in prefix_keys(_transcript(recording)):
            self._begun.setdefault(key, recording)
        opening = exact_key(blocks_of(recording.steps[0].prompt))
        for position, step in enumerate(recording.steps):
            blocks = blocks_of(step.prompt)
            self._exact[exact_key(blocks)].append(Match(recording, position))
            self._loose[policy_key(blocks)].append((opening, Match(recording, position, "loose")))

    def _find_loosely(self, blocks: list[Block]) -> list[Match]:
        same_policy = self._loose.get(policy_key(blocks), ())
        openings = opening_keys(blocks) if same_policy else ()
        # The keys go first: at the first turn, every recording is a candidate.
        matches = [match for opening, match in same_policy if opening in openings]
        return [match for match in matches if says_all_of(blocks, blocks_of(match.step.prompt))]

    def _take(self, key: bytes, matches: list[Match], ids: frozenset[str]) -> Match:
        if len(matches) > 1 and ids:
            matches = [match for match in matches if call_ids(match.step.prompt) == ids] or matches
        if len(matches) == 1:
            return matches[0]
        # `setdefault` and `next` of a count are atomic: recordings take turns evenly under threads, too.
        return matches[next(self._rotation.setdefault(key, itertools.count())) % len(matches)]

    def _unknown(self, blocks: list[Block]) -> UnknownConversationError:
        count = f"{len(self.recordings)} recorded rollout(s)"
        where = f"no recorded answer for this conversation of {len(blocks)} message(s) among {count}"
        keys = prefix_keys(blocks)
        alike = next((n for n in reversed(range(len(keys))) if keys[n] in self._begun), None)
        detail = (
            "; they hold no turns" if alike is None else _difference(self._begun[keys[alike]], alike, blocks)
        )
        return UnknownConversationError(
            f"replay policy: {where}{detail}",
            endpoint="replay",
            status_code=422,
            retryable=False,
            alike=alike,
        )


def _transcript(recording: Recording) -> list[Block]:
    last = recording.steps[-1]
    return blocks_of([*last.prompt, *last.output])


def _difference(recording: Recording, position: int, blocks: list[Block]) -> str:
    recorded, near = _transcript(recording), f"; nearest is {recording.name}, which"
    if position >= len(recorded):
        return f"{near} ends after message {position}, where the policy is asked to go on"
    place = f"{near} differs at message {position + 1} ({recorded[position].role})"
    if position >= len(blocks):
        return f"{place}: recorded {_cut(recorded[position].text, 0)}, got nothing"
    one, other = recorded[position].text, blocks[position].text
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    same = sum(1 for _ in alike)
    return f"{place}: recorded {_cut(one, same)}, got {_cut(other, same)}"


def _cut(text: str, point: int, width: int = 60) -> str:
    """`text` around `point`, on one line."""
    start = max(0, point - width // 3)
    line = " ".join(text[start : start + width].split())
    return repr(f"{'...' if start else ''}{line}{'...' if start + width < len(text) else ''}")


def load_index(paths: Sequence[str], index: int | None = None) -> ReplayIndex:
    """Return the index of some files; it is made once per process while the files do not change.

    `index` pins one recording (0-based, over all files); `ConfigError` if there is none of that number.
    """
    stamps = stamps_of(paths)
    with _loading:
        return _load(tuple(paths), stamps, index)


def stamps_of(paths: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Return what changes when one of the files does."""
    return tuple(_stamp(path) for path in paths)


_loading = threading.Lock()


@lru_cache(maxsize=KEPT_INDEXES)
def _load(paths: tuple[str, ...], stamps: tuple[tuple[int, int], ...], index: int | None) -> ReplayIndex:
    if index is None:
        return ReplayIndex(recorded_rollouts(paths))
    return ReplayIndex([recorded_rollout(paths, index)])


def _stamp(path: str) -> tuple[int, int]:
    """Time of change and size; a file that is not there fails when it is read."""
    try:
        status = Path(path).stat()
    except OSError:
        return (0, 0)
    return (status.st_mtime_ns, status.st_size)
