"""What makes two configs one stack: everything that its rollouts depend on, under a name that gives nothing away."""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymgate
from gymgate.core.config import ReplayEndpoint, StackConfig
from gymgate.gym.catalog.entries import AGENT_KIND, PACKAGED_KINDS
from gymgate.gym.runtime.owners import pid_namespace_id
from gymgate.gym.runtime.variables import NETWORK
from gymgate.stack.content import CODE
from gymgate.stack.wire import stack_to_wire

_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages"})
_MAX_DIRECTORIES = 5000
"""Read in one tree, for its stamps: a tenth of a second. Data beside the code may be in many more."""

logger = logging.getLogger(__name__)


def identity_of(config: StackConfig, salt: bytes) -> str:
    """Return 16 hex digits, equal for two processes exactly if one stack can serve both. Blocks for milliseconds.

    Beside the config, without `linger_s`, they depend on machine and PID namespace, on gymgate's own code, on where relative
    paths lead, on the code of the user's own environments, on the values of `env_vars` and of the variables that name proxies
    and certificates, and on the endpoints of judges with their keys: calls that carry no rollout key cannot be told apart by
    lease, so leases with different keys get stacks of their own.
    `salt` is a secret of this user, so that nothing can be guessed from the digits. Raises `ConfigError` if the variable
    of a key is not set.
    """
    parts = {
        "config": stack_to_wire(config.model_copy(update={"linger_s": 0.0})),
        "variables": {name: os.environ.get(name) for name in (*config.env_vars, *NETWORK)},
        "gymgate": _package(),
        "paths": [*_paths(config)],
        "pid_namespace": pid_namespace_id(),
        "trees": {str(tree): _stamps(tree) for tree in sorted({*_trees(config)})},
    }
    text = json.dumps(parts, sort_keys=True, default=str)
    return hmac.new(salt, text.encode(errors="surrogatepass"), hashlib.sha256).hexdigest()[:16]


@functools.cache
def _package() -> tuple[str, Any]:
    """Return the directory of this gymgate and the state of its files, as of the first call in this process."""
    root = Path(gymgate.__file__).resolve().parent
    return str(root), _stamps(root)


def _paths(config: StackConfig) -> Iterator[str]:
    """Yield where the config's relative paths lead; also the working directory, if servers may resolve a path in it."""
    names = [*config.component_roots, config.runtime.interpreter, config.runtime.python, config.state_dir]
    yield from (str(_absolute(name)) for name in names if name)
    cwd = _absolute("")
    if any(spec.overrides or _absolute(spec.name).exists() for spec in config.environments) or _servers(cwd):
        yield str(cwd)


def _trees(config: StackConfig) -> Iterator[Path]:
    """Yield the directories and files that may hold code of the user's own environments, as the catalog looks for it."""
    roots = [_absolute(root) for root in config.component_roots]
    around = [_absolute("")]
    for spec in config.environments:
        configs = (spec.config,) if isinstance(spec.config, str) else spec.config or ()
        names = [Path(name).expanduser() for name in (spec.name, *configs)]
        if spec.sandbox is not None and (file := _absolute(spec.sandbox)).is_file():
            yield file
        for path in (base / name for name in names for base in (_absolute(""), *roots)):
            if path.exists():
                yield path
                around += path.resolve().parents
    for root in (*roots, *around):
        yield from _servers(root)
    for _, endpoint in config.models:
        if isinstance(endpoint, ReplayEndpoint):
            yield from map(_absolute, endpoint.rollouts)


def _servers(root: Path) -> list[Path]:
    """Return the directories of servers and environments in a tree that is laid out as NeMo Gym's."""
    return [path for kind in (*PACKAGED_KINDS, AGENT_KIND) if (path := root / kind).is_dir()]


def _stamps(path: Path) -> list[tuple[str, int, int]]:
    """Return name, size and time of change of each file of code below `path`, or of the file itself."""
    if not path.is_dir():
        return [_stamp(path, path.name)]
    stamps = []
    for count, (directory, names, files) in enumerate(os.walk(path)):
        if count == _MAX_DIRECTORIES:
            logger.warning(
                "%s has more than %d directories: a change of code in the others starts no new stack; move data out of it, "
                "or stop the stack after a change",
                path,
                _MAX_DIRECTORIES,
            )
            break
        names[:] = sorted(name for name in names if name not in _SKIPPED and not name.startswith("."))
        code = [Path(directory, file) for file in files if file.endswith(CODE)]
        stamps += [_stamp(file, os.path.relpath(file, path)) for file in code]
    return sorted(stamps)


def _stamp(path: Path, name: str) -> tuple[str, int, int]:
    try:
        status = path.stat()
    except OSError:
        return name, -1, -1
    return name, status.st_size, status.st_mtime_ns


def _absolute(name: str) -> Path:
    """Return a path relative to the working directory, also if that was removed."""
    try:
        here = Path.cwd()
    except FileNotFoundError:
        here = Path("/nonexistent")
    return here / Path(name).expanduser()
