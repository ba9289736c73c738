"""From a rollout's model calls to training rows: pure functions over token ids.

A *turn* is one model call: the ids the policy was shown and the ids it sampled. A *segment* is one training row. Turns whose
prompt starts with everything a segment holds so far extend that segment; what lies between (tool results, user messages,
template scaffolding) is masked 0:

    turn 1   p p p  S S                      p = prompt, S = sampled, t = tool or template
    turn 2   p p p  S S  t t  S S S
    segment  prompt [p p p]  completion [S S t t S S S]  mask [1 1 0 0 1 1 1]

A turn that extends nothing (the history was compacted, forked, or handed to a sub-agent) starts a segment of its own, whose
prompt is all it was shown; ids sampled earlier stand in that prompt unmasked, so no id is trained twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gymgate.errors import TokenDataError
from gymgate.rollout.record import Rollout, Segment

NO_EVIDENCE = -9999.0
"""What vLLM puts where it has no logprob for an id."""


class TokenTurn(NamedTuple):
    """One model call; `logprobs`, where given, has one finite number for each completion id."""

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    logprobs: Sequence[float] | None = None
    policy_version: tuple[int, int] | None = None
    """Lowest and highest version of the weights that sampled it."""


def check_turn(turn: TokenTurn, where: str = "turn") -> TokenTurn:
    """The turn itself; `TokenDataError` if ids are not natural numbers or logprobs do not fit the ids."""
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
            raise TokenDataError(f"{where}: logprobs[{position}] is {value!r}, vLLM's mark for none")


def assemble(turns: Iterable[TokenTurn]) -> list[Segment]:
    """Training rows of one rollout, in the order their first turns were made.

    The mask is 1 exactly where the policy sampled; over all segments it adds up to the number of sampled ids. A turn that
    sampled nothing adds nothing. Raises `TokenDataError` for a malformed turn.
    """
    open_segments: list[OpenSegment] = []
    for number, turn in enumerate(turns):
        check_turn(turn, f"turn {number}")
        if not turn.completion_ids:
            continue
        fitting = [segment for segment in open_segments if segment.is_prefix_of(turn.prompt_ids)]
        if fitting:
            segment = max(fitting, key=len)
            segment.show(turn.prompt_ids[len(segment) :])
        else:
            segment = OpenSegment(turn.prompt_ids)
            open_segments.append(segment)
        segment.sample(turn.completion_ids, turn.logprobs, turn.policy_version)
    return [segment.close() for segment in open_segments]


def recorded_turns(rollout: Rollout) -> list[TokenTurn]:
    """The policy calls of a rollout whose endpoint gave token ids (vLLM: `return_token_ids`), by arrival.

    Calls that gave no answer are left out. Raises `TokenDataError` for an answer without ids: it cannot be trained on.
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


def extension_drift(turns: Sequence[TokenTurn]) -> int:
    """How many turns, after the first, were shown a prompt that extends no earlier turn's exact ids."""
    seen: list[list[int]] = []
    drifted = 0
    for turn in turns:
        shown = list(turn.prompt_ids)
        drifted += bool(seen) and not any(shown[: len(ids)] == ids for ids in reversed(seen))
        seen.append([*shown, *turn.completion_ids])
    return drifted


class OpenSegment:
    """A segment that later turns may still extend."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.prompt_length = len(prompt_ids)
        self.ids = list(prompt_ids)
        self.mask: list[int] = []
        self.logprobs: list[float | None] = []
        self.versions: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self.ids)

    def is_prefix_of(self, ids: Sequence[int]) -> bool:
        """Whether a turn with this prompt extends the segment."""
        return len(ids) >= len(self.ids) and list(ids[: len(self.ids)]) == self.ids

    def show(self, ids: Sequence[int]) -> None:
        """Add ids that the policy did not sample."""
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [None] * len(ids)

    def sample(
        self, ids: Sequence[int], logprobs: Sequence[float] | None, version: tuple[int, int] | None
    ) -> None:
        """Add ids that the policy sampled."""
        self.ids += ids
        self.mask += [1] * len(ids)
        self.logprobs += [None] * len(ids) if logprobs is None else logprobs
        if version is not None:
            self.versions.append(version)

    def close(self) -> Segment:
        """The training row."""
        known = any(value is not None for value in self.logprobs)
        return Segment(
            prompt_ids=self.ids[: self.prompt_length],
            completion_ids=self.ids[self.prompt_length :],
            mask=self.mask,
            logprobs=self.logprobs if known else None,
            policy_version=_span(self.versions),
        )


def _span(versions: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    if not versions:
        return None
    return min(low for low, _ in versions), max(high for _, high in versions)
