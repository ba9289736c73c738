"""A trainer's own engine, renderer and sampling parameters as a `TokenPolicy`."""

from __future__ import annotations

import logging
import secrets
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gymgate.core.errors import ConfigError, PolicyError
from gymgate.core.http_client import HTTPClient, Response
from gymgate.core.json_server import listed_models, probe
from gymgate.stack.sync import run_apart
from gymgate.tokens import Engine, Sample, TokenPolicy
from gymgate.tokens.conversation import make_renderer
from gymgate.tokens.engines import ColocatedEngine, VLLMCompletionsEngine
from gymgate.tokens.sampling import NAMES
from gymgate.tokens.templates import Renderer

if TYPE_CHECKING:
    from gymgate.integrations.trl.spec import NeMoGymSpec

logger = logging.getLogger(__name__)

EngineSource = Engine | Callable[[Any], Engine]
"""An engine, or a function that makes one for a trainer."""
RendererSource = Renderer | str | Callable[[Any], Renderer]
"""A renderer, its name in the `renderers` package, or a function that makes one for a tokenizer."""

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
MAX_SEEDED_SESSIONS = 10_000
"""Rollouts remembered as seeded; a forgotten one gets another seed."""


class TRLServerEngine:
    """The vLLM server of a TRL trainer, at the route where TRL itself samples.

    Samples have the weights version that the trainer counts. The first request of a rollout has a seed of its own: the
    engines of a data-parallel server start from one seed, and would give equal samples for equal prompts. Later requests
    have none, because vLLM samples seeded requests one by one.
    """

    def __init__(self, base_url: str, model: str, version: Callable[[], int]) -> None:
        self.server = VLLMCompletionsEngine(base_url, model=model)
        self.version = version
        self._seeded: OrderedDict[str, None] = OrderedDict()

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Mapping[str, Any], *, session: str
    ) -> Sample:
        """See `Engine.generate`."""
        version = self.version()
        sampling = {name: value for name, value in sampling.items() if name != "seed"}
        if session not in self._seeded:
            sampling["seed"] = secrets.randbits(62)
            self._seeded[session] = None
            if len(self._seeded) > MAX_SEEDED_SESSIONS:
                self._seeded.popitem(last=False)
        sample = await self.server.generate(prompt_ids, sampling, session=session)
        return replace(sample, policy_version=(version, self.version()))

    async def close(self) -> None:
        """Close the connections of this event loop."""
        await self.server.close()


def make_policy(trainer: Any, engine: EngineSource | None, renderer: RendererSource | None) -> TokenPolicy:
    """Make a policy that samples as `GRPOTrainer` expects: its model and sampling parameters, and at most
    `max_completion_length` ids after a rollout's first prompt."""
    args, limit = trainer.args, None
    weak = weakref.proxy(trainer)  # a spec outlives its trainers, whose models are large
    chosen = resolve(engine, trainer, "generate")
    if chosen is None:
        chosen, limit = trainer_engine(trainer)
    return TokenPolicy(
        chosen,
        find_renderer(
            tokenizer_of(trainer.processing_class), renderer, getattr(args, "chat_template_kwargs", None)
        ),
        sampling=trainer_sampling(args),
        max_model_len=limit,
        max_completion_len=args.max_completion_length,
        version=lambda: weak.state.global_step,
    )


def server_policy(
    spec: NeMoGymSpec,
    tokenizer: Any,
    base_url: str,
    *,
    sampling: Mapping[str, Any],
    chat_template_kwargs: Mapping[str, Any] | None,
    max_completion_len: int | None,
) -> TokenPolicy:
    """Make a policy that samples at `base_url`, a vLLM server, unless the spec names an engine.

    The version of the server's weights is not known and counts as 0. Raises `PolicyError` for a server that lists no model.
    """
    limit, engine = None, resolve(spec.engine, None, "generate")
    if engine is None:
        model, limit = served_model(base_url)
        engine = TRLServerEngine(base_url, model, lambda: 0)
    return TokenPolicy(
        engine,
        find_renderer(tokenizer, spec.renderer, chat_template_kwargs),
        sampling=sampling,
        max_model_len=limit,
        max_completion_len=max_completion_len,
        version=lambda: 0,
    )


def resolve(source: Any, argument: Any, method: str) -> Any:
    """Return the object itself, which has `method`, or what the function `source` makes of `argument`."""
    return source if source is None or hasattr(source, method) else source(argument)


def tokenizer_of(processing_class: Any) -> Any:
    """Return the tokenizer itself, or that of a processor."""
    return getattr(processing_class, "tokenizer", processing_class)


def find_renderer(
    tokenizer: Any, source: RendererSource | None, chat_template_kwargs: Mapping[str, Any] | None
) -> Renderer:
    """Return the renderer that `source` gives, or the tokenizer's own."""
    if source is None or isinstance(source, str):
        return make_renderer(tokenizer, source, chat_template_kwargs)
    renderer: Renderer = resolve(source, tokenizer, "render_ids")
    return renderer


