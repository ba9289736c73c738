"""The model calls of one rollout as ids, each id kept once."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from gymgate.rollout.record import Segment
from gymgate.tokens.engines.base import Sample
from gymgate.tokens.segments import OpenSegment, TokenTurn


@dataclass(slots=True, eq=False)
class Call:
    """A model call; the ids that its prompt shares with an earlier call are that call's."""

    earlier: Call | None
    """The call whose prompt and completion this prompt starts with; `None` if there is none."""
    added: array[int]
    """The prompt's ids after those of `earlier`."""
    completion: array[int]
    logprobs: array[float] | None
    policy_version: tuple[int, int] | None
    message_count: int
    """Messages of the history, the answer included."""

    def prompt_ids(self) -> list[int]:
        """The ids that the policy was shown."""
        return [*(self.earlier.seen_ids() if self.earlier else ()), *self.added]

    def seen_ids(self) -> list[int]:
        """Prompt and completion."""
        chain: list[Call] = [self]
        while (earlier := chain[-1].earlier) is not None:
            chain.append(earlier)
        return [token for call in reversed(chain) for part in (call.added, call.completion) for token in part]

    def seen_count(self) -> int:
        """How many ids `seen_ids` has."""
        count, call = 0, self
        while True:
            count += len(call.added) + len(call.completion)
            if call.earlier is None:
                return count
            call = call.earlier

    def turn(self) -> TokenTurn:
        """The call with its whole prompt."""
        logprobs = None if self.logprobs is None else list(self.logprobs)
        return TokenTurn(self.prompt_ids(), list(self.completion), logprobs, self.policy_version)


def made_call(prompt_ids: Sequence[int], earlier: Call | None, sample: Sample, message_count: int) -> Call:
    """A call whose prompt starts with all ids of `earlier`."""
    known = earlier.seen_count() if earlier else 0
    logprobs = None if sample.logprobs is None else array("d", sample.logprobs)
    added, completion = array("I", prompt_ids[known:]), array("I", sample.token_ids)
    return Call(earlier, added, completion, logprobs, sample.policy_version, message_count)


def longest_extended(calls: Sequence[Call], prompt_ids: Sequence[int]) -> Call | None:
    """The call with most ids among those whose prompt and completion `prompt_ids` starts with.

    `calls` hold each call after the one it extends.
    """
    shown = array("I", prompt_ids)
    ends: dict[Call, int] = {}
    for call in calls:
        start = 0 if call.earlier is None else ends.get(call.earlier, -1)
        own = call.added + call.completion
        if start >= 0 and shown[start : start + len(own)] == own:
            ends[call] = start + len(own)
    return max(ends, key=lambda call: ends[call], default=None)


def segments_of(calls: Sequence[Call]) -> list[Segment]:
    """The training rows that `assemble` makes of the calls' turns, without their prompts written out for each.

    A call extends the row that ends with the call it extends; any other starts a row.
    """
    rows: list[OpenSegment] = []
    ending: dict[Call, OpenSegment] = {}
    for call in calls:
        if not call.completion:
            continue
        before, between = _last_sampled(call)
        row = None if before is None else ending.pop(before, None)
        if row is None:
            row = OpenSegment(call.prompt_ids())
            rows.append(row)
        else:
            row.show(between)
        row.sample(call.completion, call.logprobs, call.policy_version)
        ending[call] = row
    return [row.close() for row in rows]


def _last_sampled(call: Call) -> tuple[Call | None, array[int]]:
    """The last call before this one that sampled anything, and the ids between them."""
    between, before = call.added, call.earlier
    while before is not None and not before.completion:
        between, before = before.added + between, before.earlier
    return before, between
