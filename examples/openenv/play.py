"""Play a NeMo Gym environment through OpenEnv, as a model would: no key, no network.

pip install '.[openenv]'
gymgate serve-env example_session_state_mgmt --port 8000    # in another terminal
python examples/openenv/play.py http://127.0.0.1:8000
"""

from __future__ import annotations

import sys

from openenv.core import GenericEnvClient


def main(url: str = "http://127.0.0.1:8000") -> None:
    with GenericEnvClient(base_url=url).sync() as env:
        start = env.reset(index=0)
        print(start.observation["messages"][-1]["content"])
        for name, arguments in (
            ("increment_counter", {"count": 1}),
            ("increment_counter", {"count": 2}),
            ("get_counter_value", {}),
        ):
            step = env.step({"type": "call_tool", "tool_name": name, "arguments": arguments})
            print(name, arguments, "->", step.observation["result"])
        last = env.step({"type": "message", "content": "The counter is at 6."})
        print("reward", last.reward)


if __name__ == "__main__":
    main(*sys.argv[1:])
