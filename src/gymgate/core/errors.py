"""Every error that gymgate raises, and how each one crosses a process boundary.

    GymgateError
      ConfigError(ValueError)              a name does not exist, or a value or combination of options is wrong
        OptionError                        a value on the command line does not have the form that its option takes
      DataError(ValueError)                a row or a file of rows is malformed, or a file cannot be written
      NeedMissingError(RuntimeError)       an environment needs something that this machine does not have
      SetupError(RuntimeError)             the NeMo Gym runtime could not be installed
      StackStartError(RuntimeError)        a server of the stack did not start
      StackLostError(ConnectionError)      the stack's daemon is gone
      ServerDiedError(RuntimeError)        a server died while a rollout needed it                [infrastructure]
      EnvironmentBusyError(RuntimeError)   an environment server admits no further episode        [infrastructure]
      EnvironmentServerError(RuntimeError) an agent or resources server answered with an error    [environment]
        PolicyNeverAskedError              an agent ended a rollout before its first model call
      PolicyError(RuntimeError)            a policy's endpoint failed                             [policy]
        JudgeError                         that of a judge or another model server failed
        UnknownConversationError           the recorded rollouts have no answer for this conversation
        DivergedError                      a rescored rollout did not go as it was recorded
      TokenDataError(ValueError)           token ids, masks or logprobs are invalid or contradict one another
      RolloutTimeoutError(TimeoutError)    a rollout exceeded its deadline                        [timeout]
      MissingExtraError(ImportError)       an optional dependency is not installed

A failed rollout is data, not an exception: it carries a `RolloutError` (see `gymgate.rollout`), whose `kind` is the word
in brackets, and `infrastructure` for an error of gymgate's own. The classes here are raised at the boundary that failed,
with attributes for programs to read.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

ErrorKind = Literal["infrastructure", "environment", "policy", "data", "timeout"]
"""The cause of a failed rollout; decides about retries and is counted in metrics."""


_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Characters that a terminal obeys, without line ends and tabs: escapes, and marks that reorder a line."""


def printable(text: str) -> str:
    """Return text from outside as a terminal may be sent it: control characters as escapes, e.g. `\\x1b`."""
    return _CONTROLS.sub(lambda control: control.group().encode("unicode_escape").decode(), text)


def printable_json(document: str) -> str:
    """Return a JSON document with these characters escaped as JSON has it, so that its value is the same."""
    return _CONTROLS.sub(lambda control: f"\\u{ord(control.group()):04x}", document)


def near(name: str, names: Sequence[str]) -> list[str]:
    """Return up to five names that resemble `name`, the closest first. Upper and lower case are the same."""
    small = name.lower()
    by_small: dict[str, list[str]] = {}
    for other in names:
        by_small.setdefault(other.lower(), []).append(other)
    close = difflib.get_close_matches(small, by_small, n=5, cutoff=0.6)
    close += [other for other in by_small if small and (small in other or other in small)]
    return list(dict.fromkeys(other for key in close for other in by_small[key]))[:5]


class GymgateError(Exception):
    """Root of the tree. `str()` is one line: what failed, the value seen, and what to do."""

    fields: ClassVar[tuple[str, ...]] = ()
    """Attributes that cross a process boundary beside the message: those that a class and its bases annotate."""

    def __init_subclass__(cls) -> None:
        cls.fields = (*cls.fields, *inspect.get_annotations(cls))

    def __init__(self, message: str, **attributes: Any) -> None:
        self.message = printable(message)
        super().__init__(self.message)
        for name in self.fields:
            setattr(self, name, attributes.pop(name, None))
        if attributes:
            raise TypeError(f"{type(self).__name__} has no attributes {sorted(attributes)}")

    def __reduce__(self) -> tuple[Any, ...]:
        return (from_wire, (self.to_wire(),))

    def to_wire(self) -> dict[str, Any]:
        """Return the error as a JSON-serialisable dict, which `from_wire` reads back."""
        values = {name: getattr(self, name) for name in self.fields}
        return {"error": type(self).__name__, "message": self.message, **values}


