"""From raw rows (JSONL, CSV) to rows that run: filled into their prompt, checked as NeMo Gym's servers do, with their agent."""

from __future__ import annotations

import csv
import difflib
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import IO, Any

from ..names import gym_symbol
from .directories import Directories
from .events import Events, refusal
from .sources import AGENTS, DeclaredData, RawSource

METADATA = "verifier_metadata"
MORE_CELLS = ""
"""The field with the cells of a CSV line beyond its columns."""
MAX_BAD_EVENTS = 20
"""Kinds of bad rows in one source that are reported."""


class RowWriter:
    """Writes the good rows of sources and reports the bad ones."""

    def __init__(self, declared: DeclaredData, directories: Directories, events: Events) -> None:
        self.declared = declared
        self.directories = directories
        self.events = events
        self._agents = {*declared.agents()}
        self._default = declared.default_agent()
        manifest = _manifest(Path(declared.order["directory"]))
        self._agent_prompts = manifest.get("prompt_source") == "agent"
        self._renamed: dict[str, str] = declared.order["rename"]
        self._is_own = bool(declared.order["input"])

    def write(self, source: RawSource, path: Path, origin: dict[str, Any], out: IO[str]) -> None:
        """Write every row of a source, in order.

        What NeMo Gym's schema objects to is a warning, as it is there, but makes a row of the user's own file a bad one.
        """
        self.events.step(f"{source.name}: checking rows")
        prompt, (check, report) = self._prompt(source), self._check(source)
        rows, bad = 0, dict[str, list[int]]()
        for number, line in _lines(path):
            try:
                row = ready_row(line, prompt, agent_prompts=self._agent_prompts, renamed=self._renamed)
                check(number, row)
            except ValueError as error:
                bad.setdefault(" ".join(str(error).split()), []).append(number)
                continue
            row["agent_ref"] = {"type": AGENTS, "name": source.agent or self._agent_in(row)}
            out.write(json.dumps(row) + "\n")
            rows += 1
        for reason, numbers in [*bad.items()][:MAX_BAD_EVENTS]:
            self.events.send("bad", source=str(path), line=numbers[0], reason=reason, rows=len(numbers))
        self.events.send(
            "file",
            type=source.type,
            source=source.name,
            origin=origin,
            agent=source.agent,
            repeats=int(source.dataset.get("num_repeats") or 1),
            prompt=str(source.dataset["prompt_config"]) if prompt is not None else None,
            warning=report.summary() if report is not None and report.error_rows else None,
            rows=rows,
            bad=sum(map(len, bad.values())),
        )

    def _agent_in(self, row: dict[str, Any]) -> str:
        """The agent that a row names, if the config has it; otherwise the config's default."""
        reference = row.get("agent_ref")
        agent = reference.get("name") if isinstance(reference, dict) else None
        return agent if agent in self._agents else self._default

    def _prompt(self, source: RawSource) -> Any:
        """The prompt to fill rows into; `None` if they have their own."""
        prompt_file = source.dataset.get("prompt_config")
        if not prompt_file:
            return None
        path = self.directories.find(str(prompt_file))
        if path is None:
            raise refusal("ConfigError", f"there is no prompt file {str(prompt_file)!r}")
        try:
            return gym_symbol("load_prompt_config")(str(path))
        except Exception as error:
            problem = (
                f"{prompt_file} is no prompt file (user: ..., system: ...): {' '.join(str(error).split())}"
            )
            raise refusal("ConfigError", problem) from error

    def _check(self, source: RawSource) -> tuple[Callable[[int, dict[str, Any]], None], Any]:
        """Return NeMo Gym's check of the fields that a server reads in a row, given its line, and the report that it adds to.

        The check of the user's own rows refuses them instead, and there may be no schema: then there is no report.
        """
        kind, _, server = (source.server or self.declared.server_of(self._default)).partition("/")
        directory = gym_symbol("find_server_dir")(server, base_folder=kind)
        try:
            schema = gym_symbol("load_task_data_schema")(directory) if directory is not None else None
        except gym_symbol("TaskDataSchemaError"):
            schema = None  # it imports packages that only the server's environment has
        if schema is None:
            return lambda line, row: None, None
        if self._is_own:
            nested = gym_symbol("legacy_metadata_fields")(schema)
            return lambda line, row: _refuse_objection(row, schema, nested), None
        validator = gym_symbol("TaskDataValidator")(
            server_name=server, adapter=schema, dataset_fpath=source.name
        )
        return validator.validate_row, validator.report


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the rows of a file, as JSON, with the lines at which they stand; those of a CSV file hold texts.

    A line of a CSV file with fewer cells than there are columns lacks the last fields; what is too much is in `MORE_CELLS`. One
    of empty cells, as spreadsheets leave them, is blank.
    """
    if path.suffix.lower() == ".csv":
        csv.field_size_limit(sys.maxsize)
        try:
            yield from _csv_lines(path)
        except (csv.Error, UnicodeDecodeError) as error:
            raise refusal("DataError", f"{path} is not CSV in UTF-8: {error}") from error
        return
    with path.open("rb") as lines:
        yield from ((number, line) for number, line in enumerate(lines, 1) if not line.isspace())


def _csv_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, restkey=MORE_CELLS)
        names = [name for name in reader.fieldnames or () if name]  # spreadsheets write columns without one
        if len({*names}) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise refusal("ConfigError", f"{path}: there is more than one column {twice!r}")
        for record in reader:
            cells = {name: text for name, text in record.items() if text is not None}
            if any("".join(text).strip() for text in cells.values()):
                yield reader.line_num, json.dumps(cells).encode()


def _refuse_objection(row: dict[str, Any], schema: Any, nested: Set[str]) -> None:
    """Raise `ValueError` with what NeMo Gym's schema objects to in a row: a field that is not there, or that the server looks for
    in `verifier_metadata` (`nested`)."""
    fields, _ = gym_symbol("normalize_task_fields")(row)
    try:
        schema.validate_python(fields)
    except ValueError as error:
        problems = error.errors() if hasattr(error, "errors") else []
        missing = {str(problem["loc"][-1]) for problem in problems if problem["type"] == "missing"}
        if not missing:
            raise ValueError(_first_problem(error)) from None
        raise ValueError(_missing(sorted(missing), fields)) from None
    place = row.get(METADATA)
    misplaced = (row.keys() & nested) - {*(place if isinstance(place, dict) else ())}
    if misplaced:
        names = ", ".join(map(repr, sorted(misplaced)))
        raise ValueError(f"the server looks for {names} in the row's {METADATA!r}, not at its top level")


def _missing(missing: list[str], fields: dict[str, Any]) -> str:
    """Which fields a row lacks, and the options that make them of those it has."""
    options = []
    for name in missing:
        part = [other for other in fields if name.endswith(other) or other.endswith(name)]
        if near := part or difflib.get_close_matches(name, fields, 1):
            options.append(f"--rename {near[0]}={name}")
    hint = f"; {' '.join(options)} makes it of what is there" if options else ""
    has = ", ".join(map(repr, fields)) or "no other field"
    return f"lacks {', '.join(map(repr, missing))}, and has {has}{hint}"


def ready_row(
    line: bytes, prompt: Any, *, agent_prompts: bool, renamed: dict[str, str] | None = None
) -> dict[str, Any]:
    """A line as a row that agents accept, its fields `renamed`. With `agent_prompts`, the agent makes the prompt.

    Raises `ValueError` with the reason.
    """
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"a row must be a JSON object, not {type(row).__name__}")
    if isinstance(row.get(MORE_CELLS), list):  # a text is that of a column without a name, e.g. of an index
        raise ValueError("has more cells than there are columns: put a cell with a comma in quotation marks")
    for old, new in (renamed or {}).items():
        if old not in row or new in row:
            raise ValueError(f"--rename {old}={new}: it has {', '.join(map(repr, row)) or 'no field'}")
        row[new] = row.pop(old)
    params = row.get("responses_create_params")
    if prompt is not None:
        row = _fill(prompt, row)
    elif agent_prompts and params is None:
        row["responses_create_params"] = {"input": []}
    elif not isinstance(params, dict) or "input" not in params:
        keys = ", ".join(repr(key) for key in list(row)[:5])
        raise ValueError(
            f"has no responses_create_params.input, and there is no prompt to fill with its fields ({keys}); "
            "give one with --prompt FILE"
        )
    request: Any = gym_symbol("BaseRunRequest")
    try:
        request.model_validate(row)
    except ValueError as error:
        raise ValueError(_first_problem(error)) from None
    checked: dict[str, Any] = row
    return checked


def _fill(prompt: Any, row: dict[str, Any]) -> dict[str, Any]:
    params = row.get("responses_create_params")
    if isinstance(params, dict) and params.get("input"):
        raise ValueError(
            "has responses_create_params.input although there is a prompt to fill: remove one of them"
        )
    try:
        filled: dict[str, Any] = gym_symbol("apply_prompt_to_row")(row, prompt)
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(str(error.args[0]) if error.args else repr(error)) from None
    return filled


def _manifest(directory: Path) -> dict[str, Any]:
    """The `manifest.yaml` beside an environment's config (0.7 and later); empty if there is none."""
    yaml: Any = importlib.import_module("yaml")
    try:
        value = yaml.safe_load((directory / "manifest.yaml").read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return value if isinstance(value, dict) else {}


def _first_problem(error: Any) -> str:
    """The first problem that a validation found, and how many more there are."""
    if not hasattr(error, "errors"):
        return str(error)
    first, *more = error.errors()
    others = f" (and {len(more)} more)" if more else ""
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}{others}"
