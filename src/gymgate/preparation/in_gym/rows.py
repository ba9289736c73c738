"""Raw rows to rows that run: the prompt put to them, checked as NeMo Gym's servers check them, sent to their agent."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from .declared import AGENTS, Declared, Source
from .places import Places
from .told import RefusedError, Told

MAX_BAD_TOLD = 20


class RowWriter:
    """Writes the good rows of sources and tells of the bad ones."""

    def __init__(self, declared: Declared, places: Places, told: Told) -> None:
        self.declared = declared
        self.places = places
        self.told = told
        self._agents = {*declared.agents()}
        self._default = declared.default_agent()
        self._agent_prompts = _manifest(Path(declared.order["directory"])).get("prompt_source") == "agent"

    def write(self, source: Source, path: Path, origin: dict[str, Any], out: IO[str]) -> None:
        """Every row of a source, in its order. What NeMo Gym's schema objects to is a warning, as it is there."""
        self.told.step(f"{source.name}: checking rows")
        prompt, schema = self._prompt(source), self._schema(source)
        rows = bad = 0
        for number, line in _lines(path):
            try:
                row = ready(line, prompt, agent_prompts=self._agent_prompts)
            except ValueError as error:
                bad += 1
                if bad <= MAX_BAD_TOLD:
                    self.told.tell("bad", source=str(path), line=number, reason=" ".join(str(error).split()))
                continue
            if schema is not None:
                schema.validate_row(number, row)
            row["agent_ref"] = {"type": AGENTS, "name": source.agent or self._own_agent(row)}
            out.write(json.dumps(row) + "\n")
            rows += 1
        self.told.tell(
            "file",
            type=source.type,
            source=source.name,
            origin=origin,
            agent=source.agent,
            repeats=int(source.dataset.get("num_repeats") or 1),
            prompt=str(source.dataset["prompt_config"]) if prompt is not None else None,
            warning=schema.report.summary() if schema is not None and schema.report.error_rows else None,
            rows=rows,
            bad=bad,
        )

    def _own_agent(self, row: dict[str, Any]) -> str:
        reference = row.get("agent_ref")
        named = reference.get("name") if isinstance(reference, dict) else None
        return named if named in self._agents else self._default

    def _prompt(self, source: Source) -> Any:
        """The prompt that the rows are put to; `None`: they have theirs."""
        named = source.dataset.get("prompt_config")
        if not named:
            return None
        path = self.places.located(str(named))
        if path is None:
            raise RefusedError("ConfigError", f"there is no prompt file {str(named)!r}")
        try:
            return importlib.import_module("nemo_gym.prompt").load_prompt_config(str(path))
        except Exception as error:
            problem = " ".join(str(error).split())
            raise RefusedError(
                "ConfigError", f"{named} is no prompt file (user: ..., system: ...): {problem}"
            ) from error

    def _schema(self, source: Source) -> Any:
        """NeMo Gym's check of what a verifier reads, where the release has one for this server (0.7 and later)."""
        if importlib.util.find_spec("nemo_gym.task_data") is None:
            return None
        module: Any = importlib.import_module("nemo_gym.task_data")
        kind, _, type_ = (source.server or self.declared.server_of(self._default)).partition("/")
        directory = module.find_server_dir(type_, base_folder=kind)
        try:
            adapter = module.load_task_data_schema(directory) if directory is not None else None
        except module.TaskDataSchemaError:
            return None  # it imports what only the server's environment has
        if adapter is None:
            return None
        return module.TaskDataValidator(server_name=type_, adapter=adapter, dataset_fpath=source.name)


def ready(line: bytes, prompt: Any, *, agent_prompts: bool = False) -> dict[str, Any]:
    """A line as a row that agents accept; `agent_prompts`: the agent makes the prompt, so that a row needs none.

    Raises `ValueError` with the reason.
    """
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"a row must be a JSON object, not {type(value).__name__}")
    row: dict[str, Any] = value
    params = row.get("responses_create_params")
    if prompt is not None:
        row = _prompted(row, prompt)
    elif agent_prompts and params is None:
        row["responses_create_params"] = {"input": []}
    elif not isinstance(params, dict) or "input" not in params:
        keys = ", ".join(repr(key) for key in list(row)[:5])
        raise ValueError(
            f"has no responses_create_params.input and no prompt to put to it ({keys}); --prompt FILE gives one"
        )
    request: Any = importlib.import_module("nemo_gym.base_resources_server").BaseRunRequest
    try:
        request.model_validate(row)
    except ValueError as error:
        raise ValueError(_first_complaint(error)) from None
    return row


def _prompted(row: dict[str, Any], prompt: Any) -> dict[str, Any]:
    module: Any = importlib.import_module("nemo_gym.prompt")
    params = row.get("responses_create_params")
    if isinstance(params, dict) and params.get("input"):
        raise ValueError(
            "has responses_create_params.input, and a prompt is to be put to it: one or the other"
        )
    try:
        filled: dict[str, Any] = module.apply_prompt_to_row(row, prompt)
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(str(error.args[0]) if error.args else repr(error)) from None
    return filled


def _manifest(directory: Path) -> dict[str, Any]:
    """What an environment says of itself, beside its config (0.7 and later)."""
    yaml: Any = importlib.import_module("yaml")
    try:
        value = yaml.safe_load((directory / "manifest.yaml").read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return value if isinstance(value, dict) else {}


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their 1-based numbers."""
    with path.open("rb") as file:
        yield from ((number, line) for number, line in enumerate(file, 1) if not line.isspace())


def _first_complaint(error: Any) -> str:
    """The first complaint of a validation, and how many more there are."""
    if not hasattr(error, "errors"):
        return str(error)
    first, *more = error.errors()
    others = f" (and {len(more)} more)" if more else ""
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}{others}"
