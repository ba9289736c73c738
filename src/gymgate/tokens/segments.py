"""From a rollout's model calls to training rows: pure functions over token ids.

A *turn* is one model call: the ids the policy was shown and the ids it sampled. A *segment* is one training row. Turns whose
prompt starts with everything a segment holds so far extend that segment; what lies between (tool results, user messages,
template scaffolding) is masked 0:

    turn 1   p p p  S S                      p = prompt, S = sampled, t = tool or template
    turn 2   p p p  S S  t t  S S S
    segment  prompt [p p p]  completion [S S t t S S S]  mask [1 1 0 0 1 1 1]

A turn that extends nothing (the history was compacted, forked, or handed to a sub-agent) is a *prefix miss* and starts a
segment of its own. That segment's prompt is all the turn was shown; ids sampled earlier are unmasked in it, so no id is
trained twice.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gymgate.core.errors import TokenDataError
from gymgate.rollouts.record import Rollout, Segment

NO_EVIDENCE = -9999.0
"""vLLM's value where it has no logprob for an id."""


class TokenTurn(NamedTuple):
    """One model call; `logprobs`, where given, has one finite number for each completion id."""

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    logprobs: Sequence[float] | None = None
    policy_version: tuple[int, int] | None = None
    """Lowest and highest version of the weights that sampled it."""


def check_turn(turn: TokenTurn, where: str = "turn") -> TokenTurn:
    """Return the turn; `TokenDataError` if ids are not natural numbers or logprobs do not fit the ids."""
    _check_ids(turn.prompt_ids, f"{where}: prompt_ids")
    _check_ids(turn.completion_ids, f"{where}: completion_ids")
    if not turn.prompt_ids:
        raise TokenDataError(f"{where}: prompt_ids is empty")
    if turn.logprobs is not None:
        _check_logprobs(turn.logprobs, len(turn.completion_ids), where)
    return turn


def _check_ids(ids: Sequence[int], where: str) -> None:
    if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0):  # a tenth of the time of the loop below
        return
    for position, token in enumerate(ids):
        if type(token) is not int or token < 0:
            raise TokenDataError(f"{where}[{position}] is {token!r}, not a token id")


def _check_logprobs(logprobs: Sequence[float], count: int, where: str) -> None:
    if len(logprobs) != count:
        raise TokenDataError(
            f"{where}: {len(logprobs)} logprobs for {count} completion ids; they must be equal"
        )
    for position, value in enumerate(logprobs):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise TokenDataError(f"{where}: logprobs[{position}] is {value!r}, not a finite number")
        if value == NO_EVIDENCE:
            raise TokenDataError(f"{where}: logprobs[{position}] is {value!r}, vLLM's placeholder for none")


def assemble(turns: Iterable[TokenTurn]) -> list[Segment]:
    """Make the training rows of one rollout, in the order of their first turns.

    The mask is 1 exactly where the policy sampled; over all segments it adds up to the number of sampled ids. A turn that
    sampled nothing adds nothing. Raises `TokenDataError` for a malformed turn.
    """
    return segments_of(_link(turns))


def prefix_misses(turns: Iterable[TokenTurn]) -> int:
    """Count the turns, after the first, whose prompt does not extend any earlier turn's exact ids."""
    return sum(call.earlier is None for call in _link(turns)[1:])


def recorded_turns(rollout: Rollout) -> list[TokenTurn]:
    """The policy calls of a rollout whose endpoint gave token ids (vLLM: `return_token_ids`), by arrival.

    Calls that failed are left out. Raises `TokenDataError` for an answer without ids: it cannot be trained on.
    """
    turns = []
    for call in rollout.policy_calls:
        if call.error is not None:
            continue
        if call.prompt_token_ids is None or call.completion_token_ids is None:
            raise TokenDataError(
                f"rollout {rollout.id}: call {call.index} carries no token ids; ask the endpoint for return_token_ids"
            )
        turns.append(TokenTurn(call.prompt_token_ids, call.completion_token_ids, call.logprobs))
    return turns


