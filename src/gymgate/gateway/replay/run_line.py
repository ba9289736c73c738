"""A rollout in the file of `gymgate collect` or `gymgate run -o`, as NeMo Gym records one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from gymgate.config import POLICY, Dialect
from gymgate.errors import DataError
from gymgate.gateway.dialects import translate_answer, translate_request
from gymgate.gateway.replay.conversation import Item, items_of

_FIELDS = {"calls", "result", "status"}


class KeptCall(NamedTuple):
    """A policy call whose bodies were kept, in the form of the Responses API."""

    prompt: list[Item]
    response: dict[str, Any]


def is_run_line(value: Any) -> bool:
    """Whether a line is of a run of gymgate, not of NeMo Gym."""
    return isinstance(value, dict) and value.keys() >= _FIELDS


def read_run_line(value: Mapping[str, Any]) -> tuple[dict[str, Any], list[KeptCall]]:
    """Return the rollout as NeMo Gym records it, and its policy calls if their bodies were kept.

    A failed rollout of which nothing was kept has no output. Raises `DataError` for another one of which nothing was kept,
    and the errors of a translation.
    """
    record = {**(value["result"] or {}), "reward": value.get("reward")}
    if kept := list(_kept_calls(value)):
        record["response"] = kept[-1].response
        record.setdefault("responses_create_params", {"input": kept[0].prompt})
    elif value["status"] == "failed":
        record = {"responses_create_params": {}, "response": {"output": []}, **record}
    elif "response" not in record:
        raise DataError("keeps nothing that the policy said; run it with --bodies to replay it")
    return record, kept


def _kept_calls(value: Mapping[str, Any]) -> Iterator[KeptCall]:
    for call in value["calls"]:
        if call.get("model_server", POLICY) != POLICY or call.get("status_code") != 200:
            continue
        request, answer = call.get("request"), call.get("upstream_response") or call.get("response")
        if request and answer:
            asked = translate_request(request, call["dialect"], "responses")
            dialect: Dialect = "chat" if "choices" in answer else "responses"
            yield KeptCall(items_of(asked), translate_answer(answer, asked, dialect, "responses"))
