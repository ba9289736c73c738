"""NeMo Gym environments in OpenEnv. Needs the extra `openenv`, and `trl` to train."""

from gymgate.integrations.versions import require

require("openenv")

from gymgate.integrations.openenv.sessions import NeMoGymSession, NeMoGymSessionFactory  # noqa: E402

__all__ = ["NeMoGymSession", "NeMoGymSessionFactory"]
