"""Inspect's mock model as the policy of a real agent: what the agent gets, and what the model gets back."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from inspect_ai import eval as inspect_eval
from inspect_ai.event import ModelEvent
from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    ContentReasoning,
    ContentText,
    ModelOutput,
    ModelUsage,
    StopReason,
    get_model,
)
from inspect_ai.tool import ToolCall

from gymgate.inspect import nemo_gym
from support.inspected import samples_of, score_of
from support.judges import judged, row

CONTINUED = '[{"role": "user", "content": "hello"}, {"role": "assistant", "content": text}, {"role": "user", "content": text}]'
"""A judge's question that repeats the agent's conversation: Inspect's bridge takes it for the agent's next turn."""

pytestmark = [pytest.mark.gym, pytest.mark.timeout(180)]


def answer(content: Any, calls: list[ToolCall] | None = None, stop: StopReason = "stop") -> ModelOutput:
    message = ChatMessageAssistant(content=content, tool_calls=calls)
    usage = ModelUsage(input_tokens=3, output_tokens=4, total_tokens=7)
    return ModelOutput(
        model="mock", choices=[ChatCompletionChoice(message=message, stop_reason=stop)], usage=usage
    )


def test_reasoning_and_a_providers_data_come_back_as_they_were(tmp_path: Path) -> None:
    """The agent sees reasoning as reasoning and text as text; the model gets signature and internal data again."""
    asked: list[list[ChatMessage]] = []
    signed = ContentReasoning(reasoning="add one", signature="s1g", internal={"r": 1})
    marked = ContentText(text="adding", internal={"t": 2})
    calls = [ToolCall(id="c1", function="increment_counter", arguments={"count": 3})]

    def model(messages: list[ChatMessage], *_: Any) -> ModelOutput:
        asked.append(messages)
        return answer([signed, marked], calls, "tool_calls") if len(asked) == 1 else answer("done")

    mock = get_model("mockllm/model", custom_outputs=model)
    (log,) = inspect_eval(nemo_gym(), model=mock, limit=1, display="none", log_dir=str(tmp_path))
    (sample,) = samples_of(log)
    assert sample.error is None, sample.error
    assert score_of(sample).value == 1.0  # 3 at the start, 6 expected
    items = sample.store["nemo_gym"]["result"]["response"]["output"]
    assert [item["type"] for item in items[:4]] == [
        *("reasoning", "message", "function_call", "function_call_output")
    ]
    assert items[0]["summary"][0]["text"] == "add one"
    assert items[1]["content"][0]["text"] == "adding"
    (back,) = [message for message in asked[1] if isinstance(message, ChatMessageAssistant)]
    assert isinstance(back.content, list)
    reasoning, text = back.content
    assert isinstance(reasoning, ContentReasoning)
    assert (reasoning.reasoning, reasoning.signature) == ("add one", "s1g")
    assert isinstance(text, ContentText)
    assert (text.text, text.internal) == ("adding", {"t": 2})


def test_a_turns_text_comes_back_as_the_model_wrote_it(tmp_path: Path) -> None:
    """A list of one text is sent with a new line before it, by Inspect's providers for chat."""
    asked: list[list[ChatMessage]] = []

    def model(messages: list[ChatMessage], *_: Any) -> ModelOutput:
        asked.append(messages)
        return answer("The capital is Paris.")

    mock = get_model("mockllm/model", custom_outputs=model)
    task = nemo_gym(env="example_multi_turn_gymnasium")
    (log,) = inspect_eval(task, model=mock, limit=1, display="none", log_dir=str(tmp_path))
    (sample,) = samples_of(log)
    assert sample.error is None, sample.error
    assert len(asked) > 1
    said = [each.content for each in asked[-1] if isinstance(each, ChatMessageAssistant)]
    assert said == ["The capital is Paris."] * (len(asked) - 1)


def test_a_conversation_that_does_not_fit_the_model_is_no_answer(tmp_path: Path) -> None:
    mock = get_model(
        "mockllm/model", custom_outputs=lambda *_: answer("prompt is too long", stop="model_length")
    )
    (log,) = inspect_eval(
        nemo_gym(), model=mock, limit=1, display="none", log_dir=str(tmp_path), fail_on_error=False
    )
    (sample,) = samples_of(log)
    assert sample.error is None
    assert math.isnan(score_of(sample).value)
    assert score_of(sample).explanation == "unscored (context_length)"


@pytest.mark.parametrize("named", ["judge_model", "policy_model"])
def test_a_judge_may_be_inspects_model_and_stays_out_of_the_conversation(tmp_path: Path, named: str) -> None:
    """Whether `models` makes the policy a judge or the environment's config does. Both models' calls are events."""
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row(way)) + "\n" for way in ("raising", "call_judge")))

    def model(messages: list[ChatMessage], *_: Any) -> ModelOutput:
        return answer("my answer" if messages[-1].text == "hello" else "right")

    config = Path(judged(tmp_path))
    config.write_text(config.read_text().replace("name: judge_model}", f"name: {named}}}", 1))
    app = config.parents[1] / "app.py"
    app.write_text(app.read_text().replace('json={"input": text}', f'json={{"input": {CONTINUED}}}'))
    judge = "policy" if named == "judge_model" else "none"
    models = {"judge_model": judge, "other_model": "none", "judge_base_url": "none"}
    task = nemo_gym(env=str(config), data=str(data), models=models)
    mock = get_model("mockllm/model", custom_outputs=model)
    (log,) = inspect_eval(task, model=mock, display="none", log_dir=str(tmp_path))
    for sample in samples_of(log):
        assert sample.error is None, sample.error.message
        assert score_of(sample).value == 1.0
        assert [message.text for message in sample.messages] == ["hello", "my answer"]
        asked = [event.input[-1].text for event in sample.events if isinstance(event, ModelEvent)]
        assert asked == ["hello", "my answer"]


def test_the_example_runs(tmp_path: Path) -> None:
    program = Path(__file__).parents[2] / "examples" / "inspect_eval.py"
    done = subprocess.run(
        [sys.executable, str(program)], cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mean reward 1.0" in done.stdout
