"""NeMo Gym environments in TRL: `from gymgate.trl import NeMoGymSpec`. Needs the extras `nemogym` and `trl`."""

from gymgate.integrations.trl.spec import NeMoGymSpec

__all__ = ["NeMoGymSpec"]
