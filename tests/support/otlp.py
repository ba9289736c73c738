"""An OTLP collector: keeps the spans that it is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass
class Collector:
    """An OTLP collector; each span as its service, its name, and itself."""

    url: str
    spans: list[tuple[str, str, Any]] = field(default_factory=list)
    resources: list[dict[str, str]] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def receive(self, request: web.Request) -> web.Response:
        if request.path == "/v1/traces":
            sent = ExportTraceServiceRequest.FromString(await request.read())
            for each in sent.resource_spans:
                resource = {item.key: item.value.string_value for item in each.resource.attributes}
                self.resources.append(resource)
                for scope in each.scope_spans:
                    self.spans += [(resource["service.name"], span.name, span) for span in scope.spans]
            self.arrived.set()
        return web.Response(content_type="application/x-protobuf")


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    app = web.Application(client_max_size=1 << 26)
    collector = Collector("")
    app.router.add_post("/{path:.*}", collector.receive)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    collector.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield collector
    finally:
        await runner.cleanup()
