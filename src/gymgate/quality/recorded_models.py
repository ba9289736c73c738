"""Models that answer as recorded: the policy, the policy where prompts were not recorded, and every judge."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from gymgate.core import codec
from gymgate.core.config import HTTPEndpoint
from gymgate.core.errors import PolicyError, UnknownConversationError
from gymgate.gateway.backends.callable import CallableBackend
from gymgate.gateway.replay.backend import make_response, recorded_answer
from gymgate.gateway.replay.conversation import Item, blocks_of, exact_key, items_of
from gymgate.gateway.replay.index import ReplayIndex
from gymgate.gateway.replay.recording import Recording
from gymgate.gateway.server import Gateway
from gymgate.quality.known import known
from gymgate.quality.model import JudgedBy

STAND_IN = "[[A=B]]\nYes\n1"
"""A judge's answer without content, from which many judges' parsers read a verdict or a number."""
PLAYED_IN_ORDER = (
    "its agent makes prompts that are not recorded: the recorded answers were given in their order"
)
PLAYED_LAST = "its agent makes prompts that are not recorded: the last recorded answer was given at once"
_MCP = "mcp__"
"""How the names of an MCP server's tools begin."""

JudgeAnswer = tuple[bytes | None, list[Item]]
"""Key of the judge's question, `None` if it was not recorded, and the items of the answer."""


class RecordedJudge:
    """Answers for every model server but the policy's, for one rollout at a time."""

    def __init__(self, environment: str) -> None:
        self._environment = environment
        self._answers: list[JudgeAnswer] = []
        self._stand_in = False
        self._down = False
        self._count = 0
        self.calls = 0
        """Calls since `begin`."""
        self.refused = 0
        """Calls among them that the record has no answer to."""

    def begin(self, record: dict[str, Any] | None, *, stand_in: bool = False) -> None:
        """Answer from this record from now on, or with `STAND_IN`."""
        self._answers = list(recorded_answers(record, self._environment)) if record is not None else []
        self._stand_in = stand_in
        self.calls = self.refused = 0

    @contextmanager
    def down(self) -> Iterator[None]:
        """Answer every call with HTTP 503 meanwhile."""
        self._down = True
        try:
            yield
        finally:
            self._down = False

    @property
    def can_answer(self) -> bool:
        return bool(self._answers) or self._stand_in

    @property
    def judged_by(self) -> JudgedBy | None:
        if not self.calls:
            return None
        return "stand-in" if self._stand_in else "recorded"

    async def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a Responses request; `UnknownConversationError` if the record has no (further) answer."""
        self.calls += 1
        self._count += 1
        if self._down:
            raise PolicyError("the judge is down", endpoint="judge", status_code=503)
        output = [{"role": "assistant", "content": STAND_IN}] if self._stand_in else self._next(request)
        return make_response(output, request, response_id=f"resp_judge_{self._count}")

    def _next(self, request: dict[str, Any]) -> list[Item]:
        """The answer that was recorded for this question. If there is none, of the answers without a question the
        next that is a JSON object with the fields that the question names, or simply the next."""
        blocks = blocks_of(items_of(request))
        key, text = exact_key(blocks), "\n".join(block.text for block in blocks)
        exact = [answer for answer in self._answers if answer[0] == key]
        unasked = [answer for answer in self._answers if answer[0] is None]
        fitting = [answer for answer in unasked if _fits(answer[1], text)]
        for answer in exact or fitting or unasked or self._answers:
            self._answers.remove(answer)
            return answer[1]
        self.refused += 1
        raise UnknownConversationError(
            "judge: the record does not hold this judge's answer", endpoint="judge", status_code=422
        )


def _fits(output: Sequence[Item], question: str) -> bool:
    """Whether the answer is a JSON object whose every field the question names."""
    try:
        fields = codec.loads(output[-1].get("content", "").encode())
    except (ValueError, AttributeError):
        return False
    return isinstance(fields, dict) and all(name in question for name in fields)


@asynccontextmanager
async def serve_judge(judge: RecordedJudge) -> AsyncIterator[HTTPEndpoint]:
    """Serve the judge on a port of its own, because some agents (and nemo-gym 0.4) call it without a rollout key."""
    async with Gateway(open_to_all=CallableBackend(judge, "responses")) as gateway:
        yield HTTPEndpoint(base_url=f"{gateway.url}/v1", dialect="responses", max_retries=0)


class RecordedPolicy:
    """Gives the policy's recorded answers. Environments that judge with the policy's own model also ask it things
    that the record does not know; those calls get the judge's answers."""

    def __init__(self, judge: RecordedJudge) -> None:
        self._judge = judge
        self._index = ReplayIndex(())

    def begin(self, recording: Recording) -> None:
        """Answer from this recording from now on."""
        self._index = ReplayIndex([recording])

    async def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return recorded_answer(self._index.find(request), request)
        except UnknownConversationError:
            if not self._judge.can_answer:
                raise
            return await self._judge(request)


