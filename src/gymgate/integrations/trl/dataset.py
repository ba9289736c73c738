"""Rows as a TRL dataset, and the way back from a prompt to its row.

TRL hands a rollout function nothing but the `prompt` column. So each prompt is the row's conversation as messages, for logs and
completions tables, and its first message carries the row's place in the dataset under `ROW_KEY`.
"""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from gymgate.dataset import Row
from gymgate.errors import ConfigError, DataError, GymgateError, MissingExtraError

if TYPE_CHECKING:
    from datasets import Dataset

ROW_KEY = "gymgate_row"


def make_dataset(rows: Iterable[tuple[str, Row]], name: str) -> Dataset:
    """A `datasets.Dataset` of (environment, row) pairs with the columns `prompt`, `row`, `environment`.

    It is written row by row to an Arrow file, read through a memory map, and removed when this process ends. `name`
    tells the datasets of a run apart.
    """
    try:
        from datasets import Dataset, Features, List, Value
    except ImportError as error:
        raise MissingExtraError("datasets is not installed: pip install 'gymgate[datasets]'") from error
    text = Value("string")
    message = {"role": text, "content": text, ROW_KEY: text}
    features = Features({"prompt": List(message), "row": text, "environment": text})
    folder = tempfile.mkdtemp(prefix="gymgate-rows-")
    atexit.register(_remove, folder, os.getpid())
    records = _counted(_records(rows, name), name)
    try:
        return Dataset.from_generator(
            lambda: records, features=features, cache_dir=folder, fingerprint=secrets.token_hex(8)
        )
    except Exception as error:  # datasets wraps whatever the rows raise
        if isinstance(error.__cause__, GymgateError):
            raise error.__cause__ from None
        raise


def _remove(folder: str, pid: int) -> None:
    """Not by a child that inherited the duty with everything else."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


def _counted(records: Iterator[dict[str, Any]], name: str) -> Iterator[dict[str, Any]]:
    number = -1
    for number, record in enumerate(records):  # noqa: B007
        yield record
    if number < 0:
        raise ConfigError(f"the {name} dataset is empty: none of its sources gave a row")


def _records(rows: Iterable[tuple[str, Row]], name: str) -> Iterator[dict[str, Any]]:
    for position, (environment, row) in enumerate(rows):
        messages = prompt_messages(row.data)
        messages[0][ROW_KEY] = f"{name}:{position}"
        yield {"prompt": messages, "row": orjson.dumps(row.data).decode(), "environment": environment}


def prompt_messages(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The row's conversation as role and text; what is no text is named in brackets."""
    source = row["responses_create_params"]["input"]
    items = [{"role": "user", "content": source}] if isinstance(source, str) else list(source)
    messages = [{"role": item.get("role") or "tool", "content": _text(item), ROW_KEY: None} for item in items]
    return messages or [{"role": "user", "content": "", ROW_KEY: None}]


def _text(item: Mapping[str, Any]) -> str:
    content = item.get("content", item.get("output", item.get("arguments")))
    if isinstance(content, str):
        return content
    parts = [part if isinstance(part, Mapping) else {} for part in content or []]
    return "".join(str(part.get("text", f"[{part.get('type', 'part')}]")) for part in parts)


def locate(prompt: Any) -> tuple[str, int]:
    """Name of the dataset and position in it. `DataError` for a prompt that did not come from `make_dataset`."""
    mark = (
        prompt[0].get(ROW_KEY)
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping)
        else None
    )
    name, _, position = str(mark or "").rpartition(":")
    if not position.isdigit():
        raise DataError(
            f"prompt carries no {ROW_KEY!r}; use the dataset of the NeMoGymSpec, unchanged: {str(prompt)[:80]!r}"
        )
    return name, int(position)
