"""From raw rows to rows that run: filled into their prompt, checked as NeMo Gym's servers do, with their agent."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import IO, Any

from ..names import gym_symbol
from .directories import Directories
from .events import Events, refusal
from .sources import AGENTS, DeclaredData, RawSource

MAX_BAD_EVENTS = 20


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

    def write(self, source: RawSource, path: Path, origin: dict[str, Any], out: IO[str]) -> None:
        """Write every row of a source, in order. Objections of NeMo Gym's schema are a warning, as they are there."""
        self.events.step(f"{source.name}: checking rows")
        prompt, schema = self._prompt(source), self._schema(source)
        rows = bad = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.isspace():
                    continue
                try:
                    row = ready_row(line, prompt, agent_prompts=self._agent_prompts)
                except ValueError as error:
                    bad += 1
                    if bad <= MAX_BAD_EVENTS:
                        reason = " ".join(str(error).split())
                        self.events.send("bad", source=str(path), line=number, reason=reason)
                    continue
                if schema is not None:
                    schema.validate_row(number, row)
                row["agent_ref"] = {"type": AGENTS, "name": source.agent or self._agent_in(row)}
                out.write(json.dumps(row) + "\n")
                rows += 1
        self.events.send(
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

    def _schema(self, source: RawSource) -> Any:
        """NeMo Gym's check of the fields that a verifier reads; `None` if there is none for this server."""
        kind, _, type_ = (source.server or self.declared.server_of(self._default)).partition("/")
        directory = gym_symbol("find_server_dir")(type_, base_folder=kind)
        try:
            adapter = gym_symbol("load_task_data_schema")(directory) if directory is not None else None
        except gym_symbol("TaskDataSchemaError"):
            return None  # it imports packages that only the server's environment has
        if adapter is None:
            return None
        return gym_symbol("TaskDataValidator")(server_name=type_, adapter=adapter, dataset_fpath=source.name)


def ready_row(line: bytes, prompt: Any, *, agent_prompts: bool) -> dict[str, Any]:
    """A line as a row that agents accept. With `agent_prompts`, the agent makes the prompt and a row needs none.

    Raises `ValueError` with the reason.
    """
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"a row must be a JSON object, not {type(row).__name__}")
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
