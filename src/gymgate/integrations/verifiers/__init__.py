"""NeMo Gym as a verifiers environment: the taskset, harness and env that `nemo_gym_env` exports.

    vf-eval nemo-gym-env --env.taskset.env mcqa ...
    env = nemo_gym_env.load_environment(env="mcqa")                  # a verifiers.v1.Env, for a trainer

What is here works without verifiers, whose import takes seconds.
"""

from __future__ import annotations

from importlib import metadata

from packaging.version import Version

from gymgate.core.errors import MissingExtraError
from gymgate.core.extras import install_command

PLUGIN_ID = "nemo-gym-env"
"""verifiers' name of this plugin: the name of the module `nemo_gym_env`."""


def require_verifiers() -> None:
    """Raise `MissingExtraError`, with the install command, unless verifiers 0.4 or later is installed."""
    install = f"run: {install_command('nemogym')}"
    try:
        version = metadata.version("verifiers")
    except metadata.PackageNotFoundError:
        raise MissingExtraError(f"verifiers is not installed; {install}") from None
    if Version(version).release < (0, 4):
        raise MissingExtraError(
            f"verifiers {version} is installed, but gymgate needs 0.4 or later; {install}"
        )
