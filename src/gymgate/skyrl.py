"""NeMo Gym environments in SkyRL, for its entrypoint. Needs the extra `skyrl`, and Python 3.12 or later."""

try:
    from gymgate.integrations.skyrl.dataset import NeMoGymDataset
    from gymgate.integrations.skyrl.engine import GeneratorSettings
    from gymgate.integrations.skyrl.generator import NeMoGymGenerator
except ModuleNotFoundError as error:
    if (error.name or "").startswith("gymgate"):
        raise
    from gymgate.core.errors import MissingExtraError
    from gymgate.core.extras import install_command

    message = f"{error.name} is not installed: {install_command('skyrl')} (SkyRL needs Python >= 3.12)"
    raise MissingExtraError(message) from error

__all__ = ["GeneratorSettings", "NeMoGymDataset", "NeMoGymGenerator"]
