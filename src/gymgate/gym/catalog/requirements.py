"""PyPI requirements of servers, read from the files that Gym installs them from."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

_PUBLISHING = {"https://github.com/PrimeIntellect-ai/verifiers"}
"""Repositories whose tags are the versions of the package of the same name on the index."""
_OWN = re.compile(r"nemo[-_.]gym\s*(?:\[([^\]]*)\])?")


class Distributions:
    """The distributions in a site directory, by the names of their metadata directories."""

    def __init__(self, site: Path) -> None:
        self._site = site
        names = (path.name.removesuffix(".dist-info").rpartition("-") for path in site.glob("*.dist-info"))
        self._versions = {canonicalize_name(name): version for name, _, version in names}

    def satisfies(self, line: str) -> bool:
        """Whether a requirement is certainly met. Markers are ignored; one with extras or a URL counts as not met."""
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            return False
        version = self._versions.get(canonicalize_name(requirement.name))
        if version is None or requirement.extras or requirement.url:
            return False
        return requirement.specifier.contains(version, prereleases=True)

    def gym_extra(self, extra: str) -> list[str]:
        """Return the requirements of nemo-gym's extra of that name, from its metadata."""
        metadata = next(iter(self._site.glob("nemo_gym-*.dist-info/METADATA")), None)
        text = metadata.read_text(errors="replace") if metadata else ""
        return re.findall(
            rf"^Requires-Dist: (.+?)\s*;\s*extra == ['\"]{re.escape(extra)}['\"]\s*$", text, re.M
        )


def read_requirements(directory: Path, installed: Distributions) -> list[str]:
    """Return the requirements of the server in `directory`, in its order.

    nemo-gym itself is replaced by what its extras other than `dev` require. Editable and relative lines are left out, except
    projects below the server's own directory, which become file URLs. Markers and `git+` URLs stay.
    """
    if (directory / "requirements.txt").is_file():
        lines = _lines(directory / "requirements.txt")
    else:
        lines = _project(directory / "pyproject.toml")
    return list(_flat(lines, installed, directory))


def local_requirements(directory: Path) -> list[str]:
    """Return editable or relative lines other than nemo-gym: code beside the server that gymgate cannot install."""
    lines = [line for line in _lines(directory / "requirements.txt") if _is_local(line)]
    return [line for line in lines if not _OWN.search(line) and _own_project(line, directory) is None]


def _lines(path: Path) -> list[str]:
    """Return requirement lines without comments, blank lines and index options. Included files are read too."""
    if not path.is_file():
        return []
    lines = []
    for raw in path.read_text(errors="replace").replace("\\\n", " ").splitlines():
        line = re.sub(r"(^|\s)#.*$", "", raw).strip()
        if match := re.match(r"(?:-r|--requirement)[ =]\s*(.+)$", line):
            lines += _lines(path.parent / match[1])
        elif line and (not line.startswith("-") or _is_local(line)):
            lines.append(line)
    return lines


def _is_local(line: str) -> bool:
    return line.startswith(("-e ", "--editable", "./", "../", "/", "file:"))


def _project(path: Path) -> list[str]:
    """Return the dependencies of a pyproject.toml, with the git sources of its uv table."""
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError):
        return []
    sources = table.get("tool", {}).get("uv", {}).get("sources", {})
    return [_with_source(line, sources) for line in table.get("project", {}).get("dependencies", [])]


def _with_source(line: str, sources: dict[str, Any]) -> str:
    name = re.match(r"[\w.-]+", line)
    source = sources.get(name[0]) if name else None
    if not isinstance(source, dict) or "git" not in source or "@" in line:
        return line
    revision = source.get("rev") or source.get("tag") or source.get("branch")
    return f"{line} @ git+{source['git']}" + (f"@{revision}" if revision else "")


def _flat(lines: Iterable[str], installed: Distributions, directory: Path) -> Iterator[str]:
    for line in lines:
        own = _OWN.search(line)
        if own and (_is_local(line) or own.start() == 0):
            for extra in (own[1] or "").split(","):
                if extra.strip() and extra.strip() != "dev":
                    yield from installed.gym_extra(extra.strip())
        elif not _is_local(line):
            yield _with_release(" ".join(line.split()))
        elif own_project := _own_project(line, directory):
            yield own_project


def _with_release(line: str) -> str:
    """Replace a git tag of a repository that publishes its versions by that version on the index."""
    match = re.match(r"([\w.-]+(?:\[[\w,-]+\])?) @ git\+(\S+?)(?:\.git)?@v?(\d+(?:\.\d+)+)$", line)
    return f"{match[1]}=={match[3]}" if match and match[2] in _PUBLISHING else line


def _own_project(line: str, directory: Path) -> str | None:
    """Return `-e ./shell[extra]` as `shell[extra] @ file:///...` if that is a project in the server's own directory."""
    match = re.match(r"(?:-e|--editable)?[ =]*(\./[\w./-]+)(\[[\w,-]+\])?$", line)
    path = directory / match[1] if match else directory
    if match is None or not (path / "pyproject.toml").is_file():
        return None
    return f"{path.name}{match[2] or ''} @ {path.resolve().as_uri()}"
