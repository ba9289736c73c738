"""A resources server of NeMo Gym that does in turn all that a middleware can notice. Runs in NeMo Gym's interpreter."""

from __future__ import annotations

import asyncio
import contextvars
import gc
from typing import Any, ClassVar

from aiohttp import ClientResponseError
from fastapi import Body, Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from nemo_gym.base_resources_server import SimpleResourcesServer
from nemo_gym.server_utils import raise_for_status, request
from pydantic import BaseModel
from starlette.background import BackgroundTask

VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


class Panic(BaseException):
    """As raised by libraries that are written in Rust."""


class Question(BaseModel):
    text: str
    number: int = 1


class Server(SimpleResourcesServer):
    ray_enabled: ClassVar[bool] = False

    async def verify(self, body: Any) -> Any:
        raise NotImplementedError

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        add_routes(self, app)
        return app


def add_routes(server: Server, app: FastAPI) -> None:
    events: list[str] = []
    sessions: dict[str, int] = {}

    async def never(name: str) -> None:
        events.append(f"{name} waits")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            events.append(f"{name} cancelled")
            raise

    @app.get("/events")
    async def read_events() -> list[str]:
        return events

    @app.get("/collector")
    async def collector() -> tuple[int, int, int]:
        return gc.get_threshold()

    @app.post("/ok")
    async def ok(question: Question, request: Request) -> dict[str, Any]:
        key = request.session["session_id"]
        sessions[key] = sessions.get(key, 0) + 1
        return {"echo": question.text * question.number, "visit": sessions[key], "path": request.url.path}

    @app.post("/session")
    async def change_session(request: Request) -> dict[str, Any]:
        request.session["count"] = request.session.get("count", 0) + 1
        return {"count": request.session["count"]}

    @app.post("/clear")
    async def clear_session(request: Request) -> str:
        request.session.clear()
        return "cleared"

    @app.get("/plain")
    @app.head("/plain")
    async def plain() -> Response:
        return Response(b"plain", headers={"x-two": "a", "vary": "Accept"})

    @app.get("/plain_function")
    def plain_function() -> dict[str, str]:
        return {"in": "a thread"}

    @app.get("/empty")
    async def empty() -> Response:
        return Response(status_code=204)

    @app.get("/cookies")
    async def cookies() -> Response:
        response = JSONResponse({"cookies": 2})
        response.set_cookie("one", "1")
        response.set_cookie("two", "2")
        return response

    @app.post("/big")
    async def big(body: dict[str, Any]) -> dict[str, Any]:
        return {"length": len(body["text"]), "back": "x" * 1_000_000}

    @app.post("/raw")
    async def raw(request: Request) -> dict[str, int]:
        return {"length": len(await request.body())}

    @app.get("/boom")
    async def boom() -> None:
        raise ValueError("the handler's own <error> with 'quotes'")

    @app.get("/unprintable")
    async def unprintable() -> None:
        raise ValueError("\ud800 \x00 🚨")

    @app.get("/teapot")
    async def teapot() -> None:
        raise HTTPException(418, {"why": "a teapot"}, headers={"x-pot": "tea"})

    @app.get("/upstream")
    async def upstream() -> None:
        url = f"http://127.0.0.1:{server.config.port}/boom"
        await raise_for_status(await request("GET", url))

    @app.get("/reason")
    async def reason() -> None:
        raise ClientResponseError(None, (), status=429, message="slow down")  # type: ignore[arg-type]

    @app.get("/panic")
    async def panic() -> None:
        raise Panic("of the library")

    @app.get("/stray")
    async def stray() -> None:
        raise asyncio.CancelledError

    @app.get("/stray_task")
    async def stray_task() -> None:
        task = asyncio.create_task(asyncio.sleep(60))
        asyncio.get_running_loop().call_soon(task.cancel)
        await task

    @app.get("/timeout")
    async def timeout() -> None:
        await asyncio.wait_for(asyncio.Event().wait(), 0.01)

    @app.get("/caught_timeout")
    async def caught_timeout() -> str:
        try:
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        except TimeoutError:
            return "in time"
        return "late"

    @app.get("/variable")
    async def variable() -> str:
        before = VARIABLE.get()
        VARIABLE.set("set by a request")
        return before

    async def dependency() -> Any:
        events.append("dependency opened")
        try:
            yield "dependency"
        finally:
            events.append("dependency closed")

    @app.get("/depends")
    async def depends(value: str = Depends(dependency)) -> str:
        return value

    @app.get("/depends_boom")
    async def depends_boom(value: str = Depends(dependency)) -> str:
        raise KeyError(value)

    async def chunks(count: int, fail: bool = False, empty: bool = False) -> Any:
        for number in range(count):
            yield b"" if empty else f"chunk {number};".encode()
            await asyncio.sleep(0)
        if fail:
            raise ValueError("in the middle of a stream")

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        return StreamingResponse(chunks(5), media_type="text/plain")

    @app.get("/stream_empty")
    async def stream_empty() -> StreamingResponse:
        return StreamingResponse(chunks(2, empty=True))

    @app.get("/stream_boom")
    async def stream_boom() -> StreamingResponse:
        return StreamingResponse(chunks(2, fail=True))

    @app.get("/stream_boom_first")
    async def stream_boom_first() -> StreamingResponse:
        return StreamingResponse(chunks(0, fail=True))

    @app.get("/stream_short")
    async def stream_short() -> StreamingResponse:
        return StreamingResponse(chunks(2), headers={"content-length": "100"})

    @app.get("/stream_long")
    async def stream_long() -> StreamingResponse:
        return StreamingResponse(chunks(2), headers={"content-length": "3"})

    @app.get("/stream_short_boom")
    async def stream_short_boom() -> StreamingResponse:
        return StreamingResponse(chunks(2, fail=True), headers={"content-length": "100"})

    @app.get("/stream_forever")
    async def stream_forever() -> StreamingResponse:
        async def forever() -> Any:
            events.append("stream begins")
            try:
                while True:
                    yield b"more"
                    await asyncio.sleep(0.01)
            finally:
                events.append("stream ends")

        return StreamingResponse(forever())

    @app.get("/bad_header")
    async def bad_header() -> Response:
        return Response(b"x", headers={"x-bad": "a\nb"})

    @app.get("/background")
    async def background() -> Response:
        async def later() -> None:
            await asyncio.sleep(0.01)
            events.append("background ran")

        return JSONResponse("soon", background=BackgroundTask(later))

    @app.get("/background_boom")
    async def background_boom() -> Response:
        async def later() -> None:
            raise ValueError("in the background")

        return JSONResponse("soon", background=BackgroundTask(later))

    @app.get("/background_wait")
    async def background_wait() -> Response:
        async def later() -> None:
            events.append("background waits")
            await asyncio.sleep(0.2)
            events.append("background went on")

        return JSONResponse("soon", background=BackgroundTask(later))

    @app.get("/background_receive")
    async def background_receive(request: Request) -> Response:
        async def later() -> None:
            events.append(f"background is told of {(await request.receive())['type']}")

        return JSONResponse("soon", background=BackgroundTask(later))

    @app.post("/wait")
    async def wait(body: dict[str, Any]) -> None:
        await never("wait")

    @app.get("/wait_plain")
    async def wait_plain() -> None:
        await never("wait_plain")

    @app.post("/wait_unread")
    async def wait_unread(request: Request) -> None:
        await never("wait_unread")

    @app.post("/wait_bytes")
    async def wait_bytes(body: bytes = Body()) -> None:
        events.append(f"{len(body)} bytes")
        await never("wait_bytes")

    @app.get("/wait_twice")
    async def wait_twice() -> None:
        try:
            await never("wait_twice")
        except asyncio.CancelledError:
            await never("wait_twice again")

    @app.get("/wait_cleaning")
    async def wait_cleaning() -> None:
        try:
            await never("wait_cleaning")
        finally:
            raise ValueError("while it cleans up")

    @app.get("/wait_for_never")
    async def wait_for_never() -> None:
        await asyncio.wait_for(never("wait_for_never"), 60)

    @app.get("/exit")
    async def leave() -> None:
        raise SystemExit(3)

    async def nothing(scope: Any, receive: Any, send: Any) -> None:
        events.append("nothing sent")

    async def no_end(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-end", b"none")]})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})

    async def twice(scope: Any, receive: Any, send: Any) -> None:
        await JSONResponse("once")(scope, receive, send)
        await JSONResponse("twice")(scope, receive, send)

    async def slowly(scope: Any, receive: Any, send: Any) -> None:
        sizes = []
        while (message := await receive())["type"] == "http.request":
            sizes.append(len(message.get("body", b"")))
            if not message.get("more_body"):
                break
        await JSONResponse({"sum": sum(sizes), "last": message["type"]})(scope, receive, send)

    for name, application in (
        ("nothing", nothing),
        ("no_end", no_end),
        ("twice", twice),
        ("slowly", slowly),
    ):
        app.mount(f"/{name}", application)


if __name__ == "__main__":
    Server.run_webserver()
