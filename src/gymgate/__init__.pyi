# Every public name and the module that has it. `gymgate/__init__.py` reads this list; there is no other.

from gymgate.api import list_environments as list_environments
from gymgate.api import open_rows as open_rows
from gymgate.api import replay_endpoint as replay_endpoint
from gymgate.api import run_row as run_row
from gymgate.collection.pace import Pace as Pace
from gymgate.collection.record import CollectedRollout as CollectedRollout
from gymgate.collection.stream import collect as collect
from gymgate.config import CallableEndpoint as CallableEndpoint
from gymgate.config import Endpoint as Endpoint
from gymgate.config import EnvironmentConfig as EnvironmentConfig
from gymgate.config import HTTPEndpoint as HTTPEndpoint
from gymgate.config import ReplayEndpoint as ReplayEndpoint
from gymgate.config import RolloutLimits as RolloutLimits
from gymgate.config import RuntimeConfig as RuntimeConfig
from gymgate.config import StackConfig as StackConfig
from gymgate.dataset import Row as Row
from gymgate.errors import ConfigError as ConfigError
from gymgate.errors import DataError as DataError
from gymgate.errors import EnvironmentServerError as EnvironmentServerError
from gymgate.errors import GymgateError as GymgateError
from gymgate.errors import MissingExtraError as MissingExtraError
from gymgate.errors import NeedMissingError as NeedMissingError
from gymgate.errors import PolicyError as PolicyError
from gymgate.errors import RolloutTimeoutError as RolloutTimeoutError
from gymgate.errors import ServerDiedError as ServerDiedError
from gymgate.errors import SetupError as SetupError
from gymgate.errors import StackLostError as StackLostError
from gymgate.errors import StackStartError as StackStartError
from gymgate.errors import UnknownConversationError as UnknownConversationError
from gymgate.rollout import ModelCall as ModelCall
from gymgate.rollout import Outcome as Outcome
from gymgate.rollout import Rollout as Rollout
from gymgate.rollout import RolloutError as RolloutError
from gymgate.rollout import Segment as Segment
from gymgate.rollout import Timing as Timing
from gymgate.rollout import Usage as Usage
from gymgate.rollout import outcome_of as outcome_of
from gymgate.runtime import Runtime as Runtime
from gymgate.runtime import ensure_runtime as ensure_runtime
from gymgate.stack import Stack as Stack
from gymgate.stack import SyncStack as SyncStack
from gymgate.stack import acquire as acquire
from gymgate.stack import acquire_sync as acquire_sync
from gymgate.stack import connect as connect

__version__: str