class OrderedPolicy:
    """Gives the answers of a record in their order, one for each call, the last one to all further calls.

    If the record has calls of an agent's own tools, only its last message is given: those calls belong to another
    session, and some agents would run them on this machine. The environment's tools, offered over MCP, are called.
    """

    def __init__(self) -> None:
        self._answers: list[list[Item]] = []
        self._calls = 0
        self.how = PLAYED_IN_ORDER

    def begin(self, recording: Recording) -> bool:
        """Answer from this recording from now on; false if it has no message."""
        items = [item for step in recording.steps for item in step.output]
        messages = [[item] for item in items if item.get("type", "message") == "message"]
        tools = {str(item.get("name")) for item in items if item.get("type") == "function_call"}
        calls_own = any(not name.startswith(_MCP) for name in tools)
        self._calls = 0
        if calls_own:
            self._answers, self.how = messages[-1:], PLAYED_LAST
        else:
            in_order = [list(step.output) for step in recording.steps]
            self._answers, self.how = in_order if tools else messages, PLAYED_IN_ORDER
        return bool(messages)

    async def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        if not self._answers:
            raise UnknownConversationError(
                "policy: the record has no message", endpoint="recorded", status_code=422
            )
        items = self._answers[min(self._calls, len(self._answers) - 1)]
        self._calls += 1
        return make_response(items, request, response_id=f"resp_ordered_{self._calls}")


def recorded_answers(record: dict[str, Any], environment: str) -> Iterator[JudgeAnswer]:
    """Every model answer in a record that is not the policy's, in order; if there is none, the texts that
    `judge_texts` in `known.toml` names."""
    parts = [value for name, value in record.items() if name not in ("response", "responses_create_params")]
    answers = [answer for part in parts for answer in _responses_in(part)]
    if not answers:
        for path in known()["judge_texts"].get(environment, ()):
            for text in texts_at(record, path.split(".")):
                answers.append((None, [{"role": "assistant", "content": text}]))
    yield from answers


def _responses_in(node: Any, siblings: dict[str, Any] | None = None) -> Iterator[JudgeAnswer]:
    if isinstance(node, list):
        for child in node:
            yield from _responses_in(child)
    elif isinstance(node, dict):
        output = node.get("output")
        if isinstance(output, list) and output and all(isinstance(item, dict) for item in output):
            params = (siblings or {}).get("responses_create_params")
            yield exact_key(blocks_of(items_of(params))) if isinstance(params, dict) else None, output
            return
        for child in node.values():
            yield from _responses_in(child, node)


def texts_at(node: Any, path: list[str]) -> Iterator[str]:
    """Every text or object (as JSON) at a path; `*` stands for each item of a list, `*[FIELD=START]` for each
    object whose field starts so."""
    if not path:
        if node and isinstance(node, str | dict):
            yield node if isinstance(node, str) else codec.dumps(node).decode()
        return
    head, *rest = path
    if head.startswith("*") and isinstance(node, list):
        field, _, start = head[2:-1].partition("=")
        for child in node:
            if not field or (isinstance(child, dict) and str(child.get(field)).startswith(start)):
                yield from texts_at(child, rest)
    elif isinstance(node, dict) and head in node:
        yield from texts_at(node[head], rest)
