"""NeMo Gym environments in TRL: `from gymgate.trl import NeMoGymSpec`. Needs the extra `trl`."""

from gymgate.integrations.trl.spec import NeMoGymSpec
from gymgate.integrations.versions import warn_if_untested

warn_if_untested("trl")

__all__ = ["NeMoGymSpec"]
