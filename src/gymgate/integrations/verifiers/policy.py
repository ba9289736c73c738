"""The policy and the judges of a verifiers eval, asked before verifiers is loaded, which takes seconds."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import ValidationError

from gymgate.core.config import DEFAULT_KEY_VARIABLE, HTTPEndpoint, validation_message
from gymgate.core.errors import ConfigError
from gymgate.gym.open_needs import require_needs
from gymgate.gym.runtime.command import Progress
from gymgate.integrations.eval_options import EvalOptions
from gymgate.runs.collected.policies import ask_models
from gymgate.runs.collected.replay_server import ReplayServer

REPLAY_KEY_VARIABLE = "GYMGATE_REPLAY_KEY"
"""API key variable of an eval that replays recorded rollouts. It is never set; a resumed run is recognised by it."""


class Policy(NamedTuple):
    """The policy of an eval, as verifiers' client is told of it."""

    base_url: str
    key_variable: str
    model: str
    judges: Mapping[str, Any] = MappingProxyType({})
    """Settings of the judges whose model their endpoint told."""

    @property
    def replayed(self) -> bool:
        """Whether recorded answers are given; then the address is that of the saved run's server, or empty."""
        return self.key_variable == REPLAY_KEY_VARIABLE


def check_policy(
    options: EvalOptions,
    log: Progress,
    *,
    url: str | None = None,
    model: str | None = None,
    key_variable: str | None = None,
    ask: bool = True,
) -> Policy:
    """Ask the endpoint, if there is one, and check environments and judges; return the policy.

    Raises `ConfigError`, `PolicyError` or `NeedMissingError`. Without `ask` a named model is believed.
    """
    if model and not url:
        raise ConfigError(f"model {model!r} needs an endpoint: -b http://host:8000/v1")
    stack = options.run_spec().stack
    endpoint = None
    if url is None or key_variable == REPLAY_KEY_VARIABLE:
        names = ", ".join(options.environment_names())
        log(f"policy: recorded answers of {names}, replayed (no model is called); -b URL calls a model")
        policy = Policy(url or "", REPLAY_KEY_VARIABLE, model or "replay")
    else:
        variable = key_variable or DEFAULT_KEY_VARIABLE
        is_set = bool(os.environ.get(variable))
        fields = {"base_url": url, "model": model, "dialect": options.dialect}
        try:
            endpoint = HTTPEndpoint(**fields, api_key_env=variable if is_set else None)
        except ValidationError as error:
            raise ConfigError(validation_message(error)) from None
        policy = Policy(url, variable, model or "")
    configured = dict(stack.models)
    stack, asked = asyncio.run(ask_models(stack, endpoint, 0, log, known=ask))
    if isinstance(asked, HTTPEndpoint):
        policy = policy._replace(model=str(asked.model))
    judges = {
        name: judge.model_dump(exclude_unset=True)
        for name, judge in stack.models
        if isinstance(judge, HTTPEndpoint) and judge != configured[name]
    }
    require_needs(stack, [*options.find_environments(log).values()], replayed=policy.replayed)
    return policy._replace(judges=judges)


@contextlib.contextmanager
def replaying(options: EvalOptions, policy: Policy) -> Iterator[Policy]:
    """Serve recorded answers, for a resumed run too: the port that its settings have may be another program's by now."""
    with ReplayServer(options.environment_names(), runtime=options.run_spec().stack.runtime) as server:
        yield policy._replace(base_url=server.base_url)
