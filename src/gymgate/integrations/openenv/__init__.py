"""NeMo Gym as OpenEnv sessions to train on, and as an OpenEnv server.

`gymgate.openenv` exports the first, `gymgate serve-env` runs the second.
"""
