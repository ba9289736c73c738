"""One environment, one policy: run a few rows and print what came back.

Without arguments the policy replays the rollouts that NeMo Gym ships, so no model and no key are needed:

    python examples/run_environment.py
    python examples/run_environment.py workplace_assistant --base-url http://host:8000/v1 --model MODEL
"""

from __future__ import annotations

import argparse
import asyncio

import gymgate


async def main(environment: str, base_url: str | None, model: str | None) -> None:
    policy: gymgate.Endpoint
    if base_url:
        policy = gymgate.HTTPEndpoint(base_url=base_url, model=model, api_key_env="OPENAI_API_KEY")
    else:
        policy = gymgate.replay_endpoint(environment)
    rows = gymgate.open_rows(environment)
    async with gymgate.acquire(gymgate.StackConfig(environments=(environment,))) as stack:
        rollouts = await asyncio.gather(*(stack.run(row.data, policy=policy) for row in rows))
    for rollout in rollouts:
        print(rollout.status, rollout.reward, rollout.error.message if rollout.error else "")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("environment", nargs="?", default="example_session_state_mgmt")
    parser.add_argument("--base-url")
    parser.add_argument("--model")
    args = parser.parse_args()
    asyncio.run(main(args.environment, args.base_url, args.model))
