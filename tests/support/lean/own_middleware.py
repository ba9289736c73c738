"""A server whose class adds to a method that gymgate would replace. Runs in NeMo Gym's interpreter."""

from __future__ import annotations

from typing import Any

from app import Server
from fastapi import FastAPI


class OwnServer(Server):
    def get_session_middleware_key(self) -> str:
        return f"Server___{self.config.name}"

    def setup_exception_middleware(self, app: FastAPI) -> None:
        super().setup_exception_middleware(app)

        @app.middleware("http")
        async def add_header(request: Any, call_next: Any) -> Any:
            response = await call_next(request)
            response.headers["x-own"] = "yes"
            return response


if __name__ == "__main__":
    OwnServer.run_webserver()
