"""Run NVIDIA NeMo Gym environments from any eval or RL SDK.

    async with gymgate.acquire(gymgate.StackConfig(environments=("mcqa",))) as stack:
        rollout = await stack.run(row, policy=gymgate.HTTPEndpoint(base_url="http://host:8000/v1"))

Everything public is reachable from here and is imported when first used. `__init__.pyi` lists the names.
"""

import ast
import importlib
from pathlib import Path
from typing import Any

__version__ = "0.2.0"

_MODULE_OF = {
    alias.name: node.module
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text()).body
    if isinstance(node, ast.ImportFrom) and node.module
    for alias in node.names
}
__all__ = [*_MODULE_OF, "__version__"]  # noqa: PLE0604 - all of them are text


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'gymgate' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
