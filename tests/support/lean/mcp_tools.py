"""A server with a tool for MCP clients. Runs in NeMo Gym's interpreter."""

from __future__ import annotations

from typing import Any, ClassVar

from fastapi import FastAPI
from nemo_gym.base_resources_server import SimpleResourcesServer
from pydantic import BaseModel


class Numbers(BaseModel):
    a: int
    b: int


class Server(SimpleResourcesServer):
    ray_enabled: ClassVar[bool] = False

    async def verify(self, body: Any) -> Any:
        raise NotImplementedError

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()

        @app.post("/add")
        async def add(numbers: Numbers) -> dict[str, int]:
            return {"sum": numbers.a + numbers.b}

        return app


if __name__ == "__main__":
    Server.run_webserver()
