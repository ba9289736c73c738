"""From an error and the servers' logs to the need behind it: what was missing, and the line that says so."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gymgate.catalog import Need


@dataclass(frozen=True)
class Missing:
    """A need that was seen at run time."""

    kind: str
    """As in the catalog's `Need`, or `memory`, `file`, `service`, `conflict`."""
    name: str
    evidence: str

    @property
    def shipped(self) -> str | None:
        """The file that the release should have, if that is what is missing."""
        inside = self.name.partition("site-packages/")[2]
        return inside if self.kind == "file" and inside else None

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}"


_HOST = r"(?P<name>(?:[\w-]+\.)+[a-z]{2,})"
_SIGNS: tuple[tuple[str, str], ...] = (
    ("gpu", r"(?P<name>Found no NVIDIA driver|no CUDA GPUs are available|No CUDA runtime|NVML Shared Library Not Found)"),
    ("gpu", r"No available node types can fulfill resource request \{(?P<name>[^}\n]*[Gg][Pp][Uu]'[^}\n]*)\}"),
    ("docker", r"(?P<name>Sandbox provider) reference '[\w-]+' is not defined"),
    ("memory", r"[Pp]re-?loading[^\n]*?\((?P<name>~?\d+(?:\.\d+)? ?GB)"),
    ("docker", r"(?P<name>docker\.sock|Cannot connect to the Docker daemon|[Aa]pptainer|[Ss]ingularity)"),
    ("docker", r"No such file or directory: '(?P<name>(?:[^']*/)?(?:docker|podman|apptainer|singularity))'"),
    ("download", r"Failed to resolve '" + _HOST),
    ("download", r"(?:Could not resolve host|[Cc]ould not resolve host name|Host not found): '?" + _HOST),
    ("git", r"git clone https?://(?P<name>[\w./-]+[\w])"),
    ("binary", r"'(?P<name>uv', 'venv'[^\n]*?'--python', '[\d.]+)'[^\n]*returned non-zero"),
    ("download", r"(?:'curl'|'pip', 'install'),[^\n]*?https?://" + _HOST + r"[^\n]*returned non-zero"),
    ("download", r"(?P<name>[Aa]gent deps setup failed \([^\n]*?\w+\.sh\))"),
    ("binary", r"(?P<name>Node\.js v[\d.]+\+?) is required"),
    ("binary", r"npm', 'install', '-g', '(?P<name>[^']+)'\]' returned non-zero"),
    ("download", r"getaddrinfo ENOTFOUND " + _HOST),
    ("binary", r"(?P<name>[\w.-]+ exited [1-9]\d*): [^\n]*"),
    ("download", r"(?P<name>nltk_data|nltk\.download\(\S+\))"),
    ("download", r"Cannot connect to host " + _HOST + r":\d+"),
    ("download", r"host='" + _HOST + r"'"),
    ("download", r"(?:getaddrinfo|NameResolution|name resolution|Name or service not known)[^\n]*?https?://" + _HOST),
    ("download", r"https?://" + _HOST + r"[^\n]{0,200}?(?:resolution|resolve|refused|unreachable|[Nn]ame or service)"),
    ("download", r"connect to (?:the )?['\"]?https?://" + _HOST),
    ("download", r"(?:[Ff]ailed to (?:fetch|clone|download)|'git', 'clone')[^\n]*?https?://" + _HOST),
    ("download", r"(?P<name>LocalEntryNotFoundError|OfflineModeIsEnabled|Resource \S*[a-z_]+\S* not found)"),
    ("service", r"Cannot connect to host (?P<name>(?:127\.0\.0\.1|localhost|0\.0\.0\.0|\[?::1\]?):\d+)"),
    ("service", r"(?:host='(?:127\.0\.0\.1|localhost)', port=|Connect call failed \('127\.0\.0\.1', )(?P<name>\d+)"),
    ("key", r"(?:KeyError: |environment variable |[Mm]issing |[Ss]et )['\"`]?"
     r"(?P<name>[A-Z][A-Z0-9]*_[A-Z0-9_]*(?:KEY|TOKEN|SECRET|URL)\w*)"),
    ("key", r"(?P<name>[A-Z][A-Z0-9_]*(?:API_KEY|TOKEN))\b[^\n]*?(?:not set|missing|required|must)"),
    ("key", r"(?P<name>\w*api_key\w*)[^\n]*?(?:must be set|is required|not provided|Field required|is missing|valid)"),
    ("key", r"Environment variable '(?P<name>\w*(?:KEY|TOKEN|SECRET))' not found"),
    ("config", r"(?P<name>Environment variable '\w+') not found"),
    ("config", r"still '\?\?\?'\) after merging:\s+- (?P<name>[\w.]+(?:\s+- [\w.]+)*)"),
    ("binary", r"No such file or directory: '(?P<name>[\w.+-]+)'"),
    ("binary", r"(?P<name>[\w.+-]+): (?:command )?not found"),
    ("binary", r"\b(?P<name>[\w.+-]+) is required[^\n]*?not found on PATH"),
    ("binary", r"[Rr]equired (?:binary|executable|command|program)\S* (?P<name>\S+)"),
    ("package", r"No module named '(?P<name>[\w.]+)'"),
    ("file", r"(?:FileNotFoundError|No such file or directory)[^\n]*?'(?P<name>/?[\w./ @+-]+/[\w. @+-]+)'"),
    ("file", r"(?:FileNotFoundError)[^\n]*?(?P<name>[\w./-]+\.(?:txt|json|jsonl|h5|db|sqlite|csv|parquet|zip|tar|gz))"),
    ("config", r"(?P<name>\w+_\w+) is not configured"),
    ("config", r"validation errors? for \w*Config\w*\s+(?P<name>[\w.]+)\s+(?:Field required|Input should be)"),
)  # fmt: skip
_PATTERNS = tuple((kind, re.compile(pattern)) for kind, pattern in _SIGNS)
_NO_NETWORK = re.compile(
    r"Name or service not known|Temporary failure in name resolution|No address associated with hostname"
    r"|Network is unreachable|nodename nor servname|Could not contact DNS|Connection error\."
    r"|[Ff]ailed to (?:load|download|fetch)[^\n]*?(?:retries|attempts)"
)
_NO_SERVICE = re.compile(
    r"All connection attempts failed|Connection refused|Connect call failed"
    r"|FileNotFoundError\(2, \\*'No such file or directory\\*'\)"
)
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_WIDTH = 240