@dataclass(slots=True, eq=False)
class SampledCall:
    """A model call that keeps each id once: ids that its prompt shares with an earlier call are that call's."""

    earlier: SampledCall | None
    """The call whose prompt and completion this prompt starts with; `None` if there is none."""
    added: array[int]
    """The prompt's ids after those of `earlier`."""
    completion: array[int]
    logprobs: array[float] | None
    policy_version: tuple[int, int] | None

    @classmethod
    def after(cls, earlier: SampledCall | None, turn: TokenTurn) -> SampledCall:
        """A call whose prompt starts with all ids of `earlier`."""
        shared = earlier.seen_count() if earlier else 0
        logprobs = None if turn.logprobs is None else array("d", turn.logprobs)
        added, completion = array("I", turn.prompt_ids[shared:]), array("I", turn.completion_ids)
        return cls(earlier, added, completion, logprobs, turn.policy_version)

    def turn(self) -> TokenTurn:
        """The call with its whole prompt."""
        logprobs = None if self.logprobs is None else list(self.logprobs)
        return TokenTurn(self.prompt_ids(), list(self.completion), logprobs, self.policy_version)

    def prompt_ids(self) -> list[int]:
        """The ids that the policy was shown."""
        earlier = self._chain()[:-1]
        return [
            *(token for call in earlier for part in (call.added, call.completion) for token in part),
            *self.added,
        ]

    def seen_count(self) -> int:
        """The number of ids in prompt and completion."""
        return sum(len(call.added) + len(call.completion) for call in self._chain())

    def first(self) -> SampledCall:
        """Return the call that begins what this one extends."""
        return self._chain()[0]

    def _chain(self) -> list[SampledCall]:
        """The calls that this one extends, the first one first, and itself."""
        chain = [self]
        while (earlier := chain[-1].earlier) is not None:
            chain.append(earlier)
        return chain[::-1]


def longest_extended(calls: Sequence[SampledCall], prompt_ids: Sequence[int]) -> SampledCall | None:
    """Find the call with most ids among those whose prompt and completion `prompt_ids` starts with.

    `calls` hold each call after the one it extends.
    """
    prompt = array("I", prompt_ids)
    ends: dict[SampledCall, int] = {}
    for call in calls:
        start = 0 if call.earlier is None else ends.get(call.earlier, -1)
        own = call.added + call.completion
        if start >= 0 and prompt[start : start + len(own)] == own:
            ends[call] = start + len(own)
    return max(ends, key=lambda call: ends[call], default=None)


def segments_of(
    calls: Sequence[SampledCall], untrained: Collection[SampledCall] = frozenset()
) -> list[Segment]:
    """Make the training rows of calls that hold each call after the one it extends.

    A call extends the row that ends with the call it extends; any other starts a row. What `untrained` calls sampled is
    trained in none.
    """
    rows: list[_OpenSegment] = []
    ending: dict[SampledCall, _OpenSegment] = {}
    for call in calls:
        if not call.completion or call in untrained:
            continue
        before, between = _last_sampled(call, untrained)
        row = None if before is None else ending.pop(before, None)
        if row is None:
            row = _OpenSegment(call.prompt_ids())
            rows.append(row)
        else:
            row.add(between, sampled=False)
        row.add(call.completion, call.logprobs, sampled=True)
        if call.policy_version is not None:
            row.versions.append(call.policy_version)
        ending[call] = row
    return [row.close() for row in rows]


def _link(turns: Iterable[TokenTurn]) -> list[SampledCall]:
    """The turns as calls, each extending the longest earlier one that it can."""
    calls: list[SampledCall] = []
    for number, turn in enumerate(turns):
        check_turn(turn, f"turn {number}")
        calls.append(SampledCall.after(longest_extended(calls, turn.prompt_ids), turn))
    return calls


def _last_sampled(
    call: SampledCall, untrained: Collection[SampledCall]
) -> tuple[SampledCall | None, array[int]]:
    """The last call before this one that sampled anything to train on, and the ids between them."""
    between, before = call.added, call.earlier
    while before is not None and (not before.completion or before in untrained):
        between, before = before.added + before.completion + between, before.earlier
    return before, between


@dataclass(slots=True)
class _OpenSegment:
    """A segment that later calls may still extend."""

    prompt_ids: list[int]
    completion_ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)

    def add(self, ids: Sequence[int], logprobs: Sequence[float] | None = None, *, sampled: bool) -> None:
        self.completion_ids += ids
        self.mask += [int(sampled)] * len(ids)
        self.logprobs += [None] * len(ids) if logprobs is None else logprobs

    def close(self) -> Segment:
        """The training row."""
        has_logprobs = any(value is not None for value in self.logprobs)
        return Segment(
            prompt_ids=self.prompt_ids,
            completion_ids=self.completion_ids,
            mask=self.mask,
            logprobs=self.logprobs if has_logprobs else None,
            policy_version=version_span(self.versions),
        )


def version_span(versions: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """The lowest and the highest of some versions of the weights; `None` for none."""
    return (min(low for low, _ in versions), max(high for _, high in versions)) if versions else None
