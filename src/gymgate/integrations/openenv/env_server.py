"""An OpenEnv server over a stack: each session of a client has an episode on the environment's resources server."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal
from uuid import uuid4

import uvicorn
from openenv.core.env_server import Environment, create_app
from openenv.core.env_server.mcp_types import CallToolObservation, ListToolsObservation
from openenv.core.env_server.types import Action, EnvironmentMetadata, Observation, State
from pydantic import Field
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gymgate.core.config import StackConfig
from gymgate.core.errors import ConfigError, DataError, GymgateError
from gymgate.core.http_client import LOOPBACK, is_for_loopback, is_loopback
from gymgate.gym.runtime.command import Progress
from gymgate.integrations.openenv.episode import Episode, GymnasiumEpisode
from gymgate.integrations.openenv.row_tools import tools_of
from gymgate.integrations.openenv.stepwise import StepwiseEnvironment
from gymgate.rollouts import Row
from gymgate.rollouts.row import input_items
from gymgate.stack import Stack, acquire
from gymgate.stack.workers import workers_of

CLOSE_TIMEOUT_S = 10.0
"""For a resources server to close an episode's session."""
GRACE_S = 2
"""For requests under way when the server ends."""
FIRST_MESSAGE_S = 120.0
"""For a session's first message; a connection takes one of the server's places."""
SILENCE_S = 1800.0
"""For a session's next message, while a model thinks."""

logger = logging.getLogger(__name__)


class NeMoGymAction(Action):  # type: ignore[misc]
    """The model's action in one step; the first two types are OpenEnv's own `CallToolAction` and `ListToolsAction`."""

    type: Literal["call_tool", "list_tools", "message"]
    tool_name: str = ""
    """For `call_tool`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """For `call_tool`."""
    content: str | None = None
    """For `message`, which needs it: the text of the model. In an environment with tools, the final answer, which is scored."""


class NeMoGymObservation(Observation):  # type: ignore[misc]
    """After `reset` and `message`: messages for the model. `reward` is `None` where NeMo Gym gave none that counts."""

    messages: list[dict[str, Any]] = Field(default_factory=list)


class NeMoGymState(State):  # type: ignore[misc]
    """The state of a session: its episode, row and step."""

    environment: str
    index: int | None = None
    """The row's position in the data."""
    done: bool = False


@dataclass
class Game:
    """State that all sessions of a server share."""

    stack: Stack
    stepwise: StepwiseEnvironment
    rows: Sequence[Row]
    timeout_s: float
    loop: asyncio.AbstractEventLoop
    turns: Iterator[int] = field(default_factory=itertools.count)
    ends: set[asyncio.Task[None]] = field(default_factory=set)
    """Ends of episodes that are under way."""

    def index(self, position: int | None, seed: int | None) -> int:
        """Return a row's position: `position`, else one by `seed`, else the next. Raises `DataError` if there is none."""
        if position is None:
            return (next(self.turns) if seed is None else seed) % len(self.rows)
        if not 0 <= position < len(self.rows):
            raise DataError(f"index={position}: there are rows 0 to {len(self.rows) - 1}")
        return position

    def row(self, position: int) -> Row:
        """Read a row. Raises `DataError` if it names another agent."""
        row = self.rows[position]
        if row.agent not in (None, self.stepwise.agent):
            raise DataError(
                f"{row.source}:{row.line}: agent_ref is {row.agent!r}, and {self.stepwise.agent!r} is stepwise"
            )
        return row

    async def episode(self, row: Row) -> Episode:
        """Make an episode on the resources server that is up now. Raises `StackLostError` for a stack that is gone."""
        status = await self.stack.status()
        (environment,) = status["environments"].values()
        workers = workers_of(environment["servers"], self.stepwise.server)
        if not workers:
            raise ConfigError(
                f"environment {self.stepwise.name!r} has no running server {self.stepwise.server!r}; it is {environment['state']}"
            )
        more = {"max_steps": self.stepwise.max_steps} if self.stepwise.kind is GymnasiumEpisode else {}
        url = f"http://{LOOPBACK}:{random.choice(workers)['port']}"
        return self.stepwise.kind(url, self.stepwise.server, row.data, self.timeout_s, **more)

    def begin_end(self, episode: Episode) -> None:
        """End an episode without waiting for it."""
        task = self.loop.create_task(end(episode))
        self.ends.add(task)
        task.add_done_callback(self.ends.discard)

    async def wait_for_ends(self) -> None:
        """Wait, bounded, for the episodes that `begin_end` was given."""
        if self.ends:
            await asyncio.wait(self.ends)


async def end(episode: Episode) -> None:
    """End an episode. A resources server that fails to close it is only logged: no later episode uses its session."""
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await episode.close()
    except TimeoutError:
        logger.warning("server %r did not close a session within %g s", episode.server, CLOSE_TIMEOUT_S)
    except GymgateError as error:
        logger.warning("a session was not closed: %s", error)


def opening_messages(row: Row) -> list[dict[str, Any]]:
    """Return a row's conversation in the form of the Responses API, its instructions as a system message."""
    params = row.data["responses_create_params"]
    instructions = params.get("instructions")
    return [*([{"role": "system", "content": instructions}] if instructions else []), *input_items(params)]


