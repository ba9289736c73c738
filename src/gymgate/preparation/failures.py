"""What went wrong in NeMo Gym's interpreter, as one line that says what to do."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gymgate import errors
from gymgate.errors import DataError, GymgateError, NeedMissingError, SetupError
from gymgate.runtime.environment import offline

Link = Mapping[str, Any]
"""One exception of a chain: type, module, message, status, and the module that an `ImportError` lacks."""

_GATED = ("GatedRepoError", "LocalTokenNotFoundError")
_UNKNOWN = ("RepositoryNotFoundError", "DatasetNotFoundError")
_NO_FILE = (
    "RemoteEntryNotFoundError",
    "EntryNotFoundError",
    "RevisionNotFoundError",
    "DataFilesNotFoundError",
)
_OFFLINE = ("OfflineModeIsEnabled", "LocalEntryNotFoundError")
_LOW = (
    "ConnectError",
    "gaierror",
    "ConnectionRefusedError",
    "ConnectionResetError",
    "TimeoutError",
    "HTTPError",
)
"""They say what the others above them only wrap."""
_NO_NETWORK = (
    *_LOW,
    *(
        "ConnectTimeout",
        "ReadTimeout",
        "ReadError",
        "RemoteProtocolError",
        "URLError",
        "ConnectionError",
        "Timeout",
    ),
)


def refusal(event: Mapping[str, Any], environment: str) -> GymgateError:
    """The error that the program named itself."""
    cls: type[GymgateError] = getattr(errors, str(event["error"]))
    return cls(f"{environment}: {event['message']}")


def missing_package(event: Mapping[str, Any]) -> str | None:
    """The package that an import did not find, if that is what failed."""
    for link in event.get("chain", ()):
        if link["type"] in ("ModuleNotFoundError", "PackageNotFoundError") and link.get("name"):
            return str(link["name"]).partition(".")[0]
    return None


def failure(
    event: Mapping[str, Any], environment: str, token_variable: str, log: Path, *, has_token: bool
) -> GymgateError:
    """The error for an exception that the program did not expect, by what is at its root."""
    chain: Sequence[Link] = event.get("chain") or [{"type": "?", "message": "", "status": None}]
    what = f"{environment}: {str(event.get('doing')).removeprefix(f'{environment}: ')}"
    names = {str(link["type"]) for link in chain}
    statuses = {link["status"] for link in chain if link.get("status")}
    text = " ".join(str(chain[0]["message"]).split())
    if package := missing_package(event):
        return NeedMissingError(
            f"{what}: needs the Python package {package!r}, which nemo-gym's environment lacks; add the package that "
            f"has it with --with PACKAGE",
            environment=environment,
            need=package,
        )
    if _wants_token(names, statuses):
        return _refused_access(what, environment, token_variable, has_token=has_token)
    if names & {*_NO_FILE} or 404 in statuses:
        return DataError(f"{what}: not there: {_short(text)}")
    if names & {*_OFFLINE, *_NO_NETWORK} or statuses:
        low = chain[-1] if {str(chain[-1]["type"])} & {*_LOW} else chain[0]
        return _unreachable(what, environment, _short(str(low["message"]) or text))
    said = f"{chain[0]['type']}: {_short(text)}; what it wrote is in {log}"
    if "CalledProcessError" in names and re.search(r"\bgit\b.*\b(clone|fetch|pull)\b", text):
        return NeedMissingError(f"{what}: git cannot fetch: {said}", environment=environment, need="download")
    return SetupError(f"{what}: NeMo Gym's preparation failed: {said}")


def _wants_token(names: set[str], statuses: set[Any]) -> bool:
    """To who has no access, the hub does not tell a private repository from one that does not exist."""
    return bool(names & {*_GATED, *_UNKNOWN} or statuses & {401, 403})


def _unreachable(what: str, environment: str, text: str) -> NeedMissingError:
    off = offline() or os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0")
    told = (
        "it was not fetched before, and the network is off (GYMGATE_OFFLINE, UV_OFFLINE or HF_HUB_OFFLINE)"
        if off
        else f"cannot be fetched: {text}; check the network, HTTPS_PROXY and HF_ENDPOINT"
    )
    return NeedMissingError(f"{what}: {told}", environment=environment, need="download")


def _refused_access(what: str, environment: str, variable: str, *, has_token: bool) -> NeedMissingError:
    told = (
        f"the token in {variable} has no access to it, or it does not exist; ask for access on its page"
        if has_token
        else f"it is gated or private, or does not exist; set {variable} to a token that has access"
    )
    return NeedMissingError(f"{what}: the hub refused: {told}", environment=environment, need=variable)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 300 else f"{text[:300]}..."
