"""NeMo Gym environments in TRL: `from gymgate.trl import NeMoGymSpec`. Needs `pip install 'gymgate[nemogym,trl]'`."""

from gymgate.integrations.trl.spec import NeMoGymSpec

__all__ = ["NeMoGymSpec"]
