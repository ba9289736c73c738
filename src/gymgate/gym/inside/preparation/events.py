"""Events of the program, one JSON line each:

step     what it is doing now, human-readable: text
bad      rows that cannot run for one reason: source, line of the first, reason, rows
file     a source is written: type, source, rows, bad, origin, agent, repeats, prompt, warning
lacks    packages are declared that are not installed: requirements
refused  it cannot be done: error (a class of `gymgate.core.errors`) and message
help     a script was asked for its help: text
failed   something raised: doing, chain (type, message, status and name of each exception, outermost first)
done     everything is written
"""

from __future__ import annotations

import json
from typing import IO, Any

MAX_CHAIN = 10


class EndedError(Exception):
    """Ends the program with the event `lacks`, `refused` or `help`, and its values."""

    def __init__(self, event: str, **values: Any) -> None:
        super().__init__(*values.values())
        self.event = event
        self.values = values


def refusal(error: str, message: str) -> EndedError:
    """Return the end of a program that cannot do it; `error` is the class of `gymgate.core.errors` to raise."""
    return EndedError("refused", message=message, error=error)


class Events:
    """Writes events and remembers the last step."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self.doing = "starting"

    def send(self, event: str, **values: Any) -> None:
        self._file.write(json.dumps({"event": event, **values}, default=str) + "\n")
        self._file.flush()

    def step(self, text: str) -> None:
        self.doing = text
        self.send("step", text=text)


def chain(error: BaseException | None) -> list[dict[str, Any]]:
    """An exception and its causes, outermost first."""
    errors: list[dict[str, Any]] = []
    while error is not None and len(errors) < MAX_CHAIN:
        response = getattr(error, "response", None)
        status = getattr(response, "status_code", None) or getattr(error, "code", None)
        errors.append(
            {
                "type": type(error).__name__,
                "message": str(error),
                "status": status if isinstance(status, int) else None,
                "name": getattr(error, "name", None) if isinstance(error, ImportError) else None,
            }
        )
        error = error.__cause__ or error.__context__
    return errors
