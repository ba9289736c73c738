"""Finished rollouts as a flat table that dataset libraries load: one schema, whatever the environment."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import orjson

from gymgate.collection.gym_rollouts import read_gym_rollouts
from gymgate.collection.record import read_values
from gymgate.collection.store import ROLLOUTS, run_directories
from gymgate.collection.transcript import transcript
from gymgate.config import POLICY
from gymgate.errors import ConfigError, DataError, MissingExtraError
from gymgate.rollout import outcome_of

BATCH = 1000
FORMATS = (".jsonl", ".parquet")


def export_dataset(runs: Iterable[Path], output: Path) -> int:
    """Write a row per rollout, as JSONL or Parquet by the file's ending; how many.

    Columns: who and which (`environment`, `agent`, `row_key`, `occurrence`, `repeat`, `seed`), `status`, `reward`
    (null where it does not count, see `gymgate.outcome_of`),
    `messages` (role and content, tool calls as text), `details` (reward parts and metrics as JSON), `calls`,
    `output_tokens`, `seconds`. Raises `ConfigError` for another ending, `MissingExtraError` without pyarrow,
    `DataError` if the file cannot be written.
    """
    if output.suffix not in FORMATS:
        raise ConfigError(f"{output}: the ending must be one of {', '.join(FORMATS)}")
    rows = (flat(value) for value in read_rollouts(runs))
    scratch = output.with_name(f".{output.name}.new")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with scratch.open("wb") as file:
            count = _write_parquet(file, rows) if output.suffix == ".parquet" else _write_lines(file, rows)
        scratch.replace(output)
    except OSError as error:
        raise DataError(f"cannot write {output}: {error.strerror}", path=str(output)) from error
    return count


def read_rollouts(runs: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """The finished rollouts of runs, shards included, and of NeMo Gym's rollouts.jsonl files, one by one."""
    for path in runs:
        if path.is_file():
            yield from read_gym_rollouts(path)
            continue
        for directory in run_directories(path):
            yield from (value for _, value in read_values(directory / ROLLOUTS))


def flat(value: Mapping[str, Any]) -> dict[str, Any]:
    """One row."""
    calls = [call for call in value.get("calls") or () if call.get("model_server") == POLICY]
    result = outcome_of(value)
    parts = (value.get("reward_parts") or {}) if result.counted else {}
    details = {"reward_parts": parts, "metrics": value.get("metrics") or {}}
    return {
        "environment": value.get("environment"),
        "agent": value.get("agent"),
        "row_key": value["row_key"],
        "occurrence": value.get("occurrence", 0),
        "repeat": value.get("repeat", 0),
        "seed": value.get("seed"),
        "status": value.get("status"),
        "reward": result.reward,
        "messages": [{"role": who, "content": text} for who, text in transcript(value)],
        "details": orjson.dumps(details).decode(),
        "calls": len(calls),
        "output_tokens": sum((call.get("usage") or {}).get("output_tokens") or 0 for call in calls),
        "seconds": (value.get("timing") or {}).get("total_s"),
    }


def _write_lines(file: IO[bytes], rows: Iterable[Mapping[str, Any]]) -> int:
    count = 0
    for row in rows:
        file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
        count += 1
    return count


def _write_parquet(file: IO[bytes], rows: Iterator[Mapping[str, Any]]) -> int:
    try:
        arrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise MissingExtraError("Parquet needs pyarrow: pip install 'gymgate[parquet]'") from error
    text, whole, real = arrow.string(), arrow.int64(), arrow.float64()
    message = arrow.struct([("role", text), ("content", text)])
    types = {"occurrence": whole, "repeat": whole, "seed": whole, "calls": whole, "output_tokens": whole}
    types |= {"reward": real, "seconds": real, "messages": arrow.list_(message)}
    names = (
        "environment",
        "agent",
        "row_key",
        "occurrence",
        "repeat",
        "seed",
        "status",
        "reward",
        "messages",
    )
    schema = arrow.schema(
        [(name, types.get(name, text)) for name in (*names, "details", "calls", "output_tokens", "seconds")]
    )
    count = 0
    with parquet.ParquetWriter(file, schema) as writer:
        while batch := list(itertools.islice(rows, BATCH)):
            writer.write_table(arrow.Table.from_pylist(batch, schema=schema))
            count += len(batch)
    return count
