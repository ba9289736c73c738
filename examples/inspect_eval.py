"""A NeMo Gym environment in Inspect AI, with a mock model: no key, no network.

    pip install '.[inspect]'
    python examples/inspect_eval.py

The mock answers as the first row of the environment asks. With a real model:
`inspect eval gymgate/nemo_gym --model openai/gpt-5`.
"""

from __future__ import annotations

from typing import Any

from inspect_ai import eval as inspect_eval
from inspect_ai.model import ModelOutput, ModelUsage, get_model

from gymgate.inspect import nemo_gym

STEPS = [("increment_counter", {"count": 1}), ("increment_counter", {"count": 2}), ("get_counter_value", {})]


def answer(messages: list[Any], *_: Any) -> ModelOutput:
    """Call one tool per turn, then answer."""
    done = sum(message.role == "tool" for message in messages)
    if done < len(STEPS):
        output = ModelOutput.for_tool_call("mock", *STEPS[done])
    else:
        output = ModelOutput.from_content("mock", "The counter is at 6.")
    output.usage = ModelUsage(input_tokens=10, output_tokens=5, total_tokens=15)
    return output


def main() -> None:
    model = get_model("mockllm/model", custom_outputs=answer)
    (log,) = inspect_eval(
        nemo_gym(env="example_session_state_mgmt"), model=model, limit=1, epochs=2, display="plain"
    )
    assert log.results is not None
    print(f"{log.status}: mean reward {log.results.scores[0].metrics['mean'].value}, log {log.location}")


if __name__ == "__main__":
    main()
