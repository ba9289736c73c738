"""One episode on a resources server of NeMo Gym, played by a client in the agent's place.

It makes the calls that `simple_agent` and `gymnasium_agent` make (nemo-gym 0.3 to 0.7), with cookies of its own:

    tools       /seed_session, then /TOOL for each call, then /verify, which gives the reward
    gymnasium   /reset, then /step for each turn, which gives a reward and says whether the episode is over
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import quote

from gymgate.core import codec
from gymgate.core.errors import DataError, EnvironmentServerError, StackLostError
from gymgate.core.http_client import HTTPClient, HTTPFailure, Request
from gymgate.gateway.dialects.reading import new_id, objects
from gymgate.rollouts import RolloutError, outcome_of
from gymgate.rollouts.outcome import number
from gymgate.rollouts.result import error_line, interpret_result

MAX_STEPS = 10
"""Limit of a gymnasium episode whose agent's config sets none, as in `gymnasium_agent`."""
NOT_TOOLS = frozenset({"verify", "seed_session", "close_session", "aggregate_metrics", "mcp"})
"""Routes of a resources server that are no tools, whatever a row lists."""
NOT_FOUND = '{"detail":"Not Found"}'
"""A resources server's answer for a tool that it does not have."""


@dataclass(frozen=True)
class Step:
    """The result of a step."""

    result: str | None = None
    """The tool's answer, as a model is shown it."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """New messages for the model."""
    reward: float | None = None
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)


class Episode(ABC):
    """A session on a resources server. One step at a time."""

    def __init__(self, base_url: str, server: str, row: Mapping[str, Any], timeout_s: float) -> None:
        self.server = server
        self.row = row
        self.done = False
        self._base_url = base_url
        self._timeout_s = timeout_s
        self._http = HTTPClient()
        self._cookies = SimpleCookie()
        """They keep the session apart from those of other clients."""

    @abstractmethod
    async def open(self) -> list[dict[str, Any]]:
        """Open the session and return messages for the model beside the row's. Raises as `post`."""

    @abstractmethod
    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> Step:
        """Call a tool. Raises as `post`."""

    @abstractmethod
    async def say(self, text: str) -> Step:
        """Send a message of the model's. Raises as `post`."""

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        await self._http.close()

    async def post(self, path: str, body: Any, *, any_status: bool = False) -> bytes:
        """Post JSON and return the answer's body.

        Raises `DataError` for a row that the server refuses, `EnvironmentServerError` for another status than 200 unless
        `any_status`, and `StackLostError` without an answer in time.
        """
        cookies = "; ".join(f"{name}={cookie.coded_value}" for name, cookie in self._cookies.items())
        request = Request(f"{self._base_url}{path}", {"Cookie": cookies} if cookies else None)
        try:
            answer = await self._http.send(request, codec.dumps(body), timeout_s=self._timeout_s)
        except TimeoutError:
            raise StackLostError(
                f"Timed out after {self._timeout_s:g} s waiting for {path} of {self.server!r}; raise --step-timeout"
            ) from None
        except HTTPFailure as error:
            raise StackLostError(f"server {self.server!r} broke the connection at {path}: {error}") from error
        with contextlib.suppress(CookieError):  # a name that no cookie may have
            self._cookies.load(answer.headers.get("set-cookie", ""))
        if answer.status != 200 and not any_status:
            message = f"server {self.server!r}: HTTP {answer.status} at {path}: {error_line(answer.body)}"
            if answer.status == 422:
                raise DataError(message)
            raise EnvironmentServerError(message, server=self.server, status_code=answer.status)
        return answer.body

    async def post_for_object(self, path: str, body: Any) -> dict[str, Any]:
        """Post JSON and return the answer, which is a JSON object. Raises as `post`."""
        content = await self.post(path, body)
        try:
            value, _ = codec.parse(content)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise EnvironmentServerError(
                f"server {self.server!r} answered {path} with no JSON object: {error_line(content)}",
                server=self.server,
            )
        return value

    def response(self, output: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the row with a Responses object of these items, as a resources server takes it."""
        answer = {
            "id": new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "status": "completed",
            "model": "openenv",
            "output": output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": self.row["responses_create_params"].get("tools") or [],
        }
        return {**self.row, "response": answer}


class ToolEpisode(Episode):
    """Tools until the model says something, which is its final answer and is scored."""

    def __init__(self, base_url: str, server: str, row: Mapping[str, Any], timeout_s: float) -> None:
        super().__init__(base_url, server, row, timeout_s)
        self._output: list[dict[str, Any]] = []
        offered = objects(row["responses_create_params"].get("tools"))
        names = (tool.get("name") for tool in offered if tool.get("type") == "function")
        self._tools = {name for name in names if isinstance(name, str)} - NOT_TOOLS

    async def open(self) -> list[dict[str, Any]]:
        """See `Episode`."""
        await self.post("/seed_session", self.row)
        return []

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> Step:
        """See `Episode`. Only a tool that the row offers is called. Its error is an answer, as for NeMo Gym's agent."""
        call, result = _function_call(name, arguments), NOT_FOUND
        if name in self._tools:
            path = f"/{quote(name, safe='')}"
            result = (await self.post(path, dict(arguments), any_status=True)).decode(errors="replace")
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": result}
        self._output += [call, output]
        return Step(result)

    async def say(self, text: str) -> Step:
        """See `Episode`. Raises `EnvironmentServerError` if the answer could not be scored."""
        body = self.response([*self._output, _message(text)])
        result = await self.post_for_object("/verify", body)
        self.done = True
        fields = interpret_result(result, codec.dumps(body), agent=self.server)
        if (error := fields.get("error")) is not None:
            raise RolloutError.model_validate(error).to_exception()
        outcome = outcome_of(fields)
        return Step(reward=outcome.reward, done=True, info={"outcome": outcome.reason})


class GymnasiumEpisode(Episode):
    """Each step is a turn of the model; the environment says when the episode is over."""

    def __init__(
        self, base_url: str, server: str, row: Mapping[str, Any], timeout_s: float, max_steps: int = MAX_STEPS
    ) -> None:
        super().__init__(base_url, server, row, timeout_s)
        self._max_steps = max_steps
        self._steps = 0
        self._info: dict[str, Any] = {}

    async def open(self) -> list[dict[str, Any]]:
        """See `Episode`."""
        answer = await self.post_for_object("/reset", self.row)
        self._info = _mapping(answer.get("info"))
        return _observation_messages(answer)

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> Step:
        """See `Episode`."""
        return await self._step(_function_call(name, arguments))

    async def say(self, text: str) -> Step:
        """See `Episode`."""
        return await self._step(_message(text))

    async def close(self) -> None:
        """See `Episode`. The environment is told, if it says that it wants to be."""
        try:
            info, self._info = self._info, {}
            if info.get("supports_explicit_close") is True:
                await self.post("/close", {})
        finally:
            await super().close()

    async def _step(self, item: dict[str, Any]) -> Step:
        body = self.response([item])
        if self._info.get("supports_step_idempotency") is True:
            body["_ng_step_request_id"] = new_id("step")
        answer = await self.post_for_object("/step", body)
        self._steps += 1
        info = _mapping(answer.get("info"))
        truncated = bool(answer.get("truncated")) or self._steps >= self._max_steps
        self.done = bool(answer.get("terminated")) or truncated
        outputs = [str(output.get("output")) for output in objects(info.get("tool_outputs"))]
        return Step(
            "\n".join(outputs) if outputs else None,
            _observation_messages(answer),
            number(answer.get("reward")),
            self.done,
            {**info, "truncated": truncated},
        )


def _function_call(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": new_id("fc"),
        "call_id": new_id("call"),
        "name": name,
        "arguments": codec.dumps(dict(arguments)).decode(),
        "status": "completed",
    }


def _message(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {
        "type": "message",
        "id": new_id("msg"),
        "role": "assistant",
        "content": content,
        "status": "completed",
    }


def _observation_messages(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    observation = answer.get("observation")
    return [{"role": "user", "content": observation}] if observation else []


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
