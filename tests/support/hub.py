"""A dataset hub on this machine: the routes, headers and error codes that huggingface_hub's client uses, over real files."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiohttp import web

Files = dict[str, bytes]


@dataclass
class Hub:
    """Repositories by name; their files may be changed while it runs, which makes another commit."""

    url: str = ""
    repositories: dict[str, Files] = field(default_factory=dict)
    gated: dict[str, str] = field(default_factory=dict)
    """Repository -> the token that has access."""
    requests: list[str] = field(default_factory=list)
    """Method and path of each request."""

    def commit(self, name: str) -> str:
        state = hashlib.sha1()
        for path, data in sorted(self.repositories[name].items()):
            state.update(path.encode() + b"\0" + data)
        return state.hexdigest()

    # Handlers

    @web.middleware
    async def checked(self, request: web.Request, handler) -> web.StreamResponse:  # type: ignore[no-untyped-def]
        self.requests.append(f"{request.method} {request.path}")
        name = f"{request.match_info.get('owner')}/{request.match_info.get('name')}"
        if request.match_info.http_exception is not None:
            return web.json_response({"error": "no such route"}, status=404)
        if name not in self.repositories:
            return self.error(401, "RepoNotFound", "Invalid username or password.")
        wanted = self.gated.get(name)
        # The hub tells everyone that a gated repository is there; its files need access.
        if wanted is not None and "/resolve/" in request.path:
            given = request.headers.get("Authorization", "")
            if given != f"Bearer {wanted}":
                return self.error(
                    401 if not given else 403, "GatedRepo", f"Access to dataset {name} is restricted."
                )
        revision = request.match_info.get("revision", "main")
        if revision not in ("main", self.commit(name)):
            return self.error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return await handler(request, name)  # type: ignore[no-any-return]

    def error(self, status: int, code: str, message: str) -> web.Response:
        return web.json_response(
            {"error": message}, status=status, headers={"X-Error-Code": code, "X-Error-Message": message}
        )

    async def info(self, request: web.Request, name: str) -> web.Response:
        return web.json_response(
            {
                "_id": "0",
                "id": name,
                "author": name.partition("/")[0],
                "sha": self.commit(name),
                "lastModified": "2026-01-01T00:00:00.000Z",
                "createdAt": "2026-01-01T00:00:00.000Z",
                "private": False,
                "gated": "auto" if name in self.gated else False,
                "disabled": False,
                "tags": [],
                "downloads": 0,
                "likes": 0,
                "cardData": {},
                "siblings": [{"rfilename": path} for path in sorted(self.repositories[name])],
            }
        )

    async def tree(self, request: web.Request, name: str) -> web.Response:
        below = request.match_info.get("path", "").strip("/")
        found = [
            path for path in sorted(self.repositories[name]) if not below or path.startswith(below + "/")
        ]
        if below and not found:
            return self.error(404, "EntryNotFound", f"{below} does not exist on main")
        entries = [self.entry(name, path) for path in found]
        parents = {path.rpartition("/")[0] for path in found if "/" in path.removeprefix(below).strip("/")}
        entries += [
            {"type": "directory", "oid": "0" * 40, "size": 0, "path": path} for path in sorted(parents)
        ]
        if request.query.get("recursive", "false").lower() not in ("true", "1"):
            entries = [
                entry for entry in entries if "/" not in str(entry["path"]).removeprefix(below).strip("/")
            ]
        return web.json_response(entries)

    async def paths_info(self, request: web.Request, name: str) -> web.Response:
        if request.content_type == "application/json":
            wanted = (await request.json())["paths"]
        else:
            wanted = (await request.post()).getall("paths")
        files = self.repositories[name]
        found = [self.entry(name, path) for path in wanted if path in files]
        directories = [path for path in wanted if any(file.startswith(f"{path}/") for file in files)]
        found += [{"type": "directory", "oid": "0" * 40, "size": 0, "path": path} for path in directories]
        return web.json_response(found)

    def entry(self, name: str, path: str) -> dict[str, object]:
        data = self.repositories[name][path]
        return {"type": "file", "oid": hashlib.sha1(data).hexdigest(), "size": len(data), "path": path}

    async def resolve(self, request: web.Request, name: str) -> web.Response:
        path = request.match_info["path"]
        data = self.repositories[name].get(path)
        if data is None:
            return self.error(404, "EntryNotFound", "Entry not found")
        headers = {
            "ETag": f'"{hashlib.sha1(data).hexdigest()}"',
            "X-Repo-Commit": self.commit(name),
            "Accept-Ranges": "bytes",
        }
        whole = len(data)
        start = request.http_range.start or 0
        if start:
            data = data[start:]
            headers["Content-Range"] = f"bytes {start}-{whole - 1}/{whole}"
        return web.Response(
            body=data, status=206 if start else 200, headers=headers, content_type="application/octet-stream"
        )

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self.checked])
        one = "/{owner}/{name}"
        app.router.add_get(f"/api/datasets{one}", self.info)
        app.router.add_get(f"/api/datasets{one}/revision/{{revision}}", self.info)
        app.router.add_get(f"/api/datasets{one}/tree/{{revision}}", self.tree)
        app.router.add_get(f"/api/datasets{one}/tree/{{revision}}/{{path:.*}}", self.tree)
        app.router.add_post(f"/api/datasets{one}/paths-info/{{revision}}", self.paths_info)
        app.router.add_get(f"/datasets{one}/resolve/{{revision}}/{{path:.*}}", self.resolve)
        return app


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve it on a thread of its own, since preparing blocks; `hub.url` is where."""
    ready, loop = threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        runner = web.AppRunner(hub.application(), access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        hub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield hub
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()