class ConfigError(GymgateError, ValueError):
    """A name does not exist, or a value or combination of options is wrong; the message lists the choices."""


class OptionError(ConfigError):
    """A value on the command line does not have the form that its option takes. Commands exit with 2."""


class DataError(GymgateError, ValueError):
    """A row or a file of rows is malformed, or a file cannot be written."""

    path: str | None
    line: int | None


class NeedMissingError(GymgateError, RuntimeError):
    """An environment needs something that this machine does not have (docker, a key, a download, ...).

    `kind` is the kind of need as `gymgate list` names it (`docker`, `binary`, ...); `None` for a value of its config.
    """

    environment: str | None
    need: str | None
    kind: str | None


class SetupError(GymgateError, RuntimeError):
    """The NeMo Gym runtime could not be installed (no interpreter, no network, disk full, ...).

    `kind` classifies uv's failure (`network`, `conflict`, ...); `None` if something else failed. `requirement` is the one that
    could not be fetched from the address that it names.
    """

    kind: str | None
    requirement: str | None


class StackStartError(GymgateError, RuntimeError):
    """A server of the stack did not start in time (`timed_out`), or ended while starting, with `exit_status`."""

    environment: str | None
    server: str | None
    log_tail: str | None
    timed_out: bool | None
    exit_status: int | None


class StackLostError(GymgateError, ConnectionError):
    """The stack's daemon is gone, or the stack was closed while a call was waiting."""


class ServerDiedError(GymgateError, RuntimeError):
    """A server of the environment died while a rollout needed it."""

    environment: str | None
    server: str | None
    log_tail: str | None


class EnvironmentBusyError(GymgateError, RuntimeError):
    """An environment server did not admit an episode in time, because it runs as many as its config allows at once."""

    server: str | None


class EnvironmentServerError(GymgateError, RuntimeError):
    """A server of the environment answered with an error of its own, or made a model call that cannot be sent on."""

    server: str | None
    status_code: int | None


class PolicyNeverAskedError(EnvironmentServerError):
    """An agent ended a rollout before its first model call."""


class PolicyError(GymgateError, RuntimeError):
    """A policy's endpoint failed.

    `status_code` is the HTTP status it answered with, `None` without an answer; `retry_after_s` are the seconds that it
    asked to wait (`Retry-After`); `code` and `param` are those of its error body. `code` is `context_length_exceeded` for every
    endpoint that says so in words.
    """

    endpoint: str | None
    status_code: int | None
    retryable: bool | None
    retry_after_s: float | None
    code: str | None
    param: str | None


class JudgeError(PolicyError):
    """The endpoint of a judge, or of another model server than the policy's, failed."""


class UnknownConversationError(PolicyError):
    """The recorded rollouts have no answer for this conversation.

    `alike` is how many of its first messages the nearest recording shares; `None` if the recordings hold no turns.
    """

    alike: int | None


class DivergedError(PolicyError):
    """A rescored rollout did not go as it was recorded, so its reward would not be that of the recorded conversation."""


class TokenDataError(GymgateError, ValueError):
    """Token ids, masks or logprobs are not numbers, or differ in length or content where they must agree."""


class RolloutTimeoutError(GymgateError, TimeoutError):
    """A rollout exceeded its deadline."""


class MissingExtraError(GymgateError, ImportError):
    """An optional dependency is not installed; the message holds the command that installs it."""


def from_wire(value: dict[str, Any]) -> GymgateError:
    """Return the error that `GymgateError.to_wire` described; an unknown name becomes a `GymgateError`."""
    names = {cls.__name__: cls for cls in _tree(GymgateError)}
    cls = names.get(str(value.get("error")), GymgateError)
    return cls(str(value.get("message", "")), **{name: value.get(name) for name in cls.fields})


def described(error: BaseException) -> str:
    """Return `Type: message` of any exception, or its type alone where `str()` of it fails."""
    try:
        return f"{type(error).__name__}: {error}".removesuffix(": ")
    except Exception:
        return type(error).__name__


def _tree(cls: type[GymgateError]) -> list[type[GymgateError]]:
    return [cls, *(leaf for child in cls.__subclasses__() for leaf in _tree(child))]
