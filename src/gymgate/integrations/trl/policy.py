"""The trainer's own engine, renderer and sampling parameters as a `TokenPolicy`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gymgate.errors import ConfigError, MissingExtraError
from gymgate.tokens import Engine, TokenPolicy
from gymgate.tokens.conversation import Renderer

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def make_policy(
    trainer: Any,
    engine: Engine | Callable[[Any], Engine] | None,
    renderer: Renderer | Callable[[Any], Renderer] | None,
) -> TokenPolicy:
    """A policy that samples as `trainer` assumes: its model, its sampling parameters, at most
    `max_completion_length` tokens after the first prompt."""
    return TokenPolicy(
        _given(engine, trainer, "generate") or trainer_engine(trainer),
        _given(renderer, trainer, "render_ids") or tokenizer_renderer(trainer),
        sampling=trainer_sampling(trainer.args),
        max_completion_len=trainer.args.max_completion_length,
    )


def _given(value: Any, trainer: Any, method: str) -> Any:
    """The thing itself, or what a function of the trainer makes of it."""
    return value if value is None or hasattr(value, method) else value(trainer)


def trainer_sampling(args: Any) -> dict[str, Any]:
    """`GRPOConfig`'s sampling parameters that are set."""
    chosen = {name: getattr(args, name, None) for name in _SAMPLING}
    return {name: value for name, value in chosen.items() if value is not None}


def trainer_engine(trainer: Any) -> Engine:
    """The trainer's vLLM server, or its model in this process. `ConfigError` for vLLM in colocate mode."""
    if not getattr(trainer, "use_vllm", False):
        return model_engine(trainer)
    if trainer.args.vllm_mode != "server":
        raise ConfigError(
            f"vllm_mode={trainer.args.vllm_mode!r} offers no token endpoint; use vllm_mode='server', or use_vllm=False"
        )
    from gymgate.tokens.engines import VLLMGenerateEngine

    args = trainer.args
    url = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
    return VLLMGenerateEngine(url)


def model_engine(trainer: Any) -> Engine:
    """The trainer's model, in process."""
    from gymgate.tokens.engines.huggingface import HuggingFaceEngine

    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    return HuggingFaceEngine(
        lambda: trainer.accelerator.unwrap_model(trainer.model),
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        version=lambda: trainer.state.global_step,
    )


def tokenizer_renderer(trainer: Any) -> Renderer:
    """The renderer that the `renderers` package knows for the trainer's tokenizer."""
    try:
        from renderers import create_renderer
    except ImportError as error:
        raise MissingExtraError("renderers is not installed: pip install 'gymgate[trl]'") from error
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    made: Renderer = create_renderer(tokenizer)
    return made
