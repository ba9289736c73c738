"""NeMo Gym as a verifiers environment: the taskset, harness and env that `nemo_gym_env` exports.

    vf-eval nemo-gym-env --env.taskset.env mcqa ...
    env = nemo_gym_env.load_environment(env="mcqa")                  # a verifiers.v1.Env, for a trainer

`knobs` works without verifiers, whose import takes seconds.
"""
