"""All checks of a training, each after those that it depends on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from gymgate.core.config import Config, HTTPEndpoint, JudgeEndpoint, StackConfig
from gymgate.core.errors import DataError, GymgateError
from gymgate.doctor import Finding
from gymgate.doctor.packages import Trainer, check_versions
from gymgate.doctor.rollout_checks import check_rollout
from gymgate.doctor.sampling_checks import check_chat_template, check_greedy, check_two_turns, load_policy
from gymgate.doctor.server_checks import ServedModel, check_servers, server_root
from gymgate.gym.catalog import Catalog
from gymgate.gym.row_sources import open_rows
from gymgate.gym.runtime import ensure_runtime, find_runtime
from gymgate.gym.runtime.command import Progress
from gymgate.runs.described.spec import RunSpec
from gymgate.stack import acquire


class TrainingSetup(Config):
    """The training to check: trainer, model, servers, and the rollouts to try."""

    spec: RunSpec | None = None
    """Environments, of which each agent runs one row; its `policy` is not used. `None`: no rollout is tried."""
    trainer: Trainer = "tokens"
    """Trainer whose requirements are checked."""
    urls: tuple[str, ...] = ()
    """vLLM servers that sample; rollouts use the first one."""
    model: str | None = None
    """Hub name or directory of the tokenizer, and of the model if no server samples; `None`: the served model's name."""
    renderer: str | None = None
    """Its name in the `renderers` package; `None`: the model's."""


async def check_training(
    setup: TrainingSetup, progress: Progress = lambda line: None
) -> AsyncIterator[Finding]:
    """Yield each finding when it is made; stops after a failure that the further checks depend on."""
    try:
        await asyncio.to_thread(_find_environments, setup.spec)
    except GymgateError as error:
        yield Finding("environments", False, str(error))
        return
    unusable = False
    for finding in check_versions(setup.trainer):
        yield finding
        unusable |= finding.ok is False and finding.name in ("transformers", "renderers")
    served: ServedModel | None = ServedModel()
    if setup.urls:
        findings, served = await check_servers(setup.urls, setup.trainer)
        for finding in findings:
            yield finding
    model = setup.model or (served.model if served else None)
    if served is None or unusable or (model is None and setup.spec is None):
        return
    if model is None:
        advice = "--vllm URL of a server, or --model DIR to sample in this process"
        yield Finding("policy", False, f"none named; {advice}")
        return
    async for finding in _check_policy(setup, model, served, progress):
        yield finding


async def _check_policy(
    setup: TrainingSetup, model: str, served: ServedModel, progress: Progress
) -> AsyncIterator[Finding]:
    url = setup.urls[0] if setup.urls else None
    try:
        tokenizer, policy, engine = await asyncio.to_thread(load_policy, model, url, setup.renderer, served)
    except GymgateError as error:
        yield Finding("policy", False, str(error))
        return
    yield Finding("renderer", True, type(policy.renderer).__name__)
    try:
        if url is not None:
            yield await check_chat_template(policy, url, served.model)
        yield await check_two_turns(policy)
        yield await check_greedy(policy, engine)
        if setup.spec is None:
            return
        config, rows = await asyncio.to_thread(_stack, setup.spec, url, served)
        async with acquire(config, progress=progress) as stack:
            yield Finding("environments", True, f"up, {len(stack.agents)} agents")
            for agent, about in stack.agents.items():
                if about.untrainable is not None:
                    yield Finding(agent, False, about.untrainable)
                    continue
                conversation = policy.conversation()
                rollout = await stack.run(
                    rows[about.environment],
                    policy=conversation,
                    judge_policy=policy.judge_conversation(),
                    agent=agent,
                    limits=setup.spec.limits,
                    record_bodies=False,
                )
                for finding in check_rollout(agent, rollout, conversation, policy, engine, tokenizer):
                    yield finding
    except GymgateError as error:
        yield Finding("environments", False, str(error))
    finally:
        await engine.close()


def _find_environments(spec: RunSpec | None) -> None:
    """Raise `ConfigError` for an environment that is not there, unless only an installation could tell."""
    if spec is not None and (runtime := find_runtime(spec.stack.runtime)):
        Catalog(runtime.site, runtime.version).environments_of(spec.stack.environments)


def _stack(
    spec: RunSpec, url: str | None, served: ServedModel
) -> tuple[StackConfig, Mapping[str, Mapping[str, Any]]]:
    """Return a stack for the rollouts, and a row for each environment. The served model, else the policy, is the judge."""
    runtime = ensure_runtime(spec.stack.runtime)
    catalog = Catalog(runtime.site, runtime.version)
    rows = {}
    for name, environment in catalog.environments_of(spec.stack.environments).items():
        row = next(iter(open_rows(spec.data, environment=environment)), None)
        if row is None:
            raise DataError(f"{spec.data!r} has no row of {name!r}; give a file with --data")
        rows[name] = row.data
    judge: JudgeEndpoint = (
        HTTPEndpoint(base_url=f"{server_root(url)}/v1", model=served.model) if url else "policy"
    )
    return spec.stack.model_copy(update={"models": (("*", judge),)}), rows
