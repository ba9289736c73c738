"""The three APIs that agents and endpoints speak, and how one is said in another. Pure functions over dicts.

Agents speak Responses, chat-completions or Anthropic messages; endpoints speak chat-completions or Responses.
Where both speak the same, bodies pass unchanged. A translation loses nothing the other side can express; what
cannot be expressed raises `ConfigError` (a request) or `PolicyError` (an answer) and names it.
"""

from gymgate.gateway.dialects.envelope import error_body
from gymgate.gateway.dialects.memory import ConversationMemory
from gymgate.gateway.dialects.sse import encode_stream
from gymgate.gateway.dialects.token_data import TokenData, token_data_of
from gymgate.gateway.dialects.translate import translate_answer, translate_request
from gymgate.gateway.dialects.usage import finish_reason_of, usage_of, with_usage_details

__all__ = [
    "ConversationMemory",
    "TokenData",
    "encode_stream",
    "error_body",
    "finish_reason_of",
    "token_data_of",
    "translate_answer",
    "translate_request",
    "usage_of",
    "with_usage_details",
]
