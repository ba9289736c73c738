"""SkyRL's inference servers as the policy, and the settings of its generator. Imports no SkyRL."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from gymgate.core.errors import ConfigError
from gymgate.integrations.training.spec import TokenSpec
from gymgate.tokens.engines import VLLMGenerateEngine
from gymgate.tokens.sampling import NAMES

logger = logging.getLogger(__name__)

NOT_SAMPLING = ("logprobs", "skip_special_tokens", "include_stop_str_in_output")
"""Parameters of SkyRL that do not change the ids."""


class GeneratorSettings(TokenSpec):
    """Settings of `NeMoGymGenerator`. The stack starts with the first batch and ends with the trainer's process."""


class InferenceClient(Protocol):
    """The methods used of SkyRL's `InferenceEngineInterface`."""

    def get_endpoint_url(self) -> str: ...

    async def finish_session(self, session_id: str) -> None: ...


class InferenceServersEngine(VLLMGenerateEngine):
    """SkyRL's inference servers, behind its router, at the route where SkyRL itself samples token ids.

    `salt` gives the current salt of vLLM's prefix cache, so that what earlier weights computed is not used again.
    """

    def __init__(self, base_url: str, model: str, salt: Callable[[], str | None]) -> None:
        super().__init__(base_url, model=model)
        self.salt = salt

    def request(self, prompt_ids: list[int], sampling: dict[str, Any], session: str) -> dict[str, Any]:
        body, salt = super().request(prompt_ids, sampling, session), self.salt()
        return body if salt is None else {**body, "cache_salt": salt}


def check_config(cfg: Any) -> None:
    """Raise `ConfigError` for settings of SkyRL with which it would train on something else than what was sampled and scored."""
    if not cfg.generator.step_wise_trajectories:
        raise ConfigError(
            "set generator.step_wise_trajectories=true: otherwise SkyRL takes one sequence per rollout, and counts a failed"
            " one as a reward"
        )
    if (kind := cfg.trainer.algorithm.dynamic_sampling.type) is not None:
        raise ConfigError(
            f"trainer.algorithm.dynamic_sampling.type={kind!r} takes every rollout for one sequence; use"
            " trainer.algorithm.zero_variance_filter=true"
        )
    for name in ("enable_return_routed_experts", "enable_return_sample_support_set"):
        if getattr(cfg.generator.inference_engine, name):
            raise ConfigError(
                f"generator.inference_engine.{name} must be false: NeMo Gym agents do not pass it on"
            )


def pinned_sampling(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that SkyRL sets for a batch, without those that do not change what is sampled.

    Its `min_tokens` is left out: vLLM would take the end of the turn out of the first id's distribution, and the trainer
    would not. It is there because SkyRL's own generator cannot take an empty answer.
    """
    chosen = {name: value for name, value in sampling.items() if value is not None and name != "min_tokens"}
    if unknown := sorted(chosen.keys() - {*NAMES, *NOT_SAMPLING}):
        logger.warning("sampling_params: %s not passed on; known: %s", ", ".join(unknown), ", ".join(NAMES))
    return {name: value for name, value in chosen.items() if name in NAMES}
