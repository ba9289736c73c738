"""What an environment needs and does not have here: read from errors and logs, and values made up so that it starts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson
from packaging.utils import canonicalize_name

from gymgate.catalog import EnvConfig, Need
from gymgate.check.known import known, signs
from gymgate.check.model import Diagnosis
from gymgate.config import Settings
from gymgate.errors import GymgateError, NeedMissingError, StackStartError

_DOWNLOADS = ("download", "git", "search", "key")
_SERVICES = ("docker", "binary", "search", "key", "config")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_WIDTH = 240
_CLAUSES = r"[=<>!~]=?[\w.*]+(?:,[=<>!~]=?[\w.*]+)*"
_DEMAND = rf"[A-Za-z][\w.-]*(?:\[[\w,-]+\])?(?:{_CLAUSES})?"
_UNSET_FIELD = re.compile(
    r"^(?P<field>[A-Za-z_]\w*)(?:\.\w+)?\n  (?:Field required|Input should be a valid string)", re.MULTILINE
)


@dataclass(frozen=True)
class MissingNeed:
    """Something that was missing at run time."""

    kind: str
    """As in the catalog's `Need`, or `memory`, `file`, `service`, `conflict`."""
    name: str
    evidence: str
    """The line that shows it."""

    @property
    def diagnosis(self) -> Diagnosis:
        """Blocked by the need; incomplete if it is a file that the release should ship."""
        shipped = self.name.partition("site-packages/")[2] if self.kind == "file" else ""
        if shipped:
            return Diagnosis("incomplete", f"the release does not ship {shipped}", self.evidence)
        return Diagnosis("blocked", str(self), self.evidence)

    @property
    def reason_left_out(self) -> str:
        """Why a requirement was not installed; requirements in conflict are named."""
        return str(self) if self.kind in ("conflict", "package") else f"it cannot be fetched ({self.kind})"

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}"


def missing_in(*texts: str, hints: Sequence[Need] = ()) -> MissingNeed | None:
    """The need shown by the first of some error messages and logs that shows one; `None` if none does.

    `hints` are the needs read from the environment's files: they name what a failed lookup without a host was for.
    """
    return next(filter(None, (_missing_in(text, hints) for text in texts)), None)


def _missing_in(text: str, hints: Sequence[Need]) -> MissingNeed | None:
    for kind, pattern in signs():
        if match := _last(pattern, text):
            return MissingNeed(kind, match["name"].replace("', '", " "), line_around(match))
    if match := _last("|".join(known()["no_network"]), text):
        fetched = [need for kind in _DOWNLOADS for need in hints if need.kind == kind]
        return MissingNeed(
            "download", fetched[0].detail if fetched else "a host on the internet", line_around(match)
        )
    if match := _last("|".join(known()["no_service"]), text):
        used = [need for need in hints if need.kind in _SERVICES]
        kind, name = (
            (used[0].kind, used[0].detail) if used else ("service", "something beside the environment")
        )
        return MissingNeed(kind, name, line_around(match))
    return None


def _last(pattern: str | re.Pattern[str], text: str) -> re.Match[str] | None:
    return next(reversed([*re.finditer(pattern, text)]), None)


