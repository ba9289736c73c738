"""Rollouts as OpenTelemetry spans, read from the SDK's in-memory exporter."""

from __future__ import annotations

import builtins
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from gymgate import RolloutTracer
from gymgate.core.config import HTTPEndpoint, ReplayEndpoint
from gymgate.core.errors import ConfigError, MissingExtraError
from gymgate.core.extras import install_command
from gymgate.results import spans as spans_module
from gymgate.results.spans import CAPTURE_CONTENT
from gymgate.rollouts import ModelCall, Rollout, RolloutError, Timing, Usage
from gymgate.runs.collected.tracing import models_of
from gymgate.runs.stored.record import CollectedRollout

RESULT: dict[str, Any] = {
    "responses_create_params": {"input": [{"role": "user", "content": "the secret"}]},
    "response": {
        "output": [
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "function_call", "name": "look", "arguments": '{"a": 1}', "call_id": "c"},
            {"type": "function_call_output", "output": "cold", "call_id": "c"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "it is"}]},
        ]
    },
}
CALLS = [
    ModelCall(
        index=0, dialect="chat", status_code=200, started_s=1.0, duration_s=2.0, finish_reason="tool_calls",
        usage=Usage(input_tokens=30, output_tokens=7, cached_tokens=10),
    ),
    ModelCall(
        index=1, dialect="chat", status_code=200, started_s=4.0, duration_s=1.0, model_server="judge",
        response={"model": "judge-2"},
    ),
]  # fmt: skip
OF_A_RUN: dict[str, Any] = {
    "row_key": "0123456789abcdef",
    "source": "rows.jsonl",
    "line": 3,
    "finished": 1_700_000_010.0,
}


def made(**fields: Any) -> CollectedRollout:
    given: dict[str, Any] = {
        "id": "r1",
        "environment": "weather",
        "agent": "weather_agent",
        "status": "completed",
    }
    given |= {
        "reward": 0.5,
        "timing": Timing(total_s=8.0, model_s=2.0, judge_s=1.0),
        "calls": CALLS,
        "result": RESULT,
    }
    return CollectedRollout(**{**given, **OF_A_RUN, **fields})


@pytest.fixture
def spans() -> Iterator[tuple[TracerProvider, InMemorySpanExporter]]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider, exporter
    provider.shutdown()


def record(
    spans: tuple[TracerProvider, InMemorySpanExporter], rollout: Rollout, **options: Any
) -> tuple[ReadableSpan, list[ReadableSpan]]:
    """The span of a rollout, and its children."""
    provider, exporter = spans
    exporter.clear()
    RolloutTracer(provider, **options).record(rollout, models={"policy_model": "small", "*": "big"})
    *children, root = exporter.get_finished_spans()
    return root, children


def test_a_rollout_has_a_child_for_each_model_call(
    spans: tuple[TracerProvider, InMemorySpanExporter],
) -> None:
    root, [policy, judge] = record(spans, made())
    assert (root.name, root.parent, root.status.status_code) == ("rollout weather", None, StatusCode.UNSET)
    assert (root.start_time, root.end_time) == (1_700_000_002 * 10**9, 1_700_000_010 * 10**9)
    assert root.attributes == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": "weather_agent",
        "gymgate.environment": "weather",
        "gymgate.rollout.id": "r1",
        "gymgate.rollout.status": "completed",
        "gymgate.rollout.reward": 0.5,
        "gymgate.rollout.repeat": 0,
        "gymgate.rollout.attempt": 0,
        "gymgate.row.key": "0123456789abcdef",
        "gymgate.row.source": "rows.jsonl",
        "gymgate.row.line": 3,
        "gymgate.seconds.waiting_and_set_up": 1.0,
        "gymgate.seconds.policy": 2.0,
        "gymgate.seconds.tools_and_agent": 1.0,
        "gymgate.seconds.judges": 1.0,
        "gymgate.seconds.scoring": 3.0,
    }
    assert [child.parent for child in (policy, judge)] == [root.context, root.context]
    assert (policy.name, policy.kind) == ("chat small", SpanKind.CLIENT)
    assert (policy.start_time, policy.end_time) == (1_700_000_003 * 10**9, 1_700_000_005 * 10**9)
    assert policy.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "small",
        "gen_ai.response.finish_reasons": ("tool_calls",),
        "gen_ai.usage.input_tokens": 30,
        "gen_ai.usage.output_tokens": 7,
        "gen_ai.usage.cache_read.input_tokens": 10,
        "http.response.status_code": 200,
        "gymgate.model_server": "policy_model",
        "gymgate.call.index": 0,
    }
    assert judge.attributes is not None
    assert (judge.name, judge.attributes["gymgate.model_server"]) == ("chat big", "judge")
    assert judge.attributes["gen_ai.response.model"] == "judge-2"
    assert "gen_ai.usage.output_tokens" not in judge.attributes


