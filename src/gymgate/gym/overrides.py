"""Whether anything can read the settings that a user overrides.

NeMo Gym takes any key of a server's block and ignores those that nothing reads, so a typo would have no effect and no message.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from gymgate.core.errors import ConfigError, near
from gymgate.gym.inside.resolve import Node, servers_of, value_at, walk
from gymgate.gym.server_code import own_files

_CODE = (
    "nemo_gym",
    "resources_servers",
    "responses_api_agents",
    "responses_api_models",
    "environments",
    "benchmarks",
)
"""The directories of a release, and those of a user's root that are like them."""
_NAMES = re.compile(r"""["'](\w+)["']|\bconfig\w*\.(\w+)|^[ \t-]*(\w+)[ \t]*:""", re.MULTILINE)
"""What may be a setting's name: a string, an attribute of a config, a field of a class, a key of a config file."""


def refuse_unknown(
    environment: str, added: Iterable[tuple[str, int]], config: Node, roots: Sequence[Path]
) -> None:
    """Raise `ConfigError` for an override of a setting whose name stands in no code or config of the roots. Blocks.

    `added` are the dotted keys of overrides that the config files lack, each with the position of its first unknown part;
    `config` is resolved, with overrides; the last of the `roots` is the installed nemo-gym.
    """
    unknown = [(key, key.split("."), position) for key, position in added]
    # The name of a block is the user's own, and what is no identifier is an entry of a mapping, such as a header.
    unknown = [
        (key, parts, position)
        for key, parts, position in unknown
        if (position or len(parts) == 1) and parts[position].isidentifier()
    ]
    names: set[str] = set()
    for more in _names(config, roots):
        names |= more
        unknown = [item for item in unknown if item[1][item[2]] not in names]
        if not unknown:  # mostly early: reading a whole release takes seconds
            return
    for key, parts, position in unknown:
        block = value_at(config, ".".join(parts[:position])) if position else config
        siblings = {*block} - {parts[position]} if isinstance(block, Mapping) else set()
        close = [*near(parts[position], sorted(siblings)), *near(parts[position], sorted(names))]
        hint = f"; near names: {', '.join([*dict.fromkeys(close)][:5])}" if close else ""
        raise ConfigError(
            f"environment {environment!r}: override {key!r} has no effect: no code or config has the name "
            f"{parts[position]!r}{hint}; +{key} sets it all the same"
        )


def _names(config: Node, roots: Sequence[Path]) -> Iterator[set[str]]:
    """Yield what may be settings' names: in values that interpolate, the environment's servers, and then all of the roots."""
    values = (value for _, value in walk(config) if isinstance(value, str) and "${" in value)
    yield {word for value in values for word in re.findall(r"\w+", value)}
    servers = [root / server.kind / server.type for server in servers_of(config) for root in roots]
    for directory in (*servers, *(root / name for root in roots for name in _CODE)):
        for file in own_files(directory, (".py", ".yaml", ".yml")):
            matches = _NAMES.findall(file.read_text(errors="replace"))
            yield {file.parent.name, *(name for names in matches for name in names if name)}
