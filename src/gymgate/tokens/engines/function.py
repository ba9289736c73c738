"""A Python function as an engine: a policy of one's own, or a script in a test."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from gymgate.errors import GymgateError, PolicyError, TokenDataError
from gymgate.tokens.engines.base import Sample
from gymgate.tokens.segments import TokenTurn, check_turn

Function = Callable[[list[int], dict[str, Any]], Sample | Awaitable[Sample]]


class CallableEngine:
    """Samples with `function(prompt_ids, sampling)`, which returns a `Sample` or an awaitable of one.

    A function that is not async runs on the event loop: one that takes long should be async.
    """

    def __init__(self, function: Function) -> None:
        self.function = function

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Mapping[str, Any], *, session: str
    ) -> Sample:
        """See `Engine.generate`."""
        try:
            made = self.function(list(prompt_ids), dict(sampling))
            sample = await made if inspect.isawaitable(made) else made
        except GymgateError:
            raise
        except Exception as error:
            raise PolicyError(
                f"the policy function failed: {type(error).__name__}: {error}", retryable=False
            ) from error
        if not isinstance(sample, Sample):
            raise TokenDataError(f"the policy function returned {type(sample).__name__}, not a Sample")
        check_turn(TokenTurn(prompt_ids, sample.token_ids, sample.logprobs), "policy function")
        return sample
