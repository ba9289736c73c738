"""Every error gymgate raises, and how each one crosses a process boundary.

    GymgateError
      ConfigError(ValueError)              the caller named something that does not exist or does not fit
      DataError(ValueError)                a row or a file of rows is malformed
      NeedMissingError(RuntimeError)       an environment needs something this machine does not have
      SetupError(RuntimeError)             the NeMo Gym runtime could not be made
      StackStartError(RuntimeError)        a server of the stack did not come up
      StackLostError(ConnectionError)      the stack's daemon is gone
      ServerDiedError(RuntimeError)        a server died while a rollout needed it       [infrastructure]
      EnvironmentServerError(RuntimeError) an agent or resources server answered with an error [environment]
      PolicyError(RuntimeError)            a policy or judge endpoint failed             [policy]
        UnknownConversationError           the replay policy has no answer for this conversation
      TokenDataError(ValueError)           token ids, masks or logprobs do not fit together
      RolloutTimeoutError(TimeoutError)    a rollout outlived its deadline               [timeout]
      MissingExtraError(ImportError)       an optional dependency is not installed

A failed rollout is data: it carries `RolloutError` (see `gymgate.rollout`), whose `kind` is the word in
brackets. The classes here are what is raised, at the boundary that failed, with attributes a caller can use.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

ErrorKind = Literal["infrastructure", "environment", "policy", "data", "timeout"]
"""Whose fault a failed rollout is; retries and metrics go by it."""


class GymgateError(Exception):
    """Root of the tree; `str()` is one line that says what failed, the value seen and what to do."""

    fields: ClassVar[tuple[str, ...]] = ()
    """Attributes that cross a process boundary beside the message."""

    def __init__(self, message: str, **attributes: Any) -> None:
        super().__init__(message)
        self.message = message
        for name in self.fields:
            setattr(self, name, attributes.pop(name, None))
        if attributes:
            raise TypeError(f"{type(self).__name__} has no attributes {sorted(attributes)}")

    def __reduce__(self) -> tuple[Any, ...]:
        return (from_wire, (self.to_wire(),))

    def to_wire(self) -> dict[str, Any]:
        """As a JSON-serialisable dict that `from_wire` reads back."""
        values = {name: getattr(self, name) for name in self.fields}
        return {"error": type(self).__name__, "message": self.message, **values}


class ConfigError(GymgateError, ValueError):
    """The caller named something that does not exist or does not fit; the message lists the choices."""


class DataError(GymgateError, ValueError):
    """A row, or a file of rows, is malformed."""

    fields = ("path", "line")
    path: str | None
    line: int | None


class NeedMissingError(GymgateError, RuntimeError):
    """An environment needs something this machine does not have (docker, a key, a download, ...)."""

    fields = ("environment", "need")
    environment: str | None
    need: str | None


class SetupError(GymgateError, RuntimeError):
    """The NeMo Gym runtime could not be made (no interpreter, no network, disk full, ...)."""


class StackStartError(GymgateError, RuntimeError):
    """A server of the stack did not come up in time, or died first."""

    fields = ("environment", "server", "log_tail")
    environment: str | None
    server: str | None
    log_tail: str | None


class StackLostError(GymgateError, ConnectionError):
    """The stack's daemon is gone, or was closed while work was under way."""


class ServerDiedError(GymgateError, RuntimeError):
    """A server of the environment died while a rollout needed it."""

    fields = ("environment", "server", "log_tail")
    environment: str | None
    server: str | None
    log_tail: str | None


class EnvironmentServerError(GymgateError, RuntimeError):
    """An agent or resources server answered with an error of its own."""

    fields = ("server", "status_code")
    server: str | None
    status_code: int | None


class PolicyError(GymgateError, RuntimeError):
    """A policy or judge endpoint failed; `status_code` is the HTTP status it gave, if it gave one.

    `retry_after_s` is how long it asked to be left alone (`Retry-After`).
    """

    fields = ("endpoint", "status_code", "retryable", "retry_after_s")
    endpoint: str | None
    status_code: int | None
    retryable: bool | None
    retry_after_s: float | None


class UnknownConversationError(PolicyError):
    """The replay policy has no recorded answer for this conversation."""


class TokenDataError(GymgateError, ValueError):
    """Token ids, masks or logprobs do not fit together, or are not numbers."""


class RolloutTimeoutError(GymgateError, TimeoutError):
    """A rollout outlived its deadline."""


class MissingExtraError(GymgateError, ImportError):
    """An optional dependency is not installed; the message holds the command that installs it."""


def from_wire(value: dict[str, Any]) -> GymgateError:
    """The error that `GymgateError.to_wire` described; an unknown name becomes a `GymgateError`."""
    names = {cls.__name__: cls for cls in _tree(GymgateError)}
    cls = names.get(str(value.get("error")), GymgateError)
    return cls(str(value.get("message", "")), **{name: value.get(name) for name in cls.fields})


def described(error: BaseException) -> str:
    """`Type: message` of any exception, even of one that fails to give its message."""
    try:
        return f"{type(error).__name__}: {error}".removesuffix(": ")
    except Exception:
        return type(error).__name__


def _tree(cls: type[GymgateError]) -> list[type[GymgateError]]:
    return [cls, *(leaf for child in cls.__subclasses__() for leaf in _tree(child))]
