"""NeMo Gym environments in OpenEnv. Needs `pip install 'gymgate[openenv]'`, and `gymgate[openenv,trl]` to train."""

from gymgate.integrations.versions import require

require("openenv")

from gymgate.integrations.openenv.sessions import NeMoGymSession, NeMoGymSessionFactory  # noqa: E402

__all__ = ["NeMoGymSession", "NeMoGymSessionFactory"]
