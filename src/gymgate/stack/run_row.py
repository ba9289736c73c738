"""One row run, for trainers that give each rollout a URL and a key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import SecretStr

from gymgate.core.config import HTTPEndpoint, RolloutLimits, StackConfig
from gymgate.rollouts import Rollout, outcome_of
from gymgate.stack.acquisition import acquire

SHARED_LINGER_S = 120.0
"""Seconds that the stack of `run_row` waits for the next process of a trainer."""


async def run_row(
    row: Mapping[str, Any],
    environment: str | StackConfig,
    *,
    base_url: str,
    api_key: str | None = None,
    limits: RolloutLimits | None = None,
    judge_policy: HTTPEndpoint | None = None,
    **settings: Any,
) -> Rollout:
    """Run one row against the model at `base_url` and return its rollout, for trainers that give each rollout a URL and a key.

    An environment by name runs in a stack that all processes of this user share, and that stays up for `SHARED_LINGER_S`
    seconds after its last rollout. Give a `StackConfig` with `share="machine"` to choose more. `settings` are others of
    `HTTPEndpoint`: `model`, `dialect`, `sampling`, `max_retries`. The key goes nowhere but to `base_url`. `judge_policy` answers
    where a judge or a user simulator is the policy itself; without it their calls go to `base_url` as well, where a trainer that
    records every call takes them for turns of the policy.

    Train on `gymgate.outcome_of(rollout).reward`, which is `None` where no number counts. A failed rollout is raised as the
    error it failed with, so it never becomes a reward of 0. Raises `ConfigError`, `DataError` or `StackStartError` for what
    keeps it from starting; `ConfigError` also where several agents of a rollout are the policy, and the environment's config does
    not say which one is trained.
    """
    if isinstance(environment, str):
        environment = StackConfig(environments=(environment,), share="machine", linger_s=SHARED_LINGER_S)
    policy = HTTPEndpoint(
        base_url=base_url,
        api_key=None if api_key is None else SecretStr(api_key),
        **settings,
    )
    async with acquire(environment) as stack:
        stack.refuse_training()
        rollout = await stack.run(
            row, policy=policy, limits=limits, judge_policy=judge_policy, record_bodies=True
        )
    if outcome_of(rollout).reason == "failed" and rollout.error is not None:
        raise rollout.error.to_exception()
    return rollout
