"""Prices of tokens, as a run or a command is given them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, NamedTuple

from pydantic import Field

from gymgate.core.config import POLICY
from gymgate.core.errors import ConfigError

OTHERS = "*"
"""Model server whose price holds for each judge without its own."""
Dollars = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Price(NamedTuple):
    """Dollars per million tokens."""

    input: Dollars
    output: Dollars


Prices = Mapping[str, Price]
"""By model server."""


def refuse_price_of_replay(prices: Prices, *, replayed: bool) -> None:
    """Raise `ConfigError` for a price of a policy that was not called."""
    if replayed and POLICY in prices:
        raise ConfigError(
            "recorded answers were replayed, which costs nothing: leave out the price of the policy"
        )
