"""Stacks: NeMo Gym's servers for one config, started once, shared by all who acquire them, stopped after the last.

async with acquire(StackConfig(environments=("mcqa",))) as stack:
    rollout = await stack.run(row, policy=HTTPEndpoint(base_url="http://host:8000/v1"))
"""

from gymgate.gateway.backends.base import PolicyCallable
from gymgate.stack.acquisition import acquire, connect
from gymgate.stack.client.stack import AgentInfo, Policy, Stack
from gymgate.stack.sync import SyncStack, acquire_sync

__all__ = [
    "AgentInfo",
    "Policy",
    "PolicyCallable",
    "Stack",
    "SyncStack",
    "acquire",
    "acquire_sync",
    "connect",
]
