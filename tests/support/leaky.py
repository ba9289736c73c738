"""An endpoint that repeats what it was told in each place of an answer where a text can stand."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator

from aiohttp import web

from support.upstream import MODELS, Script, Seen, chat_answer

KEY = "sk-canary/Key+5c1e0b6f=="
USER, PASSWORD = "canary-user", "pass/word@canary"
LOGIN = f"{USER}:{PASSWORD}"
SENT = base64.b64encode(LOGIN.encode()).decode()
SECRETS = (KEY, PASSWORD, SENT, KEY.replace("/", "\\/"), PASSWORD.replace("/", "%2F").replace("@", "%40"))
"""In the clear, as they were sent, and as JSON or a URL may spell them."""
KINDS = (
    *("message", "code", "param", "type", "nested", "name", "text", "html", "location", "content_type"),
    *("ok_with_error", "cut", "rate_limit", "overflow", "reason"),
)


def with_login(url: str) -> str:
    return url.replace("//", f"//{USER}:{PASSWORD.replace('/', '%2F').replace('@', '%40')}@")


def leaky_answer(kind: str, told: str) -> web.Response:
    """An answer of this kind with `told`, the value of the header that authorises, in it."""
    escaped = json.dumps({"error": {"message": f"bad: {told}"}}).replace("/", "\\/")
    bodies = {
        "message": {"error": {"message": f"bad: {told}"}},
        "code": {"error": {"message": "bad", "code": told}},
        "param": {"error": {"message": "bad", "param": told}},
        "type": {"error": {"message": "bad", "type": told}},
        "nested": {"detail": [{"loc": ["body", told], "msg": told}]},
        "name": {told: "bad"},
        "ok_with_error": {"error": {"message": f"bad: {told}", "code": told}},
        "rate_limit": {"error": {"message": f"slow: {told}", "code": "insufficient_quota", "param": told}},
        "overflow": {
            "error": {"message": f"maximum context length is 5 tokens, {told}", "code": told, "param": told}
        },
    }
    statuses = {"ok_with_error": 200, "rate_limit": 429, "location": 307, "html": 500, "cut": 200}
    headers = {
        "location": {"Location": f"http://127.0.0.1:9/{told}"},
        "content_type": {"Content-Type": f"text/x-{told.split()[-1].strip('=')}"},
    }
    status = statuses.get(kind, 400)
    text = {
        "text": json.dumps(f"bad: {told}"),
        "html": f"<html><body>{told}</body></html>",
        "cut": f'{{"choices": [{{"text": "{told}',
        "message": escaped,
    }
    body = text[kind] if kind in text else json.dumps(bodies.get(kind, {}))
    response = web.Response(text=body, status=status, reason=told if kind == "reason" else None)
    response.headers.update(headers.get(kind, {}))
    return response


def leaky(kinds: Iterator[str]) -> Script:
    """Lists its model; every other call is answered by the next of `kinds`, `fine` among them."""

    async def script(seen: Seen) -> web.Response:
        if seen.path.endswith("/models"):
            return web.json_response(MODELS)
        kind = next(kinds)
        if kind == "fine":
            return web.json_response(chat_answer("hello"))
        return leaky_answer(kind, seen.headers["Authorization"])

    return script
