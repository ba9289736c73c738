"""Rows that a script of an environment makes with arguments of the user's, reasoning_gym's generator among them."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .declared import Source
from .places import Places
from .stamps import digest_of
from .told import HelpError, RefusedError

PATTERNS = ("prepare*.py", "*dataset*.py", "generate*.py")
"""Names of scripts that make data, in an environment's directory and in its `scripts`."""
OUTPUT = "--output"
"""Taken by most of them."""
HELP = {"-h", "--help"}


def scripted(order: dict[str, Any], places: Places) -> Iterator[Source]:
    """A source for each file that the script wrote."""
    script, arguments = _script(order, places), list(order["script_arguments"])
    staged = Path(order["stage"]) / ".made.jsonl"
    if takes(script, OUTPUT) and OUTPUT not in arguments:
        arguments += [OUTPUT, str(staged)]
    before = _rows_below(script.parent)
    with contextlib.redirect_stdout(io.StringIO() if HELP & {*arguments} else sys.stdout) as said:
        places.execute(script, arguments)
    made = [path for path, time in _rows_below(script.parent).items() if before.get(path) != time]
    made += [staged] if staged.is_file() else []
    if not made and isinstance(said, io.StringIO):
        raise HelpError(said.getvalue())
    if not made:
        raise RefusedError(
            "DataError", f"{script.name} ended without writing a JSONL file in {script.parent}"
        )
    for path in made:
        origin = {
            "kind": "script",
            "script": script.name,
            "script_sha256": digest_of(script),
            "arguments": order["script_arguments"],
            "sha256": digest_of(path),
        }
        dataset = {"jsonl_fpath": str(path), "prompt_config": order["prompt"]}
        yield Source(script.name, order["type"] if len(made) == 1 else path.stem, dataset, made=origin)


def takes(script: Path, option: str) -> bool:
    """Whether a script has an option."""
    return f'"{option}"' in script.read_text(errors="replace")


def candidates(order: dict[str, Any]) -> list[Path]:
    """Scripts of the environment that look as if they make data."""
    directory = Path(order["directory"])
    where = (directory, directory / "scripts")
    return sorted({path for place in where for pattern in PATTERNS for path in place.glob(pattern)})


def _rows_below(directory: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in sorted(directory.rglob("*.jsonl"))}


def _script(order: dict[str, Any], places: Places) -> Path:
    """The script that was named, else the only one that the environment has; where it may write beside itself."""
    directory, named = Path(order["directory"]), order["script"]
    where = (directory, directory / "scripts")
    found: list[Path] = [place / named for place in where if (place / named).is_file()][:1] if named else []
    if not named:
        found = candidates(order)
    if len(found) != 1:
        every = sorted({path for place in where for path in place.glob("*.py")} - {directory / "app.py"})
        names = ", ".join(path.name for path in found or every if not path.name.startswith("_"))
        what = (
            f"no script {named!r}" if named else f"{'several scripts' if found else 'no script'} to make data"
        )
        raise RefusedError(
            "ConfigError", f"{directory.name} has {what}; name one with --script: {names or 'none'}"
        )
    if places.site not in found[0].parents:
        return found[0]
    relative = found[0].relative_to(places.site)
    return places.script_root(str(relative)) / relative
