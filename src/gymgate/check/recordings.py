"""An environment's recorded rollouts, one file each, so that a broken line costs only itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from gymgate.catalog import EnvConfig, Environment
from gymgate.check.causes import own_shape
from gymgate.errors import GymgateError
from gymgate.gateway.replay import Recording, pair_rows, recorded_rollouts

DERIVED = ("materialized_inputs", "reward_profiling")
"""Files that NeMo Gym writes beside recorded rollouts and that are none."""


@dataclass(frozen=True)
class Sample:
    """A recorded rollout and the row to run for it."""

    name: str
    recording: Recording
    row: dict[str, Any]
    packaged: bool
    """Whether `row` is a packaged one, and not the record itself."""

    @property
    def agent(self) -> str | None:
        """The agent that was recorded."""
        reference = self.recording.raw.get("agent_ref")
        name = reference.get("name") if isinstance(reference, dict) else reference
        return name if isinstance(name, str) else None


@dataclass(frozen=True)
class Samples:
    """What an environment ships to be replayed."""

    samples: tuple[Sample, ...]
    broken: tuple[str, ...]
    """`file:line` and what is wrong with it."""
    files: int


def read_samples(environment: Environment, directory: Path) -> Samples:
    """Every recorded rollout that can be read, written to a file of its own in `directory`."""
    broken: list[str] = []
    samples: list[Sample] = []
    files = recording_files(environment)
    for path in files:
        rows_near = packaged_rows(environment, path)
        recordings = list(_salvaged(path, directory, broken, own_shape(environment.name), rows_near))
        rows = pair_rows(recordings, rows_near)
        for recording, row in zip(recordings, rows, strict=True):
            name = Path(recording.path).stem.replace("__", ":")
            sample = Sample(name, recording, row or as_row(recording, rows_near), row is not None)
            samples.append(sample)
    return Samples(tuple(samples), tuple(broken), len(files))


def as_row(recording: Recording, packaged: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A record as a row: of what it holds beside the parameters, only what packaged rows hold, too; the rest is
    what the verifier added."""
    fields = {name for row in packaged for name in row} or set(recording.row)
    return {
        name: value for name, value in recording.row.items() if name in fields | {"responses_create_params"}
    }


def recording_files(environment: Environment) -> list[Path]:
    """Files of recorded rollouts; one of which every line is broken is told by its name."""
    return [
        file.path
        for file in environment.data
        if file.kind == "rollouts" or (file.kind in ("other", "rows") and "rollouts" in file.path.stem)
        if not any(mark in file.path.stem for mark in DERIVED)
    ]


def _salvaged(
    path: Path,
    directory: Path,
    broken: list[str],
    shape: dict[str, str],
    rows: Sequence[dict[str, Any]],
) -> Iterator[Recording]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        broken.append(f"{path.name}: {error.strerror}")
        return
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        single = directory / f"{path.stem}__{number}.jsonl"
        single.write_bytes((as_rollout(text, shape, rows) if shape else text) + b"\n")
        try:
            yield from recorded_rollouts([single])
        except GymgateError as error:
            reason = str(error).removeprefix(f"{single}:1 ")
            broken.append(f"{path.name}:{number} {reason}")


def as_rollout(text: bytes, shape: dict[str, str], rows: Sequence[dict[str, Any]]) -> bytes:
    """A record of an environment's own shape (see `own_shape`) as a recorded rollout: with the row that holds the
    value of its field `row`, and as the policy's message what its field `said` holds. Others stay as they are."""
    try:
        record = orjson.loads(text)
        mark, said = str(record[shape["row"]]).encode(), record[shape["said"]]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return text
    row = next((row for row in rows if mark in orjson.dumps(row)), None)
    if row is None:
        return text
    message = {"type": "message", "role": "assistant", "content": said}
    return orjson.dumps({**row, **record, "response": {"output": [message]}})


def packaged_rows(
    environment: Environment, near: Path | None = None, config: EnvConfig | None = None
) -> list[dict[str, Any]]:
    """Every packaged row that can be run: those that `config` declares first, then those beside `near`, then those
    of files called `example`."""
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


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if any(mark in path.stem for mark in (*DERIVED, "rollouts")):
        return
    for text in path.read_bytes().split(b"\n"):
        try:
            row = orjson.loads(text)
        except orjson.JSONDecodeError:
            continue
        if isinstance(row, dict) and isinstance(row.get("responses_create_params"), dict):
            yield row


def config_for(environment: Environment, samples: Sequence[Sample]) -> tuple[EnvConfig, list[str]]:
    """The config to start: the one that has the agents that were recorded, else the default one; and notes on
    recorded agents that no config has any more."""
    default = environment.config()
    recorded = {sample.agent for sample in samples if sample.agent is not None}
    known = {agent.name for config in environment.configs for agent in config.agents}
    gone = [f"recorded agent {name!r} no longer exists" for name in sorted(recorded - known)]
    wanted = recorded & known
    if not wanted or wanted & _agents(default):
        return default, gone
    best = max(environment.configs, key=lambda config: len(wanted & _agents(config)))
    return best, gone


def other_configs(environment: Environment, tried: EnvConfig, limit: int) -> list[EnvConfig]:
    """Configs to try where `tried` gave no reward: those with other servers, of the fewest needs first."""
    own = _servers(tried)
    others = [config for config in environment.configs if config.agents and _servers(config) != own]
    return sorted(others, key=lambda config: len(config.needs))[:limit]


def _servers(config: EnvConfig) -> set[tuple[str, str]]:
    return {(server.name, server.type) for server in config.servers}


def _agents(config: EnvConfig) -> set[str]:
    return {agent.name for agent in config.agents}
