"""Rollouts as OpenTelemetry spans, made of their finished records: one for the rollout, a child for each model call."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import entry_points
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from gymgate.core import codec
from gymgate.core.errors import ConfigError, MissingExtraError
from gymgate.core.extras import install_command
from gymgate.results.report_data import time_split
from gymgate.rollouts import ModelCall, Rollout, outcome_of
from gymgate.rollouts.transcript import items_of, text_of

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

CAPTURE_CONTENT = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
_ON = ("1", "true", "span_only", "span_and_event")
_PLACE = {
    "row.key": "row_key",
    "row.source": "source",
    "row.line": "line",
    "rollout.repeat": "repeat",
    "rollout.seed": "seed",
    "rollout.attempt": "attempt",
}
"""Attribute to the field that a rollout of a run has."""
FLUSH_S = 10.0
"""For the last spans to be exported, when the tracer is closed."""

logger = logging.getLogger(__name__)


class RolloutTracer:
    """Exports finished rollouts as OpenTelemetry spans, with the names of its GenAI conventions.

    The `OTEL_*` variables say where to, and the end of the `with` block exports the last ones. In a program that has set
    OpenTelemetry up, spans go to its tracer provider, or to `provider`. `contents` adds the conversation, which may hold
    secrets; `None`: as `OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT` says. Raises `MissingExtraError` without the
    extra `otel`, and `ConfigError` for an exporter that is not installed.
    """

    def __init__(self, provider: TracerProvider | None = None, *, contents: bool | None = None) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.sdk import trace as _  # noqa: F401
        except ImportError as error:
            raise MissingExtraError(f"traces need OpenTelemetry's SDK: {install_command('otel')}") from error
        default = os.environ.get(CAPTURE_CONTENT, "").lower() in _ON
        self.contents = default if contents is None else contents
        self._own: TracerProvider | None = None
        if provider is None and isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            provider = self._own = _provider_by_environment()
        self._tracer = trace.get_tracer("gymgate", tracer_provider=provider)

    def record(
        self,
        rollout: Rollout,
        *,
        ended: float | None = None,
        models: Mapping[str, str] | None = None,
    ) -> None:
        """Make the spans of a finished rollout, as children of the current span if there is one.

        `ended` is in seconds since 1970; `None`: the record's own time, or now. `models` are names of models by model server
        (`*` is for all others), for records without bodies. Never raises: no rollout is lost for its trace.
        """
        try:
            self._record(rollout, ended or getattr(rollout, "finished", None) or time.time(), models or {})
        except Exception:
            logger.warning("rollout %s has no trace", rollout.id, exc_info=True)

    def close(self) -> None:
        """Export what is left, for `FLUSH_S` seconds at most. A tracer provider of the program's own stays as it is."""
        if self._own is None:
            return
        closing = threading.Thread(target=self._own.shutdown, daemon=True)  # which takes as long as it takes
        closing.start()
        closing.join(FLUSH_S)
        if closing.is_alive():
            logger.warning("traces are lost: not exported within %g s", FLUSH_S)
        self._own = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _record(self, rollout: Rollout, ended: float, models: Mapping[str, str]) -> None:
        from opentelemetry import trace

        begun = ended - rollout.timing.total_s
        attributes = {**_attributes(rollout), **(_messages(rollout) if self.contents else {})}
        span = self._tracer.start_span(
            f"rollout {rollout.environment}",
            context=_incoming(),
            attributes=_known(attributes),
            start_time=_ns(begun),
        )
        context = trace.set_span_in_context(span)
        for call in rollout.calls:
            model = models.get(call.model_server, models.get("*"))
            attributes = _call_attributes(call, model)
            child = self._tracer.start_span(
                f"chat {attributes['gen_ai.request.model'] or call.model_server}",
                context=context,
                kind=trace.SpanKind.CLIENT,
                attributes=_known(attributes),
                start_time=_ns(begun + call.started_s),
            )
            if call.error is not None:
                _fail(child, str(call.status_code or "_OTHER"), call.error)
            child.end(_ns(begun + call.started_s + call.duration_s))
        if rollout.error is not None:
            _fail(span, rollout.error.type, rollout.error.message)
        span.end(_ns(ended))


