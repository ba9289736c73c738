"""Token ids and logprobs in an endpoint's answer, wherever engines put them."""

from __future__ import annotations

from typing import Any, NamedTuple

from gymgate.config import Dialect
from gymgate.gateway.dialects._read import Json, objects, part_of

_TOKEN_ID = "token_id:"


class TokenData(NamedTuple):
    """`None` where the answer has none. Logprobs that are not as many as the ids are kept: whoever trains on them is told
    (`TokenDataError`), and does not take them for logprobs that were not given."""

    prompt_ids: list[int] | None
    completion_ids: list[int] | None
    logprobs: list[float] | None


def token_data_of(answer: Json, dialect: Dialect) -> TokenData:
    """Of an answer as its endpoint gave it.

    Chat: vLLM's `return_token_ids` (`prompt_token_ids` of the answer, `token_ids` of the choice) or
    `return_tokens_as_token_ids` (tokens that read `token_id:17`). Either dialect: NeMo Gym's bundle of
    `prompt_token_ids`, `generation_token_ids`, `generation_log_probs` on the message or the last item.
    """
    if dialect == "chat":
        return _of_chat(answer)
    if dialect == "responses":
        return _of_responses(answer)
    return TokenData(None, None, None)


def _of_chat(answer: Json) -> TokenData:
    choice = next(iter(objects(answer.get("choices"))), {})
    message = part_of(choice, "message")
    content = objects(part_of(choice, "logprobs").get("content"))
    prompt = (
        message.get("prompt_token_ids") or answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
    )
    completion = message.get("generation_token_ids") or choice.get("token_ids") or _ids_in_tokens(content)
    logprobs = message.get("generation_log_probs") or [entry.get("logprob") for entry in content]
    return _numbers(prompt, completion, logprobs)


def _of_responses(answer: Json) -> TokenData:
    items = objects(answer.get("output"))
    bundle: Json = next((item for item in reversed(items) if "generation_token_ids" in item), {})
    if bundle:
        ids = bundle.get("generation_token_ids")
        return _numbers(bundle.get("prompt_token_ids"), ids, bundle.get("generation_log_probs"))
    content = [entry for item in items for entry in _item_logprobs(item)]
    return _numbers(None, _ids_in_tokens(content), [entry.get("logprob") for entry in content])


def _item_logprobs(item: Json) -> list[Json]:
    parts = objects(item.get("content")) if item.get("type") == "message" else []
    return [entry for part in parts for entry in objects(part.get("logprobs"))]


def _ids_in_tokens(content: list[Json]) -> list[int] | None:
    tokens = [str(entry.get("token")) for entry in content]
    if not tokens or not all(token.startswith(_TOKEN_ID) for token in tokens):
        return None
    digits = [token.removeprefix(_TOKEN_ID) for token in tokens]
    return [int(digit) for digit in digits] if all(digit.isdecimal() for digit in digits) else None


def _numbers(prompt: Any, completion: Any, logprobs: Any) -> TokenData:
    return TokenData(_list_of(prompt, int), _list_of(completion, int), _list_of(logprobs, float))


def _list_of(value: Any, kind: type) -> list[Any] | None:
    """Gym's own capture writes ids as decimal strings."""
    if not isinstance(value, list) or not value:
        return None
    try:
        return [kind(entry) for entry in value]
    except (TypeError, ValueError):
        return None
