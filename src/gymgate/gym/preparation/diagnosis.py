"""Turn a failure in NeMo Gym's interpreter into an error of one line that says what to do."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gymgate.core import errors
from gymgate.core.errors import DataError, GymgateError, NeedMissingError, SetupError
from gymgate.core.json_server import shortened
from gymgate.gym.runtime.variables import offline

_NO_ACCESS = {"GatedRepoError", "LocalTokenNotFoundError", "RepositoryNotFoundError", "DatasetNotFoundError"}
"""Without access, the hub does not distinguish a private repository from one that does not exist."""
_NO_FILE = {
    "RemoteEntryNotFoundError",
    "EntryNotFoundError",
    "RevisionNotFoundError",
    "DataFilesNotFoundError",
}
_SAY_MORE = {
    "ConnectError",
    "gaierror",
    "ConnectionRefusedError",
    "ConnectionResetError",
    "TimeoutError",
    "HTTPError",
}
"""Failures of the network whose messages say more than those of the exceptions that wrap them."""
_UNREACHABLE = _SAY_MORE | {
    *("ConnectTimeout", "ReadTimeout", "ReadError", "RemoteProtocolError", "URLError", "ConnectionError"),
    *("Timeout", "OfflineModeIsEnabled", "LocalEntryNotFoundError"),
}


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
    """The error for an exception that the program did not expect, by the exceptions in its chain: each has `type`,
    `module`, `message`, `status`, and the `name` of the module that an `ImportError` lacks."""
    chain: Sequence[Mapping[str, Any]] = event.get("chain") or [{"type": "?", "message": "", "status": None}]
    what = f"{environment}: {str(event.get('doing')).removeprefix(f'{environment}: ')}"
    names = {str(link["type"]) for link in chain}
    statuses = {link["status"] for link in chain if link.get("status")}
    text = shortened(str(chain[0]["message"]))

    def missing(problem: str, need: str) -> NeedMissingError:
        return NeedMissingError(f"{what}: {problem}", environment=environment, need=need)

    if package := missing_package(event):
        lacks = f"needs the Python package {package!r}, which nemo-gym's environment lacks"
        return missing(f"{lacks}; add the package that has it with --with PACKAGE", package)
    if names & _NO_ACCESS or statuses & {401, 403}:
        ask = f"the token in {token_variable} has no access to it, or it does not exist; ask for access on its page"
        give = f"it is gated or private, or does not exist; set {token_variable} to a token that has access"
        return missing(f"the hub refused: {ask if has_token else give}", token_variable)
    if names & _NO_FILE or 404 in statuses:
        return DataError(f"{what}: not there: {text}")
    if names & _UNREACHABLE or statuses:
        cause = shortened(str(chain[-1]["message"])) if chain[-1]["type"] in _SAY_MORE else ""
        return missing(_unreachable(cause or text), "download")
    seen = f"{chain[0]['type']}: {text}; its output is in {log}"
    if "CalledProcessError" in names and re.search(r"\bgit\b.*\b(clone|fetch|pull)\b", text):
        return missing(f"git cannot fetch: {seen}", "download")
    return SetupError(f"{what}: NeMo Gym's preparation failed: {seen}")


def _unreachable(text: str) -> str:
    if offline() or os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0"):
        return "it was not fetched before, and the network is off (GYMGATE_OFFLINE, UV_OFFLINE or HF_HUB_OFFLINE)"
    return f"cannot be fetched: {text}; check the network, HTTPS_PROXY and HF_ENDPOINT"
