"""Tokens that rollouts used, by environment and model server, and what they cost at given prices."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gymgate.core.config import POLICY
from gymgate.runs.counted.counts import OVERALL
from gymgate.runs.described.prices import OTHERS, Prices
from gymgate.runs.stored.tokens import TOKENS, Tokens, no_tokens


@dataclass
class TokenUsage:
    """Tokens that one model server used in the rollouts of an environment."""

    environment: str
    """`all`: the sum over all environments."""
    model_server: str
    """`policy_model`, or that of a judge."""
    rollouts: int = 0
    """Rollouts that called it, failed attempts included; of the policy, all rollouts."""
    counted: int = 0
    """Those of which the tokens of every call are known. All numbers below are of these."""
    calls: int = 0
    input_tokens: int | None = None
    """Cached tokens included. `None` here and below: no answer counted them."""
    cached_tokens: int | None = None
    cached_share: float | None = None
    """Cached of all input tokens, once all rollouts are added."""
    output_tokens: int | None = None
    """Reasoning tokens included."""
    reasoning_tokens: int | None = None
    cost: float | None = None
    """Dollars, cached input tokens at the full price. `None`: no price, or nothing was counted."""

    def add(self, tokens: Tokens | None) -> None:
        """Add a rollout; `None`: its tokens are unknown."""
        self.rollouts += 1
        if tokens is None:
            return
        self.counted += 1
        self.calls += tokens.get("calls") or 0
        self._count(tokens)

    def include(self, other: TokenUsage) -> None:
        """Add the rollouts of another usage."""
        self.rollouts += other.rollouts
        self.counted += other.counted
        self.calls += other.calls
        self._count(other.__dict__)

    def _count(self, tokens: Mapping[str, Any]) -> None:
        for name in TOKENS:
            if (count := tokens.get(name)) is not None:
                setattr(self, name, (getattr(self, name) or 0) + count)

    def at(self, prices: Prices) -> TokenUsage:
        """Return it with its cost and the share of cached tokens."""
        others = None if self.model_server == POLICY else prices.get(OTHERS)
        price = prices.get(self.model_server, others)
        cost = share = None
        if price is not None and self.counted:
            cost = ((self.input_tokens or 0) * price.input + (self.output_tokens or 0) * price.output) / 1e6
        if self.cached_tokens is not None and self.input_tokens:
            share = self.cached_tokens / self.input_tokens
        return dataclasses.replace(self, cost=cost, cached_share=share)


class UsageCounts:
    """Tokens by environment and model server. Its size does not grow with the number of rollouts."""

    def __init__(self) -> None:
        self._usages: dict[tuple[str, str], TokenUsage] = {}

    def add(self, environment: str, tokens: Mapping[str, Tokens | None]) -> None:
        """Add a rollout's tokens by model server; `None`: they are unknown."""
        if POLICY not in tokens:
            self._usage(environment, POLICY).add(no_tokens())
        for server, used in tokens.items():
            self._usage(environment, server).add(used)

    def _usage(self, environment: str, server: str) -> TokenUsage:
        if (usage := self._usages.get((environment, server))) is None:
            usage = self._usages[environment, server] = TokenUsage(environment, server)
        return usage

    def _totals(self) -> dict[str, TokenUsage]:
        """Sum up over the environments, by model server."""
        totals: dict[str, TokenUsage] = {}
        for (_, server), usage in self._usages.items():
            totals.setdefault(server, TokenUsage(OVERALL, server)).include(usage)
        return totals

    def rows(self, prices: Prices) -> list[TokenUsage]:
        """Return the usage of each environment's policy and judges and, if there are several environments, the sums."""
        several = len({environment for environment, _ in self._usages}) > 1
        usages = sorted(
            self._usages.values(), key=lambda usage: (usage.environment, usage.model_server != POLICY)
        )
        totals = (
            sorted(self._totals().values(), key=lambda usage: usage.model_server != POLICY) if several else []
        )
        return [usage.at(prices) for usage in (*usages, *totals)]

    def of_policy(self, prices: Prices) -> TokenUsage | None:
        """Return the policy's usage over all environments; `None` before the first rollout."""
        usage = self._totals().get(POLICY)
        return None if usage is None else usage.at(prices)


def dollars(amount: float | None) -> str:
    """Return an amount as text, `-` for none; small ones with four decimals."""
    if amount is None:
        return "-"
    if 0 < amount < 0.0001:
        return "<$0.0001"
    return f"${amount:,.2f}" if amount >= 1 or not amount else f"${amount:.4f}"
