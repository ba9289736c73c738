"""The judge of a check: says what the judge said when the rollout was recorded, where the record has it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import orjson
from aiohttp import web

from gymgate.check.causes import judge_texts
from gymgate.check.model import JudgedBy
from gymgate.config import HTTPEndpoint
from gymgate.errors import UnknownConversationError
from gymgate.gateway.replay import Block, Match, Recording, ReplayIndex, blocks_of, items_of
from gymgate.gateway.replay.backend import recorded_answer, response_object
from gymgate.gateway.replay.conversation import exact_key

STAND_IN = "[[A=B]]\nYes\n1"
"""Says nothing about an answer; many judges' parsers read a verdict or a number from it."""

Answer = tuple[bytes | None, list[dict[str, Any]]]
"""What the judge was asked, as far as it was recorded, and the items that it answered with."""


class RecordedJudge:
    """What every model server beside the policy's says; one rollout at a time."""

    def __init__(self, environment: str) -> None:
        self._environment = environment
        self._answers: list[Answer] = []
        self._stand_in = False
        self._count = 0
        self.calls = 0
        """Calls since `begin`."""
        self.refused = 0
        """Of them, those that the record has no answer to."""

    def begin(self, record: dict[str, Any] | None, *, stand_in: bool = False) -> None:
        """Be the judge of this record from now on; `stand_in`: answer `STAND_IN` to everything."""
        self._answers = list(recorded_answers(record, self._environment)) if record is not None else []
        self._stand_in = stand_in
        self.calls = self.refused = 0

    @property
    def knows(self) -> bool:
        """Whether answers of this record are left."""
        return bool(self._answers) or self._stand_in

    @property
    def judged_by(self) -> JudgedBy | None:
        if not self.calls:
            return None
        return "stand-in" if self._stand_in else "recorded"

    async def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a Responses request; `UnknownConversationError` where the record has no (further) answer."""
        self.calls += 1
        self._count += 1
        output: list[Any] = (
            [{"role": "assistant", "content": STAND_IN}] if self._stand_in else self._next(request)
        )
        return response_object(output, request, response_id=f"resp_judge_{self._count}")

    def _next(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """The answer recorded for this question, else one whose question was not recorded: the next that is a JSON
        object of the fields that the question names, or the next."""
        blocks = blocks_of(items_of(request))
        asked, text = exact_key(blocks), "\n".join(block.text for block in blocks)
        known = [position for position, (key, _) in enumerate(self._answers) if key == asked]
        blind = [position for position, (key, _) in enumerate(self._answers) if key is None]
        fitting = [position for position in blind if _fits(self._answers[position][1], text)]
        order = known or fitting or blind or range(len(self._answers))
        for position in order:
            return self._answers.pop(position)[1]
        self.refused += 1
        raise UnknownConversationError(
            "judge: the record does not hold this judge's answer", endpoint="judge", status_code=422
        )


def _fits(output: Sequence[dict[str, Any]], question: str) -> bool:
    """Whether the answer is a JSON object whose every field the question names."""
    try:
        fields = orjson.loads(output[-1].get("content", ""))
    except (orjson.JSONDecodeError, TypeError):
        return False
    return isinstance(fields, dict) and all(name in question for name in fields)


@asynccontextmanager
async def serving(judge: RecordedJudge) -> AsyncIterator[HTTPEndpoint]:
    """The judge on a port of its own: it also answers calls that carry no rollout's key, of nemo-gym 0.4 and of
    agents that lose it."""

    async def answer(request: web.Request) -> web.Response:
        try:
            return web.json_response(await judge(await request.json()))
        except UnknownConversationError as error:
            body = {"error": {"message": str(error), "type": "unknown_conversation"}}
            return web.json_response(body, status=422)

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/v1/responses", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await (site := web.TCPSite(runner, "127.0.0.1", 0)).start()
        assert site._server is not None
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        yield HTTPEndpoint(base_url=f"http://127.0.0.1:{port}/v1", dialect="responses", max_retries=0)
    finally:
        await runner.cleanup()


class RecordedPolicy:
    """Says what the policy said when the rollout was recorded; to conversations that the record does not know, as
    environments have them that judge with the policy's own model, what the judge said."""

    def __init__(self, judge: RecordedJudge) -> None:
        self._judge = judge
        self._index = ReplayIndex(())

    def begin(self, recording: Recording) -> None:
        """Be the policy of this recording from now on."""
        self._index = ReplayIndex([recording])

    async def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return recorded_answer(self._index.find(request), request)
        except UnknownConversationError:
            if (match := self._told_more(request)) is not None:
                return recorded_answer(match, request)
            if not self._judge.knows:
                raise
            return await self._judge(request)

    def _told_more(self, request: dict[str, Any]) -> Match | None:
        """The turn of which the record holds only the beginnings of what the environment said."""
        got = blocks_of(items_of(request))
        for recording in self._index.recordings:
            for turn, step in enumerate(recording.steps):
                if begins(got, blocks_of(step.prompt)):
                    return Match(recording, turn, observation_missing=True)
        return None


def begins(got: Sequence[Block], recorded: Sequence[Block]) -> bool:
    """Whether the assistant said the same, and all others what was recorded or that and more."""
    return len(got) == len(recorded) and all(
        one.said() == other.said()
        if other.role == "assistant"
        else one.role == other.role and one.text.startswith(other.text.rstrip())
        for one, other in zip(got, recorded, strict=True)
    )


def recorded_answers(record: dict[str, Any], environment: str) -> Iterator[Answer]:
    """Every model answer in a record that is not the policy's, in the order of the record; then texts that
    the table of known places names."""
    found = False
    for name, value in record.items():
        if name not in ("response", "responses_create_params"):
            for answer in _responses_in(value):
                found = True
                yield answer
    if not found:
        for path in judge_texts(environment):
            for text in _texts_at(record, path.split(".")):
                yield None, [{"role": "assistant", "content": text}]


def _responses_in(node: Any, siblings: dict[str, Any] | None = None) -> Iterator[Answer]:
    if isinstance(node, list):
        for child in node:
            yield from _responses_in(child)
    elif isinstance(node, dict):
        output = node.get("output")
        if isinstance(output, list) and output and all(isinstance(item, dict) for item in output):
            asked = (siblings or {}).get("responses_create_params")
            key = exact_key(blocks_of(items_of(asked))) if isinstance(asked, dict) else None
            yield key, output
            return
        for child in node.values():
            yield from _responses_in(child, node)


def _texts_at(node: Any, path: list[str]) -> Iterator[str]:
    """Every text or object at a dotted path; `*` stands for each item of a list, `*[FIELD=START]` for each object
    whose field starts so."""
    if not path:
        if node and isinstance(node, str | dict):
            yield node if isinstance(node, str) else orjson.dumps(node).decode()
        return
    head, *rest = path
    if head.startswith("*") and isinstance(node, list):
        field, _, start = head[2:-1].partition("=")
        for child in node:
            if not field or (isinstance(child, dict) and str(child.get(field)).startswith(start)):
                yield from _texts_at(child, rest)
    elif isinstance(node, dict) and head in node:
        yield from _texts_at(node[head], rest)
