"""Values for what a config leaves to its user, so that an environment starts: a check needs most of them only there.

What is tried with a placeholder is marked as such, and what comes out otherwise than recorded is then blocked by the
value that is missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import orjson

from gymgate.catalog import EnvConfig
from gymgate.check.causes import Setting, neutral_file
from gymgate.errors import GymgateError, NeedMissingError, StackStartError

VALUE = "gymgate-check-placeholder"
URL = "http://127.0.0.1:9"
"""Refuses connections."""
_NAMES = re.compile(
    r"(key|token|secret|password|_cx|_user|_username|_email|account_id|project_id|model_name)s?$", re.I
)
_URLS = re.compile(r"(url|endpoint)s?$", re.I)
_FIELD = re.compile(
    r"^(?P<field>[A-Za-z_]\w*)(?:\.\w+)?\n  (?:Field required|Input should be a valid string)", re.MULTILINE
)


def lacking(error: GymgateError, config: EnvConfig) -> list[str]:
    """Dotted keys that a stack did not start for want of."""
    if isinstance(error, NeedMissingError):
        return [name.strip() for name in (error.need or "").split(",") if name.strip()]
    server = next((item for item in config.servers if item.name == getattr(error, "server", None)), None)
    if not isinstance(error, StackStartError) or server is None:
        return []
    fields = dict.fromkeys(match["field"] for match in _FIELD.finditer(error.log_tail or ""))
    return [f"{server.name}.{server.kind}.{server.type}.{field}" for field in fields]


def placeholders(keys: Iterable[str], directory: Path) -> list[Setting]:
    """A setting for each key for which a made-up value can do: keys, tokens, addresses, files with a neutral
    content (written to `directory`). Empty if there is one that is none of these."""
    found: list[Setting] = []
    for key in keys:
        value = _placeholder(key.rpartition(".")[2], directory)
        if value is None:
            return []
        found.append((key, value))
    return found


def _placeholder(name: str, directory: Path) -> str | None:
    if (content := neutral_file(name)) is not None:
        path = directory / f"{name}.json"
        path.write_bytes(orjson.dumps(content))
        return str(path)
    if _URLS.search(name):
        return URL
    return VALUE if _NAMES.search(name) else None


def named(settings: Sequence[Setting]) -> str:
    """The settings' own names, for people."""
    return ", ".join(dict.fromkeys(key.rpartition(".")[2] for key, _ in settings))
