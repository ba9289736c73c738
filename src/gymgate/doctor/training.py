"""Every check of a training, in the order in which one makes sense after the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gymgate.catalog import Catalog
from gymgate.config import EnvironmentConfig, HTTPEndpoint, RolloutLimits, RuntimeConfig, StackConfig
from gymgate.dataset import open_rows
from gymgate.doctor.policy import (
    chat_template_check,
    greedy_check,
    load_policy,
    template_check,
)
from gymgate.doctor.rollouts import rollout_checks
from gymgate.doctor.servers import Served, look_at_servers
from gymgate.doctor.versions import Trainer, version_checks
from gymgate.errors import DataError, GymgateError
from gymgate.runtime import ensure_runtime
from gymgate.runtime.checks import Check
from gymgate.stack import Stack, acquire

MODEL_SERVERS = "*"


@dataclass(frozen=True)
class Target:
    """What is to be trained, on what."""

    environments: Sequence[str]
    trainer: Trainer = "tokens"
    urls: Sequence[str] = ()
    """Of the vLLM servers that sample; the first one rolls out."""
    model: str | None = None
    """Hub name or directory of the tokenizer, and of the model where no server samples; `None`: what the server serves."""
    renderer: str | None = None
    """As the `renderers` package calls it; `None`: the model's."""
    data: str = "example"
    timeout_s: float = 300.0
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)


async def run_training_checks(
    target: Target, progress: Callable[[str], None] = lambda line: None
) -> AsyncIterator[Check]:
    """Each check as it is made. A failure on which others rest ends them."""
    versions = list(version_checks(target.trainer))
    for check in versions:
        yield check
    served: Served | None = Served()
    if target.urls:
        checks, served = await look_at_servers(target.urls, target.trainer)
        for check in checks:
            yield check
    model = target.model or (served.model if served else None)
    if served is None or (model is None and not target.environments):
        return
    if any(check.ok is False and check.name in ("transformers", "renderers") for check in versions):
        return
    if model is None:
        yield Check(
            "policy", False, "none named; --vllm URL of a server, or --model DIR to sample in this process"
        )
        return
    async for check in _with_policy(target, model, served, progress):
        yield check


async def _with_policy(
    target: Target, model: str, served: Served, progress: Callable[[str], None]
) -> AsyncIterator[Check]:
    url = target.urls[0] if target.urls else None
    try:
        tokenizer, policy, engine = await asyncio.to_thread(load_policy, model, url, target.renderer, served)
    except GymgateError as error:
        yield Check("policy", False, str(error))
        return
    yield Check("renderer", True, type(policy.renderer).__name__)
    try:
        if url is not None:
            yield await chat_template_check(policy, url, served.model)
        yield await template_check(policy)
        yield await greedy_check(policy, engine)
        if target.environments:
            async for check in _rollouts(target, policy, engine, tokenizer, served, progress):
                yield check
    finally:
        await engine.close()


async def _rollouts(
    target: Target, policy: Any, engine: Any, tokenizer: Any, served: Served, progress: Callable[[str], None]
) -> AsyncIterator[Check]:
    """One rollout of each agent, on a stack of its own."""
    try:
        config, rows = await asyncio.to_thread(_stack, target, served)
        async with acquire(config, progress=progress) as stack:
            yield Check("environments", True, f"up, {len(stack.agents)} agents")
            for agent, about in stack.agents.items():
                engine.sent.clear()
                conversation = policy.conversation()
                rollout = await _run(stack, rows[about.environment], agent, conversation, target)
                for check in rollout_checks(agent, rollout, conversation, policy, engine, tokenizer):
                    yield check
    except GymgateError as error:
        yield Check("environments", False, str(error))


def _stack(target: Target, served: Served) -> tuple[StackConfig, Mapping[str, Any]]:
    """The stack, and a row for each environment. Judges are asked of the server, or of the policy."""
    installed = ensure_runtime(target.runtime)
    catalog = Catalog(installed.site, installed.version)
    rows = {}
    for name in target.environments:
        environment = catalog.find(name)
        row = next(iter(open_rows(target.data, environment=environment)), None)
        if row is None:
            raise DataError(f"{target.data!r} holds no row of {name!r}; name a file with --data")
        rows[name] = rows[environment.name] = row.data
    judge = (
        HTTPEndpoint(base_url=f"{_root(target.urls[0])}/v1", model=served.model) if target.urls else "policy"
    )
    config = StackConfig(
        environments=tuple(EnvironmentConfig(name=name) for name in target.environments),
        runtime=target.runtime,
        models=((MODEL_SERVERS, judge),),
    )
    return config, rows


async def _run(stack: Stack, row: Mapping[str, Any], agent: str, conversation: Any, target: Target) -> Any:
    limits = RolloutLimits(timeout_s=target.timeout_s)
    return await stack.run(row, policy=conversation, agent=agent, limits=limits, record_bodies=False)


def _root(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")
