"""Why an environment did not start or score: typed errors first, then a few signs in the messages of other programs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from gymgate.core.errors import ConfigError, GymgateError, NeedMissingError, SetupError, StackStartError
from gymgate.gym.catalog import EnvConfig
from gymgate.gym.catalog.sandboxes import packaged_providers, sandbox_block
from gymgate.gym.inside.resolve import provider_in
from gymgate.gym.runtime.sandbox_providers import why_unusable
from gymgate.quality.model import Diagnosis
from gymgate.quality.tracebacks import last_traceback

_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_WIDTH = 240
_HOST = r"((?:[\w-]+\.)+[a-z]{2,})"
_LOOPBACK = r"((?:127\.0\.0\.1|localhost|0\.0\.0\.0|\[?::1\]?)(?::\d+)?)"
_SIGNS: tuple[tuple[str, str], ...] = (
    (
        "gpu",
        r"Found no NVIDIA driver|no CUDA GPUs are available|NVML Shared Library Not Found"
        r"|resource request \{([^}\n]*'GPU'[^}\n]*)\}",
    ),
    (
        "docker",
        r"docker run failed[^\n]*?for image=\\*'([^'\\\n]+)|Sandbox provider reference '[\w-]+' is not defined|docker\.sock"
        r"|Cannot connect to the Docker daemon|No such file or directory: '(?:[^']*/)?(docker|podman|apptainer|singularity)'",
    ),
    (
        "download",
        rf"(?:Failed to resolve '|[Cc]ould not resolve host: |ENOTFOUND |Cannot connect to host |host='){_HOST}"
        rf"|(?:'?git'?,? '?clone'?|[Ff]ailed to (?:fetch|download)|'curl'|'pip', 'install')[^\n]*?https?://{_HOST}",
    ),
    ("service", rf"(?:Cannot connect to host |host='|Connect call failed \('){_LOOPBACK}"),
    (
        "key",
        r"(?:KeyError: |Environment variable )['\"]([A-Z][A-Z0-9_]*(?:KEY|TOKEN|SECRET))['\"]"
        r"|([A-Z][A-Z0-9_]*(?:API_KEY|TOKEN)) is not set",
    ),
    (
        "config",
        r"Environment variable '(\w+)' not found|still '\?\?\?'\) after merging:\s+- ([\w.]+)"
        r"|validation errors? for \w*Config\w*\s+([\w.]+)\s+(?:Field required|Input should be)",
    ),
    ("binary", r"No such file or directory: '([\w.+-]+)'|(\S+) is required[^\n]*not found on PATH|([\w.-]+ exited [1-9]\d*): "),
    ("package", r"No module named '([\w.]+)'"),
    ("file", r"No such file or directory: '(/?[\w./ @+-]+/[\w. @+-]+)'"),
    ("download", r"Name or service not known|Temporary failure in name resolution|LocalEntryNotFoundError|OfflineModeIsEnabled"),
    ("service", r"All connection attempts failed|Connection refused"),
)  # fmt: skip
"""Kinds of what is missing, each with a pattern for the line that shows it; its group, if it has one, names it. They are
tried in this order. A message that none of them matches is shown as it is."""
_PATTERNS = tuple((kind, re.compile(pattern)) for kind, pattern in _SIGNS)
_LACKING_FIELD = re.compile(r"[:;] ([\w.]+): Field required|RunRequest' object has no attribute '(\w+)'")


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
        return self.blocked()

    def blocked(self, consequence: str = "") -> Diagnosis:
        return Diagnosis("blocked", f"{self}{consequence}", self.evidence, self.kind)

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}"


def missing_in(*texts: str) -> MissingNeed | None:
    """The need shown by the first of some error messages and logs that shows one; `None` if none does."""
    for text in texts:
        for kind, pattern in _PATTERNS:
            if matches := [*pattern.finditer(text)]:
                name = next(filter(None, matches[-1].groups()), matches[-1][0])
                return MissingNeed(kind, name, _line_around(matches[-1]))
    return None


def _line_around(match: re.Match[str]) -> str:
    """The line that holds a match, without colours, cut to its surroundings."""
    text = match.string
    left = text.rfind("\n", 0, match.start()) + 1
    right = text.find("\n", match.end())
    line = text[left : len(text) if right < 0 else right]
    offset = max(0, match.start() - left - _WIDTH // 3)
    return " ".join(_COLOUR.sub("", line[offset : offset + _WIDTH]).split())


def last_error_line(log: str) -> str:
    """The line that says most about why a server ended: its last exception, else its last line."""
    lines = [line for line in (last_traceback(log) or log).splitlines() if line.strip()]
    return " ".join(_COLOUR.sub("", lines[-1]).split())[:_WIDTH] if lines else ""


def missing_fields(message: str) -> list[str]:
    """The fields of a row that a server's refusal of it names."""
    return list(dict.fromkeys(one or other for one, other in _LACKING_FIELD.findall(message)))


def refuse_sandbox(sandbox: str, site: Path) -> None:
    """Raise `ConfigError` for a provider that is not there, or that cannot be used here. Blocks."""
    block = sandbox_block(sandbox, site)
    provider = str(provider_in(block))
    if reason := why_unusable(provider, block[provider] or {}, packaged_providers(site)):
        raise ConfigError(reason)


def start_diagnosis(error: GymgateError, config: EnvConfig, start_timeout_s: float) -> Diagnosis:
    """Say why a stack with this config did not come up."""
    text, log = str(error), str(getattr(error, "log_tail", None) or "")
    if isinstance(error, NeedMissingError):
        need = error.kind or "config"
        return Diagnosis("blocked", f"{need}: {error.need}", text, need)
    if isinstance(error, SetupError):
        return _not_installed(error)
    if missing := missing_in(log, text):
        return missing.diagnosis._replace(traceback=last_traceback(log))
    if isinstance(error, StackStartError) and error.timed_out:
        kinds = ", ".join(config.need_kinds) or "none"
        detail = f"start: not up within {start_timeout_s:g} s (needs read from its files: {kinds})"
        return Diagnosis("blocked", detail, last_error_line(log) or text, "time")
    if isinstance(error, StackStartError) and error.exit_status == 0:
        detail = f"the entrypoint of server {error.server!r} starts no server: a base for others"
        return Diagnosis("incomplete", detail)
    if isinstance(error, ConfigError):
        return Diagnosis("incomplete", f"config: {text}")
    return Diagnosis(
        "failed", f"{type(error).__name__}: {text}", last_error_line(log), traceback=last_traceback(log)
    )


def _not_installed(error: SetupError) -> Diagnosis:
    """Blocked by a requirement that cannot be installed here."""
    if error.requirement is not None:
        kind = "git" if "git+" in error.requirement else "download"
    else:
        kind = {"network": "download", "conflict": "conflict"}.get(error.kind or "", "setup")
    return Diagnosis("blocked", f"{kind}: {error.requirement or error}", str(error), kind)
