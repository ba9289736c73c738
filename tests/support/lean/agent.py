"""An agent that calls itself in every way. Runs in NeMo Gym's interpreter."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from pathlib import Path
from typing import Any, ClassVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from nemo_gym.base_responses_api_agent import SimpleResponsesAPIAgent
from nemo_gym.server_utils import raise_for_status
from starlette.background import BackgroundTask

VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


class Server(SimpleResponsesAPIAgent):
    ray_enabled: ClassVar[bool] = False

    async def run(self, body: dict[str, Any]) -> Any:
        raise NotImplementedError

    async def responses(self, request: Request, body: dict[str, Any]) -> Any:
        mode = body.get("mode")
        if mode == "boom":
            raise ValueError("the handler's own error")
        if mode == "big":
            return JSONResponse({"length": len(body["text"]), "back": "x" * 3_000_000})
        if mode == "redirect":
            return RedirectResponse("/elsewhere", status_code=body["status"])
        if mode == "cookies":
            response = JSONResponse(dict(request.cookies))
            response.set_cookie("odd", 'a "quoted; value" \u00e4')
            response.set_cookie("plain", "b")
            return response
        if mode == "stream":

            async def chunks() -> Any:
                for number in range(200):
                    yield f"{number}".encode() * 5000
                    await asyncio.sleep(0)

            return StreamingResponse(chunks())
        if mode == "cut":

            async def broken() -> Any:
                yield b"some"
                raise ValueError("in the middle")

            return StreamingResponse(broken(), headers={"content-length": "100"})
        if mode == "background":

            async def later() -> None:
                await asyncio.sleep(0.05)
                EVENTS.append("background ran")

            return JSONResponse("soon", background=BackgroundTask(later))
        if mode == "wait":
            EVENTS.append("wait begins")
            try:
                await asyncio.sleep(0.5)
            except asyncio.CancelledError:
                EVENTS.append("wait cancelled")
                raise
            EVENTS.append("wait went on")
        if mode == "variable":
            before = VARIABLE.get()
            VARIABLE.set("set by a call")
            return JSONResponse(before)
        scope = {
            key: request.scope[key] for key in ("http_version", "scheme", "root_path", "method", "state")
        }
        headers = dict(request.headers)
        return JSONResponse(
            {"scope": scope, "headers": headers, "path": request.url.path, "host": request.client.host}
        )

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()

        @app.get("/events")
        async def events() -> list[str]:
            return EVENTS

        @app.api_route("/elsewhere", methods=["GET", "POST"])
        async def elsewhere(request: Request) -> Response:
            return Response(request.method.encode() + await request.body())

        @app.get("/sockets")
        def sockets() -> int:
            links = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
            return sum(link.startswith("socket:") for link in links)

        @app.post("/call")
        async def call(body: dict[str, Any]) -> Any:
            return await self.call(body)

        @app.post("/call_elsewhere")
        async def call_in_another_loop(body: dict[str, Any]) -> Any:
            import nemo_gym.server_utils as gym

            found: list[Any] = []

            async def alone() -> None:
                client, gym._GLOBAL_AIOHTTP_CLIENT = gym._GLOBAL_AIOHTTP_CLIENT, None
                try:
                    found.append(await self.call(body))
                except BaseException as error:
                    found.append(repr(error))
                finally:
                    await gym._GLOBAL_AIOHTTP_CLIENT.close()
                    gym._GLOBAL_AIOHTTP_CLIENT = client

            thread = threading.Thread(target=asyncio.run, args=(alone(),))
            thread.start()
            while thread.is_alive():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            return found[0]

        @app.post("/call_in_time")
        async def call_in_time(body: dict[str, Any]) -> Any:
            try:
                return await asyncio.wait_for(self.call(body), 0.1)
            except TimeoutError:
                EVENTS.append("the caller gave up")
                return "late"

        @app.post("/call_often")
        async def call_often(body: dict[str, Any]) -> Any:
            async def once(number: int) -> str:
                answer = await self.call({"mode": "cookies", "cookies": {"number": str(number)}})
                return str(answer["body"])

            return len({*await asyncio.gather(*(once(number) for number in range(body["count"])))})

        return app

    async def call(self, body: dict[str, Any]) -> Any:
        response = await self.server_client.post(
            self.config.name,
            body.get("path", "/v1/responses"),
            json={key: value for key, value in body.items() if key not in ("path", "cookies")},
            cookies=body.get("cookies"),
        )
        if body.get("checked"):
            await raise_for_status(response)
        text = (await response.read()).decode()
        return {
            "status": response.status,
            "reason": response.reason,
            "headers": [[name, value] for name, value in response.headers.items() if name.lower() != "date"],
            "cookies": {name: morsel.OutputString() for name, morsel in response.cookies.items()},
            "body": text,
            "history": len(response.history),
            "path": response.url.path,
        }


EVENTS: list[str] = []

if __name__ == "__main__":
    Server.run_webserver()
