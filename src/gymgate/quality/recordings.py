"""An environment's recorded rollouts, each with the row to run for it. A broken line costs only itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gymgate.core import codec
from gymgate.core.errors import DataError
from gymgate.gateway.replay.recording import Recording, pair_rows, recorded_rollouts
from gymgate.gym.catalog import DataFile, EnvConfig, Environment
from gymgate.gym.catalog.entries import kind_of_file
from gymgate.quality.known import known
from gymgate.rollouts.row_fields import agent_of, flat_row

DERIVED = ("materialized_inputs", "reward_profiling")
"""Parts of the names of files that NeMo Gym derives from recorded rollouts."""
RowData = dict[str, Any]


@dataclass(frozen=True)
class RecordedRow:
    """A recorded rollout and the row to run for it."""

    recording: Recording
    row: RowData
    packaged: bool
    """Whether `row` is a packaged row; otherwise it is made of the record."""

    @property
    def name(self) -> str:
        return f"{Path(self.recording.path).stem}:{self.recording.line}"

    @property
    def agent(self) -> str | None:
        """The agent that was recorded."""
        return agent_of(self.recording.raw)


def with_own_data(environment: Environment) -> Environment:
    """A user's config file in `NAME/configs` gets the files of `NAME/data`, recordings among them."""
    directory = environment.path.parent / "data"
    if environment.kind != "config" or environment.path.name != "configs" or not directory.is_dir():
        return environment
    files = (DataFile(path.stem, path, kind_of_file(path)) for path in sorted(directory.glob("*.jsonl")))
    return dataclasses.replace(environment, data=tuple(files))


def read_recordings(environment: Environment) -> tuple[list[RecordedRow], list[str]]:
    """Every recorded rollout that can be read; and `file:line` of each that cannot, with the reason."""
    rows_read: list[RecordedRow] = []
    errors: list[DataError] = []
    for path in recording_files(environment):
        rows = packaged_rows(environment, near=path)
        shape = known()["shapes"].get(environment.name)
        convert = partial(as_rollout, shape=shape, rows=rows)
        recordings = recorded_rollouts([path], convert=convert, broken=errors)
        for recording, row in zip(recordings, pair_rows(recordings, rows), strict=True):
            rows_read.append(RecordedRow(recording, row or as_row(recording, rows), row is not None))
    return rows_read, [error.message.replace(f"{Path(error.path or '').parent}/", "", 1) for error in errors]


def recording_files(environment: Environment) -> list[Path]:
    """Files of recorded rollouts, by their content or, if every line is broken, by their name."""
    return [
        file.path
        for file in environment.data
        if file.kind == "rollouts" or (file.kind in ("other", "rows") and "rollouts" in file.path.stem)
        if not any(part in file.path.stem for part in DERIVED)
    ]


def as_rollout(record: Any, shape: Mapping[str, str] | None, rows: Sequence[RowData]) -> Any:
    """A record of an environment's own format (`shapes` in `known.toml`) as a recorded rollout.

    It gets the row that holds the value of its field `row`, and its field `said` as the policy's message. Other
    records stay as they are.
    """
    if shape is None or not isinstance(record, dict) or not record.keys() >= {*shape.values()}:
        return record
    value = str(record[shape["row"]]).encode()
    row = next((row for row in rows if value in codec.dumps(row)), None)
    if row is None:
        return record
    message = {"type": "message", "role": "assistant", "content": record[shape["said"]]}
    return {**row, **record, "response": {"output": [message]}}


def as_row(recording: Recording, packaged: Sequence[RowData]) -> RowData:
    """A record as a row: its parameters and the fields that packaged rows have. The verifier added the others."""
    fields = {name for row in packaged for name in row} or set(recording.row)
    fields.add("responses_create_params")
    return {name: value for name, value in recording.row.items() if name in fields}


def packaged_rows(
    environment: Environment, *, near: Path | None = None, config: EnvConfig | None = None
) -> list[RowData]:
    """Every packaged row that can be run: from files that `config` declares first, then from files beside `near`,
    then from files called `example`."""
    declared = {dataset.path for dataset in config.datasets} if config is not None else set()
    files = [file.path for file in environment.data if file.kind == "rows"]
    files.sort(
        key=lambda path: (
            not any(path.as_posix().endswith("/" + name.lstrip("./")) for name in declared),
            near is not None and path.parent != near.parent,
            path.stem != "example",
        )
    )
    return [row for path in files for row in _rows(path)]


def is_derived(path: Path) -> bool:
    """Whether a file was made from recorded rollouts."""
    return any(part in path.stem for part in (*DERIVED, "rollouts"))


def _rows(path: Path) -> Iterator[RowData]:
    if is_derived(path):
        return
    for text in path.read_bytes().split(b"\n"):
        try:
            row = codec.loads(text)
        except ValueError:
            continue
        row = flat_row(row) if isinstance(row, dict) else {}
        if isinstance(row.get("responses_create_params"), dict):
            yield dict(row)


def config_for(
    environment: Environment, recorded: Sequence[RecordedRow], requested: str | Sequence[str] | None = None
) -> tuple[EnvConfig, list[str]]:
    """The config to start: the requested one, else the one with the recorded agents, else the default one; and a note on
    each recorded agent that no config has."""
    default = environment.config(requested)
    names = {row.agent for row in recorded if row.agent is not None}
    existing = {name for config in environment.configs for name in config.row_targets}
    notes = [f"recorded agent {name!r} no longer exists" for name in sorted(names - existing)]
    agents = names & existing
    if requested or not agents or agents & _agents(default):
        return default, notes
    return max(environment.configs, key=lambda config: len(agents & _agents(config))), notes


def _agents(config: EnvConfig) -> set[str]:
    return {*config.row_targets}
