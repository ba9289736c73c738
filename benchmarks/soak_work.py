"""What the soak asks for: kinds of rollouts whose right outcome is known beforehand, and requests of strangers."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from benchmarks.engine.server import MODEL
from benchmarks.scripted_policy import chat_answer, responses_answer
from gymgate.core.config import HTTPEndpoint, RolloutLimits
from gymgate.rollouts import Rollout
from gymgate.stack import Policy

HALF = "\ud83d"
SHORT = RolloutLimits(timeout_s=3.0)
LONG = RolloutLimits(timeout_s=30.0)
LOOP = RolloutLimits(timeout_s=30.0, max_calls=25)
ENGINE = RolloutLimits(timeout_s=120.0)
TOKENS = 24
"""Longest answer of a real engine."""


def _nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def _chat(**extra: Any) -> bytes:
    return json.dumps({**chat_answer({"messages": []}), **extra}).encode()


ANSWERS: dict[str, tuple[int, bytes]] = {
    "an error with half a character": (400, json.dumps({"error": {"message": HALF}}).encode()),
    "nested": (200, _chat(extra=_nested(300))),
    "nested beyond any parser": (200, b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}"),
    "other types": (200, b'{"choices": {"0": []}, "usage": [], "id": {}}'),
    "no text": (200, b"\xff\xfe\x00" * 1000),
}
"""Each fails its rollout as `policy`."""


def raising(error: type[BaseException]) -> Callable[[dict[str, Any]], Any]:
    """A callable that raises. A new exception each time: one that is raised again keeps the traceback of every time before."""

    def policy(body: dict[str, Any]) -> Any:
        raise error("on purpose")

    return policy


async def _cancelled(body: dict[str, Any]) -> Any:
    raise asyncio.CancelledError


async def _silent(body: dict[str, Any]) -> Any:
    await asyncio.Event().wait()


CALLABLES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "SystemExit": raising(SystemExit),
    "KeyboardInterrupt": raising(KeyboardInterrupt),
    "CancelledError": _cancelled,
    "an object": lambda body: {**chat_answer(body), "extra": object()},
    "nested beyond any writer": lambda body: {**chat_answer(body), "extra": _nested(100_000)},
}
"""Each fails its rollout as `policy`."""


@dataclass(frozen=True)
class Work:
    """One rollout to ask for."""

    kind: str
    policy: Policy
    limits: RolloutLimits
    expected: str
    """`reward`: status and reward as measured beforehand; else the kind of its error, or `max_calls`."""

    def fault_of(self, rollout: Rollout, measured: tuple[str, float | None] | None) -> str | None:
        """What is wrong with a rollout that no fault from outside explains; `None` if it is right.

        `measured` are status and reward of the same row and policy before the first fault.
        """
        if self.expected == "reward" and rollout.error is None:
            seen = (rollout.status, rollout.reward)
            return None if seen == measured else f"{seen}, not {measured}"
        if self.expected == "max_calls" and rollout.error is None:
            fine = (rollout.status, rollout.limit) == ("truncated", "max_calls")
            return None if fine else f"{rollout.status} with limit {rollout.limit}"
        if rollout.error is None:
            return f"{rollout.status} with reward {rollout.reward}, where {self.expected} was to fail it"
        return None if rollout.reward is None else "failed with a reward"

    def came_true(self, rollout: Rollout) -> bool:
        """Whether it ended as expected, and not by a fault from outside, after which it is asked for again."""
        if rollout.error is None:
            return self.expected in ("reward", "max_calls")
        return rollout.error.kind == self.expected


class Policies:
    """An HTTP policy with several faces, and the work that uses them."""

    def __init__(self, chance: random.Random, every: int, engine: str | None = None) -> None:
        self._chance = chance
        self._every = every
        self._engine = engine
        self._url = ""
        self.faults: Counter[str] = Counter()

    def at(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def endpoint(self, face: str) -> HTTPEndpoint:
        """`engine`, `good`, `flaky`, `loops`, or the number of one of `ANSWERS`."""
        if face == "engine":
            return HTTPEndpoint(
                base_url=f"{self._engine}/v1",
                dialect="chat",
                model=MODEL,
                sampling={"temperature": 0, "max_tokens": TOKENS},
                timeout_s=ENGINE.timeout_s,
            )
        dialect: Any = "chat" if face.isdigit() else "responses"
        return HTTPEndpoint(
            base_url=f"{self._url}/{face}/v1",
            dialect=dialect,
            timeout_s=5,
            max_retries=1 if face == "flaky" else 0,
        )

    def choose(self) -> Work:
        """Mostly rollouts that should get their reward."""
        kind = self._chance.choices(("flaky", "loops", "answer", "callable", "silent"), (80, 4, 6, 6, 4))[0]
        if kind == "answer":
            number = self._chance.randrange(len(ANSWERS))
            return Work(list(ANSWERS)[number], self.endpoint(str(number)), LONG, "policy")
        if kind == "callable":
            name = self._chance.choice(list(CALLABLES))
            return Work(name, CALLABLES[name], LONG, "policy")
        if kind == "silent":
            return Work("silent", _silent, SHORT, "timeout")
        if kind == "loops":
            return Work("loops", self.endpoint("loops"), LOOP, "max_calls")
        if self._engine and self._chance.random() < 0.8:
            return Work("engine", self.endpoint("engine"), ENGINE, "reward")
        return Work("reward", self.endpoint("flaky"), LONG, "reward")

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer as the path's first part says."""
        face = request.path.split("/")[1]
        raw = await request.content.read()
        if face.isdigit():
            status, answer = list(ANSWERS.values())[int(face)]
            return web.Response(status=status, body=answer, content_type="application/json")
        body = json.loads(raw)
        if face == "loops":
            return web.json_response(responses_answer({**body, "input": []}))
        if face == "flaky":
            await asyncio.sleep(self._chance.lognormvariate(-3, 1))
            if self._chance.randrange(self._every) == 0:
                return await self._fault(request)
        return web.json_response(responses_answer(body))

    async def _fault(self, request: web.BaseRequest) -> web.StreamResponse:
        fault = self._chance.choice(("500", "429", "reset", "garbage", "silence"))
        self.faults[fault] += 1
        if fault == "reset" and request.transport is not None:
            request.transport.abort()
        if fault == "silence":
            await asyncio.sleep(60)
        status = int(fault) if fault.isdigit() else 200
        return web.Response(status=status, text="on purpose", headers={"Retry-After": "0.1"})


BOMB = gzip.compress(b"{" + b" " * (64 << 20) + b"}")


async def strange_requests(gateway: str, chance: random.Random, seen: Counter[str]) -> None:
    """Requests without a rollout's key, big, compressed or broken; each has to be refused. Counts them by status."""
    url = f"{gateway}/v1/chat/completions"
    kinds: dict[str, tuple[bytes, dict[str, str]]] = {
        "big": (b"{}" * (4 << 20), {}),
        "bomb": (BOMB, {"Content-Encoding": "gzip"}),
        "broken": (b"\xff" * 1000, {}),
        "wrong key": (b"{}", {"Authorization": f"Bearer {'0' * 32}"}),
    }
    name = chance.choice(list(kinds))
    data, headers = kinds[name]
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session,
            session.post(url, data=data, headers=headers) as answer,
        ):
            seen[f"{name}: {answer.status}"] += 1
    except (aiohttp.ClientError, OSError):
        seen[f"{name}: connection closed"] += 1