def missing_in(*texts: str, hints: Sequence[Need] = ()) -> Missing | None:
    """The need that error messages and logs show, the first text that shows one; `None` if none does.

    `hints` are needs read from the environment's files: they name what a failed look-up without a host was for.
    """
    for text in texts:
        for kind, pattern in _PATTERNS:
            if (match := _last(pattern, text)) is not None:
                name = match["name"].replace("', '", " ")
                return Missing(kind, name, line_around(text, match.start(), match.end()))
        if (match := _last(_NO_NETWORK, text)) is not None:
            order = ("download", "git", "search", "key")
            fetched = sorted(
                (need for need in hints if need.kind in order), key=lambda n: order.index(n.kind)
            )
            name = fetched[0].detail if fetched else "a host on the internet"
            return Missing("download", name, line_around(text, match.start(), match.end()))
        if (match := _last(_NO_SERVICE, text)) is not None:
            services = [
                need for need in hints if need.kind in ("docker", "binary", "search", "key", "config")
            ]
            kind = services[0].kind if services else "service"
            name = services[0].detail if services else "something beside the environment"
            return Missing(kind, name, line_around(text, match.start(), match.end()))
    return None


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = None
    for found in pattern.finditer(text):  # noqa: B007
        pass
    return found


def line_around(text: str, start: int, end: int) -> str:
    """The line of `text` that holds a match, cut to its surroundings."""
    left = text.rfind("\n", 0, start) + 1
    right = text.find("\n", end)
    line = text[left : len(text) if right < 0 else right]
    offset = max(0, start - left - _WIDTH // 3)
    return " ".join(_COLOUR.sub("", line[offset : offset + _WIDTH]).split())


def setup_need(message: str) -> Missing | None:
    """The need behind a runtime that could not be made: a source that no index has, or requirements in conflict."""
    line = " ".join(message.split())[-2 * _WIDTH :]
    if match := re.search(r"Because ([\w.-]+) was not found in the package registry", message):
        return Missing("package", f"{match[1]}, which the package index does not have", line)
    if match := re.search(r"npm cannot install (\S+): code (?:ETARGET|E404)", message):
        return Missing("package", f"{match[1]}, which the npm registry does not have", line)
    if re.search(r"No solution found|unsatisfiable|conflict", message):
        return Missing("conflict", "; ".join(_conflicting(message)) or "requirements", line)
    if match := re.search(r"git\+https?://[^\s,'`]+|https?://(?!\S*pypi)[^\s,'`]+", message):
        return Missing("git" if match[0].startswith("git+") else "download", match[0].rstrip(".:"), line)
    if match := re.search(r"Failed to build `?([\w.-]+=?=?[\w.]*)", message):
        return Missing("binary", f"a build of {match[1]}", line)
    if match := re.search(r"Python[ >=<.\d]+", message):
        return Missing("config", match[0].strip(), line)
    return None


_CLAUSES = r"[=<>!~]=?[\w.*]+(?:,[=<>!~]=?[\w.*]+)*"
_DEMAND = rf"[A-Za-z][\w.-]*(?:\[[\w,-]+\])?(?:{_CLAUSES})?"


def _conflicting(message: str) -> Iterator[str]:
    """What uv says depends on what: the requirements that cannot be had together."""
    found: dict[str, None] = {}
    for match in re.finditer(rf"({_DEMAND}) depends on (one of:\s+)?([A-Za-z][\w.-]*{_CLAUSES})", message):
        rest = " or the like" if match[2] else ""
        found[f"{match[1]} needs {match[3]}{rest}"] = None
    required = rf"(?:you require|because) ([A-Za-z][\w.-]*{_CLAUSES})(?: and ([A-Za-z][\w.-]*{_CLAUSES}))?"
    for match in re.finditer(required, message):
        found |= {f"required: {demand}": None for demand in match.groups() if demand}
    yield from found


def unobtainable(requirements: Sequence[str], need: Missing, message: str) -> list[str]:
    """The requirements to do without: those that no index has, and those that conflict with nemo-gym's own."""
    if need.kind in ("git", "download"):
        return [line for line in requirements if "://" in line and "file://" not in line]
    if need.kind not in ("conflict", "package"):
        return []
    blamed = re.findall(
        r"(?:Because|and) ([A-Za-z][\w.-]*)[\[=<>!~\w.*,\]-]* (?:depends on|was not found)", message
    )
    blamed += re.findall(r"you require ([A-Za-z][\w.-]*)", message)
    return [line for line in requirements if _name(line) in {_name(found) for found in blamed}]


def _name(requirement: str) -> str:
    match = re.match(r"[\w.-]+", requirement.strip())
    return re.sub(r"[-_.]+", "-", match[0]).lower() if match else ""
