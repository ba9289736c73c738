"""Where the code of an environment's servers is, and what it shows before it runs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from gymgate.core.errors import ConfigError
from gymgate.gym.catalog.scan import roots_around
from gymgate.gym.inside.resolve import AGENTS, ENVIRONMENT_SERVERS, RESOURCES, ServerInstance

_USES_RAY = re.compile(
    r"^\s*(?:import ray|from ray\b)|\bray\.(?:remote|get|init|wait)\(|@ray\.remote", re.MULTILINE
)
_NO_RAY = re.compile(r"^\s+ray_enabled(?:\s*:.*)?\s*=\s*False", re.MULTILINE)
_LIMITS_WORKERS = re.compile(r"\bself\.(?:config\.)?num_workers\b|\bnum_workers\s*:\s*Literal\[1\]")
_FOREIGN = frozenset({"tests", "site-packages", "dist-packages", "node_modules", "__pycache__"})
"""Names of directories beside a server's code that hold other code."""


class ServerCode(NamedTuple):
    """What the code of a server shows."""

    directory: Path
    uses_ray: bool = False
    """Whether it calls Ray itself. Gym's base classes import Ray too, which no server needs."""
    uses_docker: bool = False
    """Whether it makes containers with NeMo Gym's Docker provider, whatever its config says."""
    limits_workers: Path | None = None
    """The file that reads or fixes its `num_workers`, below the directory's parent."""


def read_code(server: ServerInstance, roots: Sequence[Path]) -> ServerCode:
    """Return what a server's code shows. Blocks. Raises `ConfigError` if the code is under none of the roots."""
    places = (root / server.kind / server.type for root in roots)
    directory = next((place for place in places if (place / server.entrypoint).exists()), None)
    if directory is None:
        searched = ", ".join(str(root) for root in roots)
        raise ConfigError(
            f"the code of server {server.name!r}, {server.kind}/{server.type}/{server.entrypoint}, is not in {searched}; "
            f"add the directory that holds {server.kind}/ to component_roots"
        )
    code = {path: path.read_text(errors="replace") for path in own_files(directory)}
    # From 0.7 on a server can declare that it needs no Ray although its code can use one.
    without_ray = _NO_RAY.search((directory / server.entrypoint).read_text(errors="replace"))
    return ServerCode(
        directory,
        uses_ray=not without_ray and any(map(_USES_RAY.search, code.values())),
        uses_docker=any("DockerProvider(" in text for text in code.values()),
        limits_workers=next(
            (
                path.relative_to(directory.parent)
                for path, text in code.items()
                if _LIMITS_WORKERS.search(text)
            ),
            None,
        ),
    )


def own_files(directory: Path, suffixes: tuple[str, ...] = (".py",)) -> Iterator[Path]:
    """Yield the files of a server's own code, without tests, virtual environments, installed packages and caches."""
    for parent, children, files in os.walk(directory):
        own = (name for name in children if name not in _FOREIGN and not name.startswith("."))
        children[:] = [name for name in own if not Path(parent, name, "pyvenv.cfg").exists()]
        yield from (Path(parent, name) for name in files if name.endswith(suffixes))


def component_roots(config_files: Iterable[Path], user_roots: Iterable[str], site: Path) -> list[Path]:
    """Return where servers are looked for: the user's roots, the trees around the config files, the installed nemo-gym."""
    kinds = (AGENTS, RESOURCES, ENVIRONMENT_SERVERS)
    around = (root for path in config_files for root in roots_around(path, kinds))
    return [*(Path(root).expanduser().absolute() for root in user_roots), *dict.fromkeys(around), site]
