"""What the program tells, a JSON line each:

step     what is being done now, for people
bad      a row that cannot run: source, line, reason
file     a source is written: type, source, rows, bad, origin, agent, repeats, prompt, warning
lacks    packages are declared that this environment does not have: requirements
refused  it cannot be done: error (a class of `gymgate.errors`) and message
help     a script was asked for its help and gave it: text
failed   something raised: doing, chain (type, message, status and name of each exception, outermost first)
done     everything is written
"""

from __future__ import annotations

import json
from typing import IO, Any

MAX_CHAIN = 10


class RefusedError(Exception):
    """It cannot be done, for a reason that needs no trace."""

    def __init__(self, error: str, message: str) -> None:
        super().__init__(message)
        self.error = error


class HelpError(Exception):
    """A script was asked for its help, which this is, and made nothing."""


class LacksError(Exception):
    """A script declares packages that are not installed."""

    def __init__(self, requirements: list[str]) -> None:
        super().__init__(", ".join(requirements))
        self.requirements = requirements


class Told:
    """Writes events; knows what is being done."""

    def __init__(self, events: IO[str]) -> None:
        self._events = events
        self.doing = "starting"

    def tell(self, event: str, **values: Any) -> None:
        self._events.write(json.dumps({"event": event, **values}, default=str) + "\n")
        self._events.flush()

    def step(self, text: str) -> None:
        self.doing = text
        self.tell("step", text=text)


def chain(error: BaseException | None) -> list[dict[str, Any]]:
    """An exception and what it came of, outermost first."""
    found: list[dict[str, Any]] = []
    while error is not None and len(found) < MAX_CHAIN:
        response = getattr(error, "response", None)
        status = getattr(response, "status_code", None) or getattr(error, "code", None)
        found.append(
            {
                "type": type(error).__name__,
                "message": str(error),
                "status": status if isinstance(status, int) else None,
                "name": getattr(error, "name", None) if isinstance(error, ImportError) else None,
            }
        )
        error = error.__cause__ or error.__context__
    return found
