"""NeMo Gym as a verifiers environment: the taskset, harness and env that `nemo_gym_env` exports.

    vf-eval nemo-gym-env --env.taskset.env mcqa ...
    env = nemo_gym_env.load_environment(env="mcqa")                  # a verifiers.v1.Env, for a trainer

What is here works without verifiers, whose import takes seconds.
"""

from __future__ import annotations

PLUGIN_ID = "nemo-gym-env"
"""verifiers' name of this plugin: the name of the module `nemo_gym_env`."""
