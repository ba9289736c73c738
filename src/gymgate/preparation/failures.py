"""What went wrong in NeMo Gym's interpreter, as one line that says what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gymgate import errors
from gymgate.errors import DataError, GymgateError, NeedMissingError, SetupError

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
_NO_NETWORK = (
    "ConnectError",
    "ConnectTimeout",
    "ReadTimeout",
    "ReadError",
    "RemoteProtocolError",
    "URLError",
)
_NO_NETWORK_BASES = (
    "ConnectionError",
    "gaierror",
    "ConnectionRefusedError",
    "ConnectionResetError",
    "Timeout",
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
    event: Mapping[str, Any], environment: str, token_variable: str, *, has_token: bool
) -> GymgateError:
    """The error for an exception that the program did not expect, by what is at its root."""
    chain: Sequence[Link] = event.get("chain") or [{"type": "?", "message": "", "status": None}]
    what = f"{environment}: {event.get('doing')}"
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
    if names & {*_OFFLINE}:
        return NeedMissingError(
            f"{what}: it is not in the cache and cannot be fetched: {_short(text)}",
            environment=environment,
            need="download",
        )
    if names & {*_NO_NETWORK, *_NO_NETWORK_BASES} or statuses:
        return NeedMissingError(
            f"{what}: cannot be fetched: {_short(str(chain[-1]['message']) or text)}; check the network, HTTPS_PROXY "
            f"and HF_ENDPOINT",
            environment=environment,
            need="download",
        )
    return SetupError(f"{what}: NeMo Gym's preparation failed: {chain[0]['type']}: {_short(text)}")


def _wants_token(names: set[str], statuses: set[Any]) -> bool:
    """To who has no access, the hub does not tell a private repository from one that does not exist."""
    return bool(names & {*_GATED, *_UNKNOWN} or statuses & {401, 403})


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
