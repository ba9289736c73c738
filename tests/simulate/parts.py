"""What the scenes use of gymgate, by one import each, so that a move in `src` is followed here alone."""

from types import SimpleNamespace

import gymgate.gateway.handler
import gymgate.gateway.newcomers
import gymgate.stack.daemon.agent_processes
import gymgate.stack.daemon.children
import gymgate.stack.daemon.process as daemon_module
import gymgate.stack.daemon.running_environment
import gymgate.stack.daemon.running_stack
from gymgate.core import codec, files
from gymgate.core.config import HTTPEndpoint, RolloutLimits, StackConfig
from gymgate.core.errors import (
    ConfigError,
    DataError,
    GymgateError,
    PolicyError,
    StackLostError,
    StackStartError,
)
from gymgate.core.http_client import HTTPClient, HTTPFailure, Request, Response, _Connection
from gymgate.gateway.handler import StreamTimes
from gymgate.gateway.server import Gateway
from gymgate.gym.row_sources import RowSource
from gymgate.gym.server_code import ServerCode
from gymgate.rollouts import Rollout, RolloutError
from gymgate.rollouts.row import make_row
from gymgate.runs.collected.run import Collection
from gymgate.runs.collected.stream import rollouts_of
from gymgate.runs.described.pace import Pace
from gymgate.runs.described.plan import PlannedRollout, RolloutPlan
from gymgate.runs.stored.layout import FAILURES, ROLLOUTS
from gymgate.runs.stored.record import CollectedRollout, read_values
from gymgate.stack.client.stack import Lease, Stack
from gymgate.stack.daemon.children import Child
from gymgate.stack.daemon.lease_holder import LeaseHolder
from gymgate.stack.daemon.plan import EnvironmentPlan
from gymgate.stack.daemon.process import Daemon
from gymgate.stack.daemon.running_environment import RunningEnvironment
from gymgate.stack.daemon.running_stack import RunningStack
from gymgate.stack.protocol import Peer, Reply
from gymgate.stack.wire import endpoint_from_wire, endpoint_to_wire, unpack_rollout

KEPT_IN_SETS = (_Connection, LeaseHolder, Child)
"""Classes of which there are sets, whose order would be that of addresses."""
gym_modules = SimpleNamespace(
    agent_processes=gymgate.stack.daemon.agent_processes,
    children=gymgate.stack.daemon.children,
    handler=gymgate.gateway.handler,
    newcomers=gymgate.gateway.newcomers,
    running_environment=gymgate.stack.daemon.running_environment,
    running_stack=gymgate.stack.daemon.running_stack,
)
"""Modules that ask the machine's processes."""

__all__ = [
    "FAILURES",
    "KEPT_IN_SETS",
    "ROLLOUTS",
    "Child",
    "CollectedRollout",
    "Collection",
    "ConfigError",
    "Daemon",
    "DataError",
    "EnvironmentPlan",
    "Gateway",
    "GymgateError",
    "HTTPClient",
    "HTTPEndpoint",
    "HTTPFailure",
    "Lease",
    "LeaseHolder",
    "Pace",
    "Peer",
    "PlannedRollout",
    "PolicyError",
    "Reply",
    "Request",
    "Response",
    "Rollout",
    "RolloutError",
    "RolloutLimits",
    "RolloutPlan",
    "RowSource",
    "RunningEnvironment",
    "RunningStack",
    "ServerCode",
    "Stack",
    "StackConfig",
    "StackLostError",
    "StackStartError",
    "StreamTimes",
    "codec",
    "daemon_module",
    "endpoint_from_wire",
    "endpoint_to_wire",
    "files",
    "gym_modules",
    "make_row",
    "read_values",
    "rollouts_of",
    "unpack_rollout",
]