def check_timeout(trainer: Any, timeout_s: float) -> None:
    """Raise `ConfigError` if a rollout may last as long as the trainer's ranks wait for each other."""
    if trainer.accelerator.num_processes > 1 and timeout_s >= trainer.args.ddp_timeout:
        raise ConfigError(
            f"limits has timeout_s={timeout_s:g}, and the trainer ddp_timeout={trainer.args.ddp_timeout}: ranks would give up"
            " waiting for a rank with a slow rollout; raise ddp_timeout in the trainer's config, or lower timeout_s"
        )


def trainer_sampling(args: Any) -> dict[str, Any]:
    """Return the sampling parameters that a `GRPOConfig` sets, `generation_kwargs` included."""
    chosen = {name: getattr(args, name, None) for name in _SAMPLING}
    extra: Mapping[str, Any] = getattr(args, "generation_kwargs", None) or {}
    if unknown := sorted(name for name in extra if name not in NAMES):
        logger.warning("generation_kwargs: %s not passed on; known: %s", ", ".join(unknown), ", ".join(NAMES))
    chosen |= {name: extra[name] for name in extra if name in NAMES}
    return {name: value for name, value in chosen.items() if value is not None}


def trainer_engine(trainer: Any) -> tuple[Engine, int | None]:
    """Return the trainer's vLLM, or its model in this process, and the most ids of prompt and answer together.

    Raises `ConfigError` for a vLLM in this process, or a model, that is spread over processes.
    """
    if getattr(trainer, "use_vllm", False):
        if trainer.args.vllm_mode == "colocate":
            return colocated_engine(trainer.vllm_generation)
        url = server_url(trainer.args)
        model, limit = served_model(url)
        weak = weakref.proxy(trainer)
        return TRLServerEngine(url, model, lambda: int(weak.state.global_step)), limit
    engine = model_engine(trainer)
    config = trainer.accelerator.unwrap_model(trainer.model).config
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return engine, limit if isinstance(limit, int) else None


def server_url(args: Any) -> str:
    """Return the address of the vLLM server that a `GRPOConfig` names; TRL's client of it exists in the main process only."""
    return str(args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}")


def colocated_engine(generation: Any) -> tuple[ColocatedEngine, int]:
    """Return an engine of the vLLM in a trainer's process, and its context length; `generation` is TRL's `VLLMGeneration`.

    Raises `ConfigError` with tensor parallelism: its ranks would have to sample the same requests at the same steps.
    """
    if (size := generation.tensor_parallel_size) > 1:
        raise ConfigError(
            f"vllm_tensor_parallel_size={size} with vllm_mode='colocate': rollouts need a vLLM in each process;"
            " use vllm_tensor_parallel_size=1, or vllm_mode='server'"
        )
    engine = ColocatedEngine(generation.llm)
    return engine, engine.max_model_len


@contextmanager
def vllm_awake(trainer: Any) -> Iterator[None]:
    """Keep the vLLM in a trainer's process awake, in the order in which TRL wakes it up for its own sampling.

    It discards its weights when it sleeps. TRL wakes it up and sends weights after a step; without a step in between, as
    in two evaluations, this does. Every rank has to come here, because weights are gathered from all of them.
    """
    generation = getattr(trainer, "vllm_generation", None)
    if generation is None or generation.mode != "colocate" or not generation.enable_sleep_mode:
        yield
        return
    if generation._llm_weights_sleeping:
        generation.sync_weights()
    generation.llm.wake_up(tags=["kv_cache"])
    try:
        yield
    finally:
        generation.llm.sleep(level=2)
        generation._llm_weights_sleeping = True


def served_model(base_url: str) -> tuple[str, int | None]:
    """Return name and context length of the first model that a server lists. Raises `PolicyError` if there is none."""
    url = f"{base_url.rstrip('/').removesuffix('/v1')}/v1/models"

    async def ask() -> Response | str:
        async with HTTPClient() as client:
            return await probe(url, client)

    answer = run_apart(ask())
    models = listed_models(answer) if isinstance(answer, Response) else None
    if not models:
        reason = answer if isinstance(answer, str) else f"status {answer.status}"
        raise PolicyError(f"no list of models at {url}: {reason}", endpoint=url)
    return models[0]["id"], models[0].get("max_model_len")


def model_engine(trainer: Any) -> Engine:
    """Return an engine of the trainer's model in this process. Raises `ConfigError` if no process holds all weights."""
    from gymgate.tokens.engines.huggingface import HuggingFaceEngine

    if sharding := _sharding(trainer.accelerator):
        raise ConfigError(
            f"the model is sharded over processes ({sharding}), which do not sample at the same time;"
            " use use_vllm=True with vllm_mode='server'"
        )
    tokenizer, weak = tokenizer_of(trainer.processing_class), weakref.proxy(trainer)
    return HuggingFaceEngine(
        lambda: weak.accelerator.unwrap_model(weak.model),
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        version=lambda: weak.state.global_step,
    )


def _sharding(accelerator: Any) -> str | None:
    kind = getattr(accelerator.distributed_type, "value", accelerator.distributed_type)
    if kind == "DEEPSPEED":
        return "DeepSpeed ZeRO-3" if accelerator.state.deepspeed_plugin.zero_stage == 3 else None
    return kind if kind in ("FSDP", "MEGATRON_LM") else None
