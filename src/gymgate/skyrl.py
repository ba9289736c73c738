"""NeMo Gym environments in SkyRL, for its entrypoint. Needs the extra `skyrl`, and Python 3.12 or later."""

from gymgate.integrations.versions import failed_import, warn_if_untested

warn_if_untested("skyrl")  # first, because its import may fail for this reason

try:
    from gymgate.integrations.skyrl.dataset import NeMoGymDataset
    from gymgate.integrations.skyrl.engine import GeneratorSettings
    from gymgate.integrations.skyrl.generator import NeMoGymGenerator
except ImportError as error:
    raise failed_import("skyrl", error, "SkyRL needs Python >= 3.12") from error

__all__ = ["GeneratorSettings", "NeMoGymDataset", "NeMoGymGenerator"]
