"""What the shipped quality records say of packaged environments, for those who run them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources

from gymgate.core import codec
from gymgate.gym.inside.resolve import value_at
from gymgate.rollouts import Row

_RECORDS = resources.files("gymgate") / "quality" / "record" / "records.jsonl"


@cache
def answer_fields() -> Mapping[str, str]:
    """Return environment -> dotted field of its rows that scoring reads: giving what it holds earned the full reward.

    An environment whose records disagree, or that has none, is left out.
    """
    fields: dict[str, set[str]] = {}
    for line in _RECORDS.read_bytes().splitlines():
        record = codec.loads_object(line)
        oracle = record.get("oracle") or {}
        if oracle.get("solved") and oracle.get("field"):
            fields.setdefault(record["environment"], set()).add(oracle["field"])
    return {name: paths.pop() for name, paths in fields.items() if len(paths) == 1}


def missing_answer(environment: str | None, row: Row) -> str | None:
    """Return the field of a row that its environment's scoring reads if the row does not have it, else `None`.

    NeMo Gym scores such a row all the same.
    """
    field = answer_fields().get(environment or "")
    return field if field is not None and value_at(row.data, field) in (None, "") else None


def answer_warning(environment: str | None, field: str, first: Row, which: str = "rows") -> str:
    """Return the warning of rows without the answer; `first` is the first of them."""
    return (
        f"{environment}: {which} have no {field!r}, which its scoring reads; their rewards, mostly 0, say nothing "
        f"(first: {first.source}:{first.line})"
    )
