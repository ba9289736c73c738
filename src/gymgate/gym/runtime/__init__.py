"""The interpreter and virtual environment that NeMo Gym runs in: one for each release and set of requirements."""

from gymgate.gym.runtime.ensure import ensure_runtime, find_runtime, open_catalog
from gymgate.gym.runtime.interpreters import Interpreter, find_interpreters
from gymgate.gym.runtime.variables import clean_env, daemon_env
from gymgate.gym.runtime.venv import Runtime

__all__ = [
    "Interpreter",
    "Runtime",
    "clean_env",
    "daemon_env",
    "ensure_runtime",
    "find_interpreters",
    "find_runtime",
    "open_catalog",
]