class NeMoGymEnvironment(Environment):  # type: ignore[misc]
    """One client's session."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, game: Game) -> None:
        super().__init__()
        self._game = game
        self._row: Row | None = None
        self._episode: Episode | None = None
        self._state = NeMoGymState(environment=game.stepwise.name)

    async def reset_async(
        self, seed: int | None = None, episode_id: str | None = None, index: int | None = None
    ) -> NeMoGymObservation:
        """Begin an episode on row `index`, else on one chosen by `seed`, else on the next row.

        Returns the messages that the model begins with. Raises `DataError` for a row that there is not or that names another
        agent, and the errors of `Episode.open`.
        """
        if (episode := self._episode) is not None:
            self._episode = None
            await end(episode)
        position = self._game.index(index, seed)
        self._row = self._game.row(position)
        self._state = NeMoGymState(
            environment=self._game.stepwise.name, episode_id=episode_id or uuid4().hex, index=position
        )
        episode = await self._game.episode(self._row)
        try:
            messages = await episode.open()
        except BaseException:
            await episode.close()
            raise
        self._episode = episode
        return NeMoGymObservation(messages=[*opening_messages(self._row), *messages])

    async def step_async(
        self, action: NeMoGymAction, timeout_s: float | None = None, **_: Any
    ) -> Observation:
        """Do what the model does. Raises `DataError` without an episode, for one that is over, and a message without content."""
        if action.type == "list_tools":
            return ListToolsObservation(tools=tools_of((self._row or self._game.rows[0]).data))
        if self._episode is None or self._episode.done:
            raise DataError("no episode is under way; call reset first")
        if action.type == "message" and action.content is None:
            raise DataError("a message needs content; it would end the episode and be scored")
        self._state.step_count += 1
        if action.type == "message":
            step = await self._episode.say(action.content or "")
            self._state.done = step.done
            return NeMoGymObservation(
                messages=step.messages, reward=step.reward, done=step.done, metadata=step.info
            )
        step = await self._episode.call_tool(action.tool_name, action.arguments)
        self._state.done = step.done
        more = {"messages": step.messages} if step.messages else {}
        return CallToolObservation(
            tool_name=action.tool_name,
            result=step.result,
            reward=step.reward,
            done=step.done,
            metadata={**step.info, **more},
        )

    def reset(self, *args: Any, **kwargs: Any) -> NeMoGymObservation:
        """See `reset_async`. For threads other than the server's."""
        return asyncio.run_coroutine_threadsafe(self.reset_async(*args, **kwargs), self._game.loop).result()

    def step(self, *args: Any, **kwargs: Any) -> Observation:
        """See `step_async`. For threads other than the server's."""
        return asyncio.run_coroutine_threadsafe(self.step_async(*args, **kwargs), self._game.loop).result()

    @property
    def state(self) -> NeMoGymState:
        """The state of the session."""
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        """Return the environment's name."""
        name = self._game.stepwise.name
        return EnvironmentMetadata(name=name, description=f"NeMo Gym environment {name}")

    def close(self) -> None:
        """End the episode. Does not wait: OpenEnv calls it in threads, and in the event loop for requests without a session."""
        episode, self._episode = self._episode, None
        if episode is not None and self._game.loop.is_running():
            self._game.loop.call_soon_threadsafe(self._game.begin_end, episode)


class Doorkeeper:
    """Refuses the requests of web pages: any page that this machine's browser shows could open a WebSocket here.

    With `loopback_only`, a request for another host's name is one of a web site too, which had it resolved to this machine.
    Ends a WebSocket session whose client says nothing for too long.
    """

    def __init__(self, app: ASGIApp, *, loopback_only: bool = False) -> None:
        self.app = app
        self.loopback_only = loopback_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope.get("headers", ()))
        host = headers.get(b"host", LOOPBACK.encode()).decode(errors="replace")
        if b"origin" not in headers and (not self.loopback_only or is_for_loopback(host)):
            await self.app(scope, _impatient(receive) if scope["type"] == "websocket" else receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await PlainTextResponse("requests of web pages are refused", 403)(scope, receive, send)


def _impatient(receive: Receive) -> Receive:
    """Return a function that receives a client's messages, and after a silence says that it has gone."""
    heard = 0

    async def receive_in_time() -> Message:
        nonlocal heard
        try:
            async with asyncio.timeout(SILENCE_S if heard > 1 else FIRST_MESSAGE_S):
                message = await receive()
        except TimeoutError:
            return {"type": "websocket.disconnect", "code": 1001}
        heard += 1  # the first one says that it is connected
        return message

    return receive_in_time


class _Server(uvicorn.Server):
    """Leaves signals to the program."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(
    config: StackConfig,
    stepwise: StepwiseEnvironment,
    rows: Sequence[Row],
    *,
    listener: socket.socket,
    max_sessions: int,
    timeout_s: float,
    ready: Callable[[], None],
    progress: Progress | None = None,
) -> None:
    """Serve an environment to OpenEnv clients at a bound socket until cancelled.

    Up to `max_sessions` clients play at once, and each request to NeMo Gym may take `timeout_s`. `ready` is called once the
    stack is up. Raises the error of a start that fails.
    """
    async with acquire(config, progress=progress) as stack:
        game = Game(stack, stepwise, rows, timeout_s, asyncio.get_running_loop())
        app = create_app(
            partial(NeMoGymEnvironment, game),
            NeMoGymAction,
            Observation,
            env_name=stepwise.name,
            max_concurrent_envs=max_sessions,
            state_cls=NeMoGymState,
        )
        doorkeeper = Doorkeeper(app, loopback_only=is_loopback(listener.getsockname()[0]))
        settings = uvicorn.Config(doorkeeper, log_level="warning", timeout_graceful_shutdown=GRACE_S)
        server = _Server(settings)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            ready()
            await asyncio.shield(task)
        finally:
            server.should_exit = True
            await task
            await game.wait_for_ends()