def line_around(match: re.Match[str]) -> str:
    """The line that holds a match, without colours, cut to its surroundings."""
    text = match.string
    left = text.rfind("\n", 0, match.start()) + 1
    right = text.find("\n", match.end())
    line = text[left : len(text) if right < 0 else right]
    offset = max(0, match.start() - left - _WIDTH // 3)
    return " ".join(_COLOUR.sub("", line[offset : offset + _WIDTH]).split())


def setup_need(message: str) -> MissingNeed | None:
    """The need behind a runtime that could not be made: a source that no index has, or requirements in conflict."""
    line = " ".join(message.split())[-2 * _WIDTH :]
    if match := re.search(r"Because ([\w.-]+) was not found in the package registry", message):
        return MissingNeed("package", f"{match[1]}, which the package index does not have", line)
    if match := re.search(r"npm cannot install (\S+): code (?:ETARGET|E404)", message):
        return MissingNeed("package", f"{match[1]}, which the npm registry does not have", line)
    if re.search(r"No solution found|unsatisfiable|conflict", message):
        return MissingNeed("conflict", "; ".join(_conflicting(message)) or "requirements", line)
    if match := re.search(r"git\+https?://[^\s,'`]+|https?://(?!\S*pypi)[^\s,'`]+", message):
        return MissingNeed("git" if match[0].startswith("git+") else "download", match[0].rstrip(".:"), line)
    if match := re.search(r"Failed to build `?([\w.-]+=?=?[\w.]*)", message):
        return MissingNeed("binary", f"a build of {match[1]}", line)
    if match := re.search(r"Python[ >=<.\d]+", message):
        return MissingNeed("config", match[0].strip(), line)
    return None


def _conflicting(message: str) -> Iterator[str]:
    """The requirements that uv says cannot be installed together, each once."""
    found: dict[str, None] = {}
    for match in re.finditer(rf"({_DEMAND}) depends on (one of:\s+)?([A-Za-z][\w.-]*{_CLAUSES})", message):
        found[f"{match[1]} needs {match[3]}{' or the like' if match[2] else ''}"] = None
    required = rf"(?:you require|because) ([A-Za-z][\w.-]*{_CLAUSES})(?: and ([A-Za-z][\w.-]*{_CLAUSES}))?"
    for match in re.finditer(required, message):
        found |= {f"required: {demand}": None for demand in match.groups() if demand}
    yield from found


def unobtainable(requirements: Sequence[str], need: MissingNeed, message: str) -> list[str]:
    """The requirements to leave out: those that no index has, and those that conflict with nemo-gym's own."""
    if need.kind in ("git", "download"):
        return [line for line in requirements if "://" in line and "file://" not in line]
    if need.kind not in ("conflict", "package"):
        return []
    blamed = re.findall(
        r"(?:Because|and) ([A-Za-z][\w.-]*)[\[=<>!~\w.*,\]-]* (?:depends on|was not found)", message
    )
    blamed += re.findall(r"you require ([A-Za-z][\w.-]*)", message)
    names = {canonicalize_name(name) for name in blamed}
    return [
        line for line in requirements if canonicalize_name(re.split(r"[^\w.-]", line.strip())[0]) in names
    ]


def unset_keys(error: GymgateError, config: EnvConfig) -> list[str]:
    """Dotted config keys without a value, because of which a stack did not start."""
    if isinstance(error, NeedMissingError):
        return [name.strip() for name in (error.need or "").split(",") if name.strip()]
    server = next((item for item in config.servers if item.name == getattr(error, "server", None)), None)
    if not isinstance(error, StackStartError) or server is None:
        return []
    fields = dict.fromkeys(match["field"] for match in _UNSET_FIELD.finditer(error.log_tail or ""))
    return [f"{server.name}.{server.kind}.{server.type}.{field}" for field in fields]


def placeholders(keys: Iterable[str], directory: Path) -> Settings:
    """A made-up value for each key: for API keys, tokens, addresses, and files without effect (written to
    `directory`). Empty if one of the keys is of another kind."""
    settings = tuple((key, _placeholder(_last_part(key), directory)) for key in keys)
    return settings if all(value is not None for _, value in settings) else ()


def _placeholder(name: str, directory: Path) -> str | None:
    if (content := known()["files"].get(name)) is not None:
        path = directory / f"{name}.json"
        path.write_bytes(orjson.dumps(content))
        return str(path)
    fitting = (value for pattern, value in known()["placeholders"] if re.search(pattern, name, re.IGNORECASE))
    return next(fitting, None)


def names_of(settings: Settings) -> str:
    """The keys of some settings, without the servers that they belong to."""
    return ", ".join(dict.fromkeys(_last_part(key) for key, _ in settings))


def _last_part(key: str) -> str:
    return key.rpartition(".")[2]
