"""The recorded policy for agents whose prompts no record holds: what it said, in the order in which it said it."""

from __future__ import annotations

from typing import Any

from gymgate.errors import UnknownConversationError
from gymgate.gateway.replay import Recording
from gymgate.gateway.replay.backend import response_object
from gymgate.gateway.replay.conversation import Item

MCP = "mcp__"
"""How agents name tools of MCP servers."""
PLAYED_IN_ORDER = (
    "its agent makes prompts that are not recorded: the recorded answers were given in their order"
)
PLAYED_LAST = "its agent makes prompts that are not recorded: the last recorded answer was given at once"


class OrderedPolicy:
    """The answers of a record, one for each call, the last one for all further calls.

    Of a record with calls of an agent's own tools only the last message is given: they were for another session, and
    some agents would run them on this machine. The environment's tools, offered over MCP, are called again.
    """

    def __init__(self) -> None:
        self._said: list[list[Item]] = []
        self._calls = 0
        self.how = PLAYED_IN_ORDER

    def begin(self, recording: Recording) -> bool:
        """Be the policy of this recording from now on; false if it has no message."""
        items = [item for step in recording.steps for item in step.output]
        messages = [[item] for item in items if item.get("type", "message") == "message"]
        called = {str(item.get("name")) for item in items if item.get("type") == "function_call"}
        own = any(not name.startswith(MCP) for name in called)
        in_order = [list(step.output) for step in recording.steps] if called else messages
        self._said, self._calls = (messages[-1:] if own else in_order), 0
        self.how = PLAYED_LAST if own else PLAYED_IN_ORDER
        return bool(messages)

    async def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        if not self._said:
            raise UnknownConversationError(
                "policy: the record has no message", endpoint="recorded", status_code=422
            )
        items = self._said[min(self._calls, len(self._said) - 1)]
        self._calls += 1
        return response_object(items, request, response_id=f"resp_ordered_{self._calls}")
