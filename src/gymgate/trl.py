"""NeMo Gym environments in TRL: `from gymgate.trl import NeMoGymSpec`. Needs `pip install 'gymgate[nemogym,trl]'`."""

from gymgate.integrations.trl import NeMoGymSpec

__all__ = ["NeMoGymSpec"]
