"""Rows that a script of an environment makes with the user's arguments, such as reasoning_gym's generator."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .directories import Directories, sha256_of
from .events import EndedError, refusal
from .sources import RawSource

PATTERNS = ("prepare*.py", "*dataset*.py", "generate*.py")
"""Names of scripts that make data, in an environment's directory and in its `scripts`."""
OUTPUT = "--output"
"""An option that most of them have."""


def run_script(order: dict[str, Any], directories: Directories) -> Iterator[RawSource]:
    """Run the order's script; a source for each file that it wrote."""
    script, arguments = _script(order, directories), list(order["script_arguments"])
    staged = Path(order["stage"]) / ".made.jsonl"
    if has_option(script, OUTPUT) and OUTPUT not in arguments:
        arguments += [OUTPUT, str(staged)]
    asks_help = not {"-h", "--help"}.isdisjoint(arguments)
    before = _rows_below(script.parent)
    with contextlib.redirect_stdout(io.StringIO() if asks_help else sys.stdout) as printed:
        directories.execute(script, arguments)
    files = [path for path, time in _rows_below(script.parent).items() if before.get(path) != time]
    files += [staged] if staged.is_file() else []
    if not files and isinstance(printed, io.StringIO):
        raise EndedError("help", text=printed.getvalue())
    if not files:
        problem = f"{script.name} ended without writing a JSONL file in {script.parent}"
        raise refusal("DataError", problem)
    for path in files:
        origin = {
            **script_origin(script, script.name),
            "arguments": order["script_arguments"],
            "sha256": sha256_of(path),
        }
        dataset = {"jsonl_fpath": str(path), "prompt_config": order["prompt"]}
        yield RawSource(script.name, order["type"] if len(files) == 1 else path.stem, dataset, origin=origin)


def script_origin(script: Path, name: str) -> dict[str, Any]:
    return {"kind": "script", "script": name, "script_sha256": sha256_of(script)}


def has_option(script: Path, option: str) -> bool:
    return f'"{option}"' in script.read_text(errors="replace")


def candidates(order: dict[str, Any]) -> list[Path]:
    """Scripts of the environment that make data, by their names."""
    return sorted(
        {path for directory in _within(order) for pattern in PATTERNS for path in directory.glob(pattern)}
    )


def _within(order: dict[str, Any]) -> tuple[Path, Path]:
    directory = Path(order["directory"])
    return directory, directory / "scripts"


def _rows_below(directory: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in sorted(directory.rglob("*.jsonl"))}


def _script(order: dict[str, Any], directories: Directories) -> Path:
    """The script that was chosen, else the environment's only one; where it may write beside itself."""
    chosen, within = order["script"], _within(order)
    scripts = (
        [directory / chosen for directory in within if (directory / chosen).is_file()][:1]
        if chosen
        else candidates(order)
    )
    if len(scripts) != 1:
        every = sorted(
            {path for directory in within for path in directory.glob("*.py")} - {within[0] / "app.py"}
        )
        names = ", ".join(path.name for path in scripts or every if not path.name.startswith("_"))
        several = "several scripts" if scripts else "no script"
        what = f"no script {chosen!r}" if chosen else f"{several} to make data"
        problem = f"{within[0].name} has {what}; give one with --script: {names or 'none'}"
        raise refusal("ConfigError", problem)
    if directories.site not in scripts[0].parents:
        return scripts[0]
    relative = scripts[0].relative_to(directories.site)
    return directories.script_root(str(relative)) / relative
