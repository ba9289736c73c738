"""What the shipped quality records say of packaged environments, for those who run them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources

from gymgate.core import codec

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
    return {name: known.pop() for name, known in fields.items() if len(known) == 1}
