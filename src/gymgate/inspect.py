"""NeMo Gym environments in Inspect AI: `inspect eval gymgate/nemo_gym`. Needs the extra `inspect`."""

from gymgate.integrations.versions import require

require("inspect")

from gymgate.integrations.inspect.scorer import reward  # noqa: E402
from gymgate.integrations.inspect.solver import gym_agent  # noqa: E402
from gymgate.integrations.inspect.task import nemo_gym  # noqa: E402

__all__ = ["gym_agent", "nemo_gym", "reward"]
