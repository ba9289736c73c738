"""Finds the recorded turn that answers a conversation, by a hash of the conversation so far."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from gymgate.errors import ConfigError, UnknownConversationError
from gymgate.gateway.replay.conversation import (
    Block,
    blocks_of,
    call_ids,
    exact_key,
    items_of,
    loose_key,
    policy_key,
    prefix_keys,
)
from gymgate.gateway.replay.recording import Recording, Turn, recorded_rollouts


@dataclass(frozen=True, slots=True)
class Match:
    """The turn that answers a conversation."""

    recording: Recording
    turn: int
    """0-based."""
    tool_output_differs: bool = False
    """The policy's turns so far are the same, but a tool output differs from the recording."""
    observation_missing: bool = False
    """The recording lacks what the environment said, so that only the policy's turns could be compared."""

    @property
    def step(self) -> Turn:
        return self.recording.steps[self.turn]


class ReplayIndex:
    """The turns of some recordings, found by conversation. Safe to use from several threads."""

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self.recordings = recordings
        self._exact: dict[bytes, list[Match]] = defaultdict(list)
        self._loose: dict[bytes, list[Match]] = defaultdict(list)
        self._gappy: dict[bytes, list[Match]] = defaultdict(list)
        self._begun: dict[bytes, Recording] = {}
        """The first recording with each beginning, by the beginning's key (`prefix_keys`)."""
        self._starts: dict[int, bytes] = {}
        """The key of the first prompt, by the recording's index."""
        self._rotation: dict[bytes, Iterator[int]] = defaultdict(itertools.count)
        self._lock = threading.Lock()
        for recording in recordings:
            self._enter(recording)

    def find(self, body: Mapping[str, Any], *, strict: bool = False) -> Match:
        """Return the turn that answers a Responses request; `UnknownConversationError` if there is none.

        Several recordings that agree so far are used in rotation, unless the request's call ids tell them apart.
        With `strict`, tools and environment must have said the same as in the recording, too.
        """
        items = items_of(body)
        blocks = blocks_of(items)
        if not items or items[-1].get("type") != "reasoning":
            key = exact_key(blocks)
            if found := self._exact.get(key) or (None if strict else self._near(blocks)):
                return self._take(key, found, call_ids(items))
        raise self._unknown(blocks)

    def _enter(self, recording: Recording) -> None:
        if recording.steps:
            for key in prefix_keys(_transcript(recording)):
                self._begun.setdefault(key, recording)
            self._starts[recording.index] = prefix_keys(blocks_of(recording.steps[0].prompt))[-1]
        for position, step in enumerate(recording.steps):
            blocks = blocks_of(step.prompt)
            if not step.gap:
                self._exact[exact_key(blocks)].append(Match(recording, position))
                near = Match(recording, position, tool_output_differs=True)
                self._loose[loose_key(blocks)].append(near)
            else:
                near = Match(recording, position, observation_missing=True)
                self._gappy[policy_key(blocks)].append(near)

    def _near(self, blocks: list[Block]) -> list[Match]:
        """Turns before which the policy said the same but the environment did not."""
        found = self._loose.get(loose_key(blocks)) or self._gappy.get(policy_key(blocks), [])
        if not found:
            return []
        begun = {*prefix_keys(blocks)}
        return [match for match in found if self._starts[match.recording.index] in begun]

    def _take(self, key: bytes, found: list[Match], ids: frozenset[str]) -> Match:
        if len(found) > 1 and ids:
            own = [match for match in found if call_ids(match.step.prompt) == ids]
            found = own or found
        if len(found) == 1:
            return found[0]
        with self._lock:
            return found[next(self._rotation[key]) % len(found)]

    def _unknown(self, blocks: list[Block]) -> UnknownConversationError:
        known = f"{len(self.recordings)} recorded rollout(s)"
        where = f"no recorded answer for this conversation of {len(blocks)} message(s) among {known}"
        keys = prefix_keys(blocks)
        alike = next((n for n in reversed(range(len(keys))) if keys[n] in self._begun), None)
        detail = (
            "; they hold no turns" if alike is None else _difference(self._begun[keys[alike]], alike, blocks)
        )
        return UnknownConversationError(
            f"replay policy: {where}{detail}", endpoint="replay", status_code=422, retryable=False
        )


def _transcript(recording: Recording) -> list[Block]:
    last = recording.steps[-1]
    return blocks_of([*last.prompt, *last.output])


def _difference(recording: Recording, position: int, blocks: list[Block]) -> str:
    recorded, near = _transcript(recording), f"; nearest is {recording.name}, which"
    if position >= len(recorded):
        return f"{near} ends after message {position}, where the policy is asked to go on"
    shown = f"{near} differs at message {position + 1} ({recorded[position].role})"
    if position >= len(blocks):
        return f"{shown}: recorded {_cut(recorded[position].text, 0)}, got nothing"
    one, other = recorded[position].text, blocks[position].text
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    same = sum(1 for _ in alike)
    return f"{shown}: recorded {_cut(one, same)}, got {_cut(other, same)}"


def _cut(text: str, point: int, width: int = 60) -> str:
    """`text` around `point`, on one line."""
    start = max(0, point - width // 3)
    line = " ".join(text[start : start + width].split())
    return repr(f"{'...' if start else ''}{line}{'...' if start + width < len(text) else ''}")


def load_index(paths: Sequence[str], index: int | None = None) -> ReplayIndex:
    """Return the index of some files; it is made once per process while the files do not change.

    `index` pins one recording (0-based, over all files); `ConfigError` if there is none of that number.
    """
    stamps = tuple(_stamp(path) for path in paths)
    with _loading:
        return _load(tuple(paths), stamps, index)


_loading = threading.Lock()


@lru_cache(maxsize=256)
def _load(paths: tuple[str, ...], stamps: tuple[tuple[int, int], ...], index: int | None) -> ReplayIndex:
    if index is None:
        return ReplayIndex(recorded_rollouts(paths))
    recordings = _load(paths, stamps, None).recordings
    if not 0 <= index < len(recordings):
        choices = f"0 to {len(recordings) - 1}" if recordings else "none"
        raise ConfigError(f"no recorded rollout {index} in {', '.join(paths)}; there is {choices}")
    return ReplayIndex([recordings[index]])


def _stamp(path: str) -> tuple[int, int]:
    """Changes when the file does; a file that is not there fails when it is read."""
    try:
        status = Path(path).stat()
    except OSError:
        return (0, 0)
    return (status.st_mtime_ns, status.st_size)