def test_a_failed_rollout_has_no_reward_and_says_why(
    spans: tuple[TracerProvider, InMemorySpanExporter],
) -> None:
    error = RolloutError(kind="policy", type="PolicyError", message="no capacity today", status_code=503)
    call = CALLS[0].model_copy(update={"status_code": 503, "error": "no capacity today", "usage": Usage()})
    root, [child] = record(spans, made(status="failed", reward=None, error=error, calls=[call], result=None))
    assert root.attributes is not None
    assert child.attributes is not None
    assert (root.attributes["error.type"], root.attributes["gymgate.rollout.status"]) == (
        "PolicyError",
        "failed",
    )
    assert "gymgate.rollout.reward" not in root.attributes
    assert (root.status.status_code, root.status.description) == (StatusCode.ERROR, "no capacity today")
    assert (child.attributes["error.type"], child.status.status_code) == ("503", StatusCode.ERROR)


def test_a_masked_reward_is_no_reward(spans: tuple[TracerProvider, InMemorySpanExporter]) -> None:
    root, _ = record(spans, made(status="masked", reward=0.0))
    assert root.attributes is not None
    assert (root.attributes["gymgate.rollout.status"], root.status.status_code) == (
        "masked",
        StatusCode.UNSET,
    )
    assert "gymgate.rollout.reward" not in root.attributes


@pytest.mark.parametrize(
    ("variable", "option", "there"), [("", None, False), ("true", None, True), ("true", False, False)]
)
def test_contents_only_where_asked_for(
    variable: str, option: bool | None, there: bool, monkeypatch: pytest.MonkeyPatch,
    spans: tuple[TracerProvider, InMemorySpanExporter],
) -> None:  # fmt: skip
    monkeypatch.setenv(CAPTURE_CONTENT, variable)
    root, children = record(spans, made(), contents=option)
    assert ("the secret" in root.to_json()) is there
    assert not any("the secret" in child.to_json() for child in children)
    if there:
        assert root.attributes is not None
        output = json.loads(str(root.attributes["gen_ai.output.messages"]))
        assert [message["role"] for message in output] == ["assistant", "assistant", "tool", "assistant"]
        assert output[1]["parts"] == [
            {"type": "tool_call", "id": "c", "name": "look", "arguments": '{"a": 1}'}
        ]
        assert output[2]["parts"] == [{"type": "tool_call_response", "id": "c", "response": "cold"}]


@pytest.mark.parametrize(
    "answer",
    [
        {**RESULT, "response": "none of Responses"},
        {"responses_create_params": ["?"], "response": {"output": [{"type": 5}]}},
    ],
)
def test_an_agent_may_answer_anything(
    answer: dict[str, Any], spans: tuple[TracerProvider, InMemorySpanExporter]
) -> None:
    _, children = record(spans, made(result=answer), contents=True)
    assert len(children) == len(CALLS)


def test_it_is_a_child_of_the_current_span_and_of_the_traceparent(
    monkeypatch: pytest.MonkeyPatch, spans: tuple[TracerProvider, InMemorySpanExporter]
) -> None:
    monkeypatch.setenv("TRACEPARENT", f"00-{'a' * 32}-{'b' * 16}-01")
    root, _ = record(spans, made())
    assert root.parent is not None
    assert (root.context.trace_id, root.parent.span_id) == (int("a" * 32, 16), int("b" * 16, 16))
    with spans[0].get_tracer("training").start_as_current_span("step") as step:
        root, _ = record(spans, made())
    assert root.parent == step.get_span_context()


class Broken(SpanExporter):
    def export(self, spans: Any) -> SpanExportResult:
        raise OSError("the collector is gone")


def test_an_exporter_that_fails_raises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(Broken()))
    with RolloutTracer(provider) as tracer:
        tracer.record(made())
    assert "the collector is gone" in caplog.text
    provider.shutdown()


def test_closing_waits_only_so_long_for_an_exporter_that_hangs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    released = threading.Event()

    class Hanging(InMemorySpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            released.wait(20)
            return super().export(spans)

    monkeypatch.setattr(spans_module, "FLUSH_S", 0.1)
    monkeypatch.setattr(spans_module, "_exporters", lambda: [Hanging()])
    tracer = RolloutTracer()
    tracer.record(made())
    tracer.close()
    assert "traces are lost" in caplog.text
    released.set()


def test_a_program_with_a_provider_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    with RolloutTracer() as tracer:
        tracer.record(made(calls=[]))
    tracer.record(made(calls=[]))  # closing ended nothing of the program's
    assert len(exporter.get_finished_spans()) == 2
    provider.shutdown()


def test_an_exporter_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin")
    with pytest.raises(ConfigError, match="zipkin"):
        RolloutTracer()


def test_without_the_extra_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError) as raised:
        RolloutTracer()
    assert install_command("otel") in str(raised.value)
    assert "\n" not in str(raised.value)


def test_models_are_those_of_the_endpoints() -> None:
    endpoint = HTTPEndpoint(base_url="http://host/v1", model="small")
    judges = {"judge": endpoint.model_copy(update={"model": "big"}), "other": "policy", "third": "none"}
    assert models_of(endpoint, judges) == {"policy_model": "small", "judge": "big", "other": "small"}  # type: ignore[arg-type]
    assert models_of(ReplayEndpoint(rollouts=("r",)), {}) == {}
