"""A trainer's own engine, renderer and sampling parameters as a `TokenPolicy`."""

from __future__ import annotations

import logging
import secrets
import urllib.request
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import orjson

from gymgate.errors import ConfigError, PolicyError
from gymgate.tokens import Engine, Sample, TokenPolicy
from gymgate.tokens.conversation import Renderer, make_renderer
from gymgate.tokens.engines import VLLMCompletionsEngine
from gymgate.tokens.sampling import NAMES

logger = logging.getLogger(__name__)

EngineSource = Engine | Callable[[Any], Engine]
"""An engine, or a function that makes it of the trainer."""
RendererSource = Renderer | str | Callable[[Any], Renderer]
"""A renderer, its name in the `renderers` package, or a function that makes it of the tokenizer."""

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
ANSWER_TIMEOUT_S = 10.0
SESSIONS_REMEMBERED = 10_000
"""Rollouts known to have been seeded; an older one would be seeded once more."""
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # as aiohttp, which samples


class Served(NamedTuple):
    """What a server says of its first model."""

    model: str
    max_model_len: int | None


class TrainersEngine:
    """A trainer's vLLM server, at the route that TRL itself samples at.

    Samples carry the versions that the trainer counts, whatever the server counts. A rollout's first request has a seed of its
    own: the engines of a data-parallel server start from the same one, and would draw the same for one prompt. Later requests
    have none, since vLLM draws seeded ones one by one, outside its batched sampler. Where TRL publishes an adapter, under a new
    name for each version, the last one samples.
    """

    def __init__(
        self, base_url: str, model: str, version: Callable[[], int], *, lora_name: str | None = None
    ) -> None:
        self.server = VLLMCompletionsEngine(base_url, model=model)
        self.version = version
        self.lora_name = lora_name
        self._seeded: OrderedDict[str, None] = OrderedDict()

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Mapping[str, Any], *, session: str
    ) -> Sample:
        """See `Engine.generate`."""
        before = self.version()
        if self.lora_name is not None:
            self.server.model = f"{self.lora_name}-v{before}"
        sampling = {name: value for name, value in sampling.items() if name != "seed"}
        if session not in self._seeded:
            sampling["seed"] = secrets.randbits(62)
            self._seeded[session] = None
            if len(self._seeded) > SESSIONS_REMEMBERED:
                self._seeded.popitem(last=False)
        sample = await self.server.generate(prompt_ids, sampling, session=session)
        return replace(sample, policy_version=(before, self.version()))

    async def close(self) -> None:
        """Close this event loop's connections."""
        await self.server.close()


def make_policy(trainer: Any, engine: EngineSource | None, renderer: RendererSource | None) -> TokenPolicy:
    """A policy that samples as a `GRPOTrainer` assumes: its model, its sampling parameters, at most
    `max_completion_length` tokens after the first prompt."""
    tokenizer = tokenizer_of(trainer.processing_class)
    made = made_by(engine, trainer, "generate")
    return TokenPolicy(
        made or trainer_engine(trainer),
        renderer_for(tokenizer, renderer, getattr(trainer.args, "chat_template_kwargs", None)),
        sampling=trainer_sampling(trainer.args),
        max_model_len=None if made else trainer_model_len(trainer),
        max_completion_len=trainer.args.max_completion_length,
        version=lambda: trainer.state.global_step,
    )


def made_by(value: Any, argument: Any, method: str) -> Any:
    """The thing itself (it has `method`), or what a function makes of `argument`."""
    return value if value is None or hasattr(value, method) else value(argument)


def tokenizer_of(processing_class: Any) -> Any:
    """The tokenizer, or that of a processor."""
    return getattr(processing_class, "tokenizer", processing_class)


def trainer_sampling(args: Any) -> dict[str, Any]:
    """The sampling parameters that a `GRPOConfig` or `AsyncGRPOConfig` sets, those in `generation_kwargs` included."""
    chosen = {name: getattr(args, name, None) for name in _SAMPLING}
    extra: Mapping[str, Any] = getattr(args, "generation_kwargs", None) or {}
    if unknown := sorted(name for name in extra if name not in NAMES):
        logger.warning("generation_kwargs: %s not passed on; known: %s", ", ".join(unknown), ", ".join(NAMES))
    chosen |= {name: extra[name] for name in extra if name in NAMES}
    return {name: value for name, value in chosen.items() if value is not None}


def trainer_engine(trainer: Any) -> Engine:
    """The trainer's vLLM server, or its model in this process. `ConfigError` for vLLM in colocate mode, and for a model
    that is spread over processes."""
    if getattr(trainer, "use_vllm", False):
        url = server_url(trainer.args)
        return TrainersEngine(url, served_model(url).model, lambda: int(trainer.state.global_step))
    return model_engine(trainer)


def server_url(args: Any) -> str:
    """Address of the vLLM server that a `GRPOConfig` names, for every rank: only the main process has TRL's client of it."""
    if args.vllm_mode != "server":
        raise ConfigError(
            f"vllm_mode={args.vllm_mode!r} offers no token endpoint; use vllm_mode='server', or use_vllm=False"
        )
    return str(args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}")


def model_engine(trainer: Any) -> Engine:
    """The trainer's model, in process."""
    from gymgate.tokens.engines.huggingface import HuggingFaceEngine

    if spread := _spread_over_processes(trainer.accelerator):
        raise ConfigError(
            f"the model is spread over processes ({spread}), which sample at times of their own;"
            " use use_vllm=True with vllm_mode='server'"
        )
    tokenizer = tokenizer_of(trainer.processing_class)
    return HuggingFaceEngine(
        lambda: trainer.accelerator.unwrap_model(trainer.model),
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        version=lambda: trainer.state.global_step,
    )


def _spread_over_processes(accelerator: Any) -> str | None:
    """How, if no process holds all weights."""
    kind = getattr(accelerator.distributed_type, "value", accelerator.distributed_type)
    if kind == "DEEPSPEED":
        stage = accelerator.state.deepspeed_plugin.zero_stage
        return "DeepSpeed ZeRO-3" if stage == 3 else None
    return kind if kind in ("FSDP", "MEGATRON_LM") else None


def trainer_model_len(trainer: Any) -> int | None:
    """Most ids, prompt and answer together, that the trainer's server or model takes; `None` if it does not say."""
    if getattr(trainer, "use_vllm", False):
        return served_model(server_url(trainer.args)).max_model_len
    config = trainer.accelerator.unwrap_model(trainer.model).config
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) else None


def served_model(base_url: str) -> Served:
    """The first model that an OpenAI-compatible server lists. `PolicyError` if it lists none, or does not answer."""
    url = f"{base_url.rstrip('/').removesuffix('/v1')}/v1/models"
    try:
        with _DIRECT.open(url, timeout=ANSWER_TIMEOUT_S) as answer:
            card = orjson.loads(answer.read())["data"][0]
            return Served(card["id"], card.get("max_model_len"))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise PolicyError(f"no list of models at {url}: {error}", endpoint=url) from error


def renderer_for(
    tokenizer: Any, given: RendererSource | None, chat_template_kwargs: Mapping[str, Any] | None
) -> Renderer:
    """The renderer itself, the one of that name, what a function makes of the tokenizer, or the tokenizer's own."""
    if given is None or isinstance(given, str):
        return make_renderer(tokenizer, given, chat_template_kwargs)
    made: Renderer = made_by(given, tokenizer, "render_ids")
    return made
