"""The three APIs that agents and endpoints speak, and the translations between them. Pure functions over dicts.

Agents speak Responses, chat-completions or Anthropic messages; endpoints speak chat-completions or Responses.
Where both speak the same, bodies pass unchanged. A translation keeps everything that the other API can express.
Anything else raises `ConfigError` (a request) or `PolicyError` (an answer), which names it.
A new dialect also needs its name in `core.config`, its path in `gateway.requests` and its history in `gateway.conversations`.
"""

from gymgate.gateway.dialects.answers import overflow_answer, with_text_ids
from gymgate.gateway.dialects.memory import ConversationMemory
from gymgate.gateway.dialects.streams import encode_stream, error_event
from gymgate.gateway.dialects.translate import error_body, translate_answer, translate_request
from gymgate.gateway.dialects.usage import (
    TokenData,
    finish_reason_of,
    token_data_of,
    usage_of,
)

__all__ = [
    "ConversationMemory",
    "TokenData",
    "encode_stream",
    "error_body",
    "error_event",
    "finish_reason_of",
    "overflow_answer",
    "token_data_of",
    "translate_answer",
    "translate_request",
    "usage_of",
    "with_text_ids",
]
