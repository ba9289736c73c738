"""Imports what every NeMo Gym server needs, on one thread, and defers packages that no server needs to answer."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
import types
from typing import Any

from ..names import PRELOADED, gym_place

DEFERRED = ("pandas", "scipy", "wandb", "ray", "mlflow")
"""Packages that NeMo Gym's base modules import for reports and clusters: a second and 150 MB that no server
needs to answer. An explicit import in a server still loads it."""
ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class Deferred:
    """A name of a package that is imported when the name is first used."""

    def __init__(self, module: str, name: str = "") -> None:
        self._target = (module, name)

    def _real(self) -> Any:
        module, name = self._target
        value = importlib.import_module(module)
        return getattr(value, name) if name else value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._real()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._real(), name)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self._real())

    def __or__(self, other: Any) -> Any:
        return Any

    __ror__ = __or__


class DeferredModule(types.ModuleType):
    """Stands for a package while NeMo Gym is imported."""

    __path__ = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return importlib.metadata.version(self.__name__)
        if name.startswith("__"):
            raise AttributeError(name)
        return Deferred(self.__name__, name)


class DeferringFinder:
    """Finds every module of the deferred packages, and makes it empty."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in DEFERRED:
            return importlib.util.spec_from_loader(name, self)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return DeferredModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def preload() -> None:
    """Import what every server needs, on one thread."""
    os.environ.update(dict.fromkeys(ONE_THREAD, "1"))
    finder = DeferringFinder()
    sys.meta_path.insert(0, finder)
    try:
        for name in PRELOADED:
            gym_place(name)
        for name in ("uvicorn", "fastapi", "uvloop", "httptools", "runpy"):
            if importlib.util.find_spec(name) is not None:
                importlib.import_module(name)
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] in DEFERRED]:
            del sys.modules[name]
    for name in ONE_THREAD:  # a server that computes may use its cores
        del os.environ[name]
