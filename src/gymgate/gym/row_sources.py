"""Open the rows of packaged data, of a user's JSONL file, or of a Hugging Face dataset."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, overload

from gymgate.core import codec
from gymgate.core.errors import ConfigError, DataError, MissingExtraError
from gymgate.core.extras import install_command
from gymgate.gym.catalog import Environment
from gymgate.rollouts.row import Row, make_row
from gymgate.rollouts.rowfile import RowFile

ROWS = (".jsonl", ".ndjson")
"""Endings of the names of files with rows."""


class _Reader(Protocol):
    """Rows as dicts, each with its 1-based line."""

    def __len__(self) -> int: ...
    def numbered(self) -> Iterator[tuple[int, dict[str, Any]]]: ...
    def numbered_at(self, position: int) -> tuple[int, dict[str, Any]]: ...


class Rows(Sequence[Row]):
    """Validated rows of one file or dataset; a slice is a list. Iterating streams; `len()` and indexing may build an
    index first. Raises `DataError` for a malformed row when that row is reached."""

    def __init__(self, reader: _Reader, source: str) -> None:
        self._reader = reader
        self.source = source
        """File or dataset, as shown in errors."""

    def __len__(self) -> int:
        return len(self._reader)

    def __iter__(self) -> Iterator[Row]:
        return (make_row(data, self.source, line) for line, data in self._reader.numbered())

    @overload
    def __getitem__(self, position: int) -> Row: ...
    @overload
    def __getitem__(self, position: slice) -> list[Row]: ...
    def __getitem__(self, position: int | slice) -> Row | list[Row]:
        if isinstance(position, slice):
            return [self[index] for index in range(*position.indices(len(self)))]
        line, data = self._reader.numbered_at(position)
        return make_row(data, self.source, line)


class _DatasetReader:
    """Reads a Hugging Face dataset, which lies on disk as Arrow tables.

    Arrow gives every struct the union of all keys, with nulls. They are removed again within `responses_create_params`,
    where absent and null mean the same. That field may also be a JSON string.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def numbered(self) -> Iterator[tuple[int, dict[str, Any]]]:
        return ((line, _without_padding(data)) for line, data in enumerate(self._dataset, 1))

    def numbered_at(self, position: int) -> tuple[int, dict[str, Any]]:
        position = range(len(self))[position]
        return position + 1, _without_padding(self._dataset[position])


@dataclass(frozen=True)
class RowSource:
    """Rows of one environment, or of several if each row names its agent."""

    rows: Sequence[Row]
    environment: str | None = None
    limit: int | None = None
    """Rows to take; `None`: all."""

    def __len__(self) -> int:
        return len(self.rows) if self.limit is None else min(self.limit, len(self.rows))

    @property
    def name(self) -> str:
        """The file or dataset, as shown in errors."""
        return str(getattr(self.rows, "source", None) or self.environment or "the input")

    def readable(self) -> Iterator[tuple[int, Row | DataError]]:
        """Yield each position with its row, or with the error if that row cannot be read. Raises if the source itself cannot."""
        for position in range(len(self)):
            try:
                yield position, self.rows[position]
            except DataError as error:
                if error.line is None:  # the file changed or is gone
                    raise
                yield position, error

    def refuse_empty(self) -> None:
        """Raises `DataError` if there is no row at all."""
        if not len(self):
            raise DataError(f"{self.name} has no rows", path=self.name)


def open_sources(
    source: str, environments: Mapping[str, Environment], limit: int | None = None
) -> list[RowSource]:
    """Open packaged data of each environment by name, or one file for all of them, whose rows then name their agents.

    `environments` are as `Catalog.environments_of` returns them; `limit` is how many rows to take of each. Raises as `open_rows`.
    """
    is_file = source.startswith("hf:") or os.sep in source or Path(source).expanduser().is_file()
    if len(environments) > 1 and is_file:
        return [RowSource(open_rows(source, environment=None), None, limit)]
    return [
        RowSource(open_rows(source, environment=environment), name, limit)
        for name, environment in environments.items()
    ]


def open_rows(source: str, *, environment: Environment | None) -> Rows:
    """Return the rows of `source`: packaged data of `environment` by name (`example`), a path to a JSONL file, a Hugging
    Face dataset as `hf:owner/name[:split]`, or a directory that a dataset was saved to.

    Raises `ConfigError` with the choices for an unknown name, `DataError` for a missing file and `MissingExtraError` if
    `datasets` is not installed.
    """
    if source in ("", "hf:"):
        raise ConfigError(
            f"{source!r} names no rows: give a JSONL file, hf:owner/name or an environment's data"
        )
    if source.startswith("hf:"):
        return _hugging_face(source)
    path = Path(source).expanduser()
    if os.sep in source or (environment is None and path.exists()):
        return _by_path(source, path)
    if environment is None:
        raise ConfigError(
            f"there is no file {source!r}: give a JSONL file or hf:owner/name, or the environment that has this data"
        )
    try:
        return _of_file(environment.data_file(source).path)
    except ConfigError:
        if path.exists() or path.suffix in ROWS:
            return _by_path(source, path)
        raise


def _of_file(path: Path) -> Rows:
    return Rows(RowFile(path), str(path))


def _by_path(source: str, path: Path) -> Rows:
    if not path.is_dir():
        return _of_file(path)
    files = sorted(path.glob("*.jsonl"))
    if files and not _was_saved(path):
        raise ConfigError(f"{source!r} is a directory; choose one of its files: {', '.join(map(str, files))}")
    return _hugging_face(f"hf:{source}")


def _hugging_face(source: str) -> Rows:
    name, split = _name_and_split(source.removeprefix("hf:"))
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise MissingExtraError(
            f"{source!r} needs the datasets library: {install_command('datasets')}"
        ) from error
    try:
        if _was_saved(Path(name).expanduser()):
            loaded = datasets.load_from_disk(str(Path(name).expanduser()))
        else:
            loaded = datasets.load_dataset(name)
    except Exception as error:  # the library raises its own, the hub's, HTTP's and the file system's
        first = str(error).strip().split("\n", 1)[0]
        raise ConfigError(f"cannot load {source!r}: {type(error).__name__}: {first}") from error
    return Rows(_DatasetReader(_one_split(loaded, split, source)), source)


def _name_and_split(text: str) -> tuple[str, str | None]:
    name, colon, split = text.rpartition(":")
    return (name, split) if colon and "/" not in split else (text, None)


def _was_saved(path: Path) -> bool:
    return any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _one_split(loaded: Any, split: str | None, source: str) -> Any:
    if not isinstance(loaded, Mapping):
        if split is not None and str(getattr(loaded, "split", None)) != split:
            raise ConfigError(f"{source!r}: the saved dataset has no splits; leave out {split!r}")
        return loaded
    names = list(loaded)
    chosen = split or (names[0] if len(names) == 1 else "train")
    if chosen not in loaded:
        what = f"no split {split!r}" if split else "several splits"
        raise ConfigError(f"{source!r} has {what}; append one of: {', '.join(':' + name for name in names)}")
    return loaded[chosen]


def _without_padding(data: Any) -> dict[str, Any]:
    params = data.get("responses_create_params")
    if isinstance(params, str):
        try:
            params = codec.loads(params.encode())
        except ValueError:
            return dict(data)
    return {**data, "responses_create_params": _without_nulls(params)} if params is not None else dict(data)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