def _provider_by_environment() -> TracerProvider:
    """Return a tracer provider with the exporters that the `OTEL_*` variables choose."""
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create()
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "gymgate"}))
    provider = TracerProvider(resource=resource)
    for exporter in _exporters():
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _exporters() -> Iterator[Any]:
    """Yield the exporters of `OTEL_TRACES_EXPORTER`, by the names under which packages register them."""
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL"
    )
    otlp = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
    group = "opentelemetry_traces_exporter"
    for name in (os.environ.get("OTEL_TRACES_EXPORTER") or "otlp").split(","):
        name = name.strip()
        if name == "none":
            continue
        exporters = entry_points(group=group, name=otlp if name == "otlp" else name)
        if not exporters:
            names = ", ".join(sorted({entry.name for entry in entry_points(group=group)})) or "none"
            raise ConfigError(
                f"OpenTelemetry's exporter {otlp if name == 'otlp' else name!r} is not installed; available: {names}"
            )
        yield next(iter(exporters)).load()()


def _incoming() -> Context | None:
    """Return the context of the `TRACEPARENT` variable where no span is current; `None`: the current one."""
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    if trace.get_current_span().get_span_context().is_valid or "TRACEPARENT" not in os.environ:
        return None
    carrier = {name.lower(): os.environ.get(name, "") for name in ("TRACEPARENT", "TRACESTATE")}
    return TraceContextTextMapPropagator().extract(carrier)


def _attributes(rollout: Rollout) -> dict[str, Any]:
    """Return the attributes of a rollout's span. Only what was measured has one."""
    split = time_split(rollout.timing.total_s, rollout.calls)
    place = {f"gymgate.{name}": getattr(rollout, field, None) for name, field in _PLACE.items()}
    return {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": rollout.agent,
        "gymgate.environment": rollout.environment,
        "gymgate.rollout.id": rollout.id,
        "gymgate.rollout.status": rollout.status,
        "gymgate.rollout.limit": rollout.limit,
        "gymgate.rollout.reward": outcome_of(rollout).reward,
        **place,
        **{
            f"gymgate.seconds.{name.replace(' ', '_').replace('-', '_')}": spent
            for name, spent in split.items()
        },
    }


def _call_attributes(call: ModelCall, model: str | None) -> dict[str, Any]:
    bodies = (call.upstream_request, call.request)
    answers = (call.upstream_response, call.response)
    usage = call.usage
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": model or _model_in(bodies),
        "gen_ai.response.model": _model_in(answers),
        "gen_ai.response.finish_reasons": [call.finish_reason] if call.finish_reason else None,
        "gen_ai.usage.input_tokens": usage.input_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.usage.reasoning.output_tokens": usage.reasoning_tokens,
        "http.response.status_code": call.status_code,
        "gymgate.model_server": call.model_server,
        "gymgate.call.index": call.index,
        "gymgate.call.retries": call.details.get("retries"),
    }


def _model_in(bodies: Iterable[Mapping[str, Any] | None]) -> str | None:
    models = (body.get("model") for body in bodies if body is not None)
    return next((model for model in models if isinstance(model, str)), None)


def _messages(rollout: Rollout) -> dict[str, Any]:
    """Return the conversation of a rollout's result, as far as it is there, in the form of the GenAI conventions."""
    prompt, answered = items_of(rollout.result)
    written = {
        "gen_ai.input.messages": [*map(_message, prompt)],
        "gen_ai.output.messages": [*map(_message, answered)],
    }
    return {name: codec.dumps(messages).decode() for name, messages in written.items() if messages}


def _message(item: Mapping[str, Any]) -> dict[str, Any]:
    kind = str(item.get("type") or "message")
    if kind == "message":
        part = {"type": "text", "content": text_of(item.get("content"))}
        return {"role": item.get("role") or "assistant", "parts": [part]}
    if kind == "reasoning":
        text = text_of(item.get("content")) or text_of(item.get("summary"))
        return {"role": "assistant", "parts": [{"type": "reasoning", "content": text}]}
    if kind.endswith("_output"):
        answer = {"id": item.get("call_id"), "response": text_of(item.get("output"))}
        return {"role": "tool", "parts": [{"type": "tool_call_response", **answer}]}
    arguments = item.get("arguments") or item.get("action") or item.get("input")
    call = {
        "id": item.get("call_id") or item.get("id"),
        "name": item.get("name") or kind,
        "arguments": arguments,
    }
    return {"role": "assistant", "parts": [{"type": "tool_call", **call}]}


def _fail(span: Span, kind: str, message: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, message))


def _known(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}


def _ns(seconds: float) -> int:
    return int(seconds * 1_000_000_000)
