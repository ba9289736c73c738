"""Engines over HTTP against a server that misbehaves; tests/training has one with a real model."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from gymgate.core.errors import PolicyError, TokenDataError
from gymgate.tokens.engines import Sample, SGLangEngine, VLLMCompletionsEngine, VLLMGenerateEngine

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ENGINES = [VLLMGenerateEngine, VLLMCompletionsEngine, SGLangEngine]


class Server:
    """Answers every POST with `handler`, and keeps what was asked."""

    url: str
    handler: Handler

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        return await self.handler(request)

    async def look(self, request: web.Request) -> web.StreamResponse:
        return await self.handler(request)

    def give(self, body: Any, status: int = 200) -> None:
        """Always answer this."""

        async def handler(request: web.Request) -> web.StreamResponse:
            headers = {"Retry-After": "0"} if status == 503 else None
            if isinstance(body, str):
                return web.Response(text=body, status=status, headers=headers)
            return web.json_response(body, status=status, headers=headers)

        self.handler = handler


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    app = web.Application()
    app.router.add_post("/{path:.*}", made.answer)
    app.router.add_get("/{path:.*}", made.look)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield made
    await runner.cleanup()


async def ask(engine: Any, **sampling: Any) -> Sample:
    try:
        made: Sample = await engine.generate([1, 2], {"max_tokens": 8, **sampling}, session="rollout-7")
        return made
    finally:
        await engine.close()


async def test_what_vllms_generate_route_is_asked_and_says(server: Server) -> None:
    content = [{"token": "token_id:5", "logprob": -0.25, "bytes": None, "top_logprobs": []}]
    choice = {"index": 0, "token_ids": [5], "finish_reason": "length", "logprobs": {"content": content}}
    server.give({"request_id": "r", "choices": [choice], "prompt_logprobs": None})
    engine = VLLMGenerateEngine(f"{server.url}/v1", model="m", api_key="secret")
    sample = await ask(engine, temperature=1.0, max_tokens=1, stop_token_ids=[9])
    assert sample == Sample([5], [-0.25], "length", None)
    parameters = {"temperature": 1.0, "max_tokens": 1, "stop_token_ids": [9], "logprobs": 1}
    assert server.bodies == [
        {"token_ids": [1, 2], "sampling_params": {"skip_special_tokens": False, **parameters}, "model": "m"}
    ]
    assert server.headers[0]["X-Session-ID"] == "rollout-7"
    assert server.headers[0]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(("header", "sent"), [("X-SMG-Routing-Key", "rollout-7"), (None, None)])
async def test_the_sessions_header_is_a_setting(server: Server, header: str | None, sent: str | None) -> None:
    server.give({"choices": [{"index": 0, "token_ids": [5], "finish_reason": "stop", "logprobs": None}]})
    with contextlib.suppress(TokenDataError, PolicyError):
        await ask(VLLMGenerateEngine(server.url, session_header=header))
    assert server.headers[0].get("X-SMG-Routing-Key") == sent
    assert "X-Session-ID" not in server.headers[0]


async def test_what_vllms_completions_route_is_asked_and_says(server: Server) -> None:
    logprobs = {"tokens": ["token_id:5"], "token_logprobs": [-0.25], "top_logprobs": [{}], "text_offset": [0]}
    choice = {"index": 0, "text": "x", "token_ids": [5], "finish_reason": "stop", "logprobs": logprobs}
    server.give({"choices": [choice]})
    sample = await ask(VLLMCompletionsEngine(server.url), max_tokens=1)
    assert sample == Sample([5], [-0.25], "stop", None)
    asked = server.bodies[0]
    assert (asked["prompt"], asked["return_token_ids"], asked["logprobs"]) == ([1, 2], True, 0)


async def test_what_sglangs_route_is_asked_and_says(server: Server) -> None:
    details = {
        "finish_reason": {"type": "stop", "matched": 9},
        "output_token_logprobs": [[-0.25, 5, None]],
        "weight_version": "12",
    }
    server.give({"text": "x", "output_ids": [5], "meta_info": details})
    sample = await ask(SGLangEngine(server.url), max_tokens=1, seed=3, top_k=0)
    assert sample == Sample([5], [-0.25], "stop", (12, 12))
    assert server.bodies[0]["sampling_params"] == {
        "max_new_tokens": 1,
        "sampling_seed": 3,
        "top_k": -1,
        "skip_special_tokens": False,
    }


async def test_a_server_that_changed_its_weights_meanwhile_gives_both_versions(server: Server) -> None:
    choice = {"token_ids": [5], "finish_reason": "stop", "logprobs": None, "policy_version": [3, 4]}
    server.give({"choices": [choice]})
    assert (await ask(VLLMGenerateEngine(server.url))).policy_version == (3, 4)


@pytest.mark.parametrize(
    ("kind", "path", "default"),
    [
        (VLLMGenerateEngine, ("sampling_params", "max_tokens"), 16),
        (VLLMCompletionsEngine, ("max_tokens",), 16),
        (SGLangEngine, ("sampling_params", "max_new_tokens"), 128),
    ],
)
async def test_an_answer_without_a_bound_gets_the_room_that_is_left(
    server: Server, kind: Any, path: tuple[str, ...], default: int
) -> None:
    """A server whose context has room for 500 ids more, with the defaults of vLLM and SGLang.

    vLLM's completions route takes null for its default, too.
    """

    async def handler(request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/models":
            models = [{"id": "other", "max_model_len": 99}, {"id": "m", "max_model_len": 502}]
            return web.json_response({"data": models})
        wanted: Any = server.bodies[-1]
        for name in path:
            wanted = wanted.get(name, default)
        if wanted is None:
            wanted = default if kind is VLLMCompletionsEngine else 500
        ids = [5] * min(wanted, 500)
        choice = {"token_ids": ids, "finish_reason": "length", "logprobs": None}
        details = {"output_ids": ids, "meta_info": {"finish_reason": {"type": "length"}}}
        return web.json_response({"choices": [choice], **details})

    server.handler = handler
    assert len((await ask(kind(server.url, model="m"), max_tokens=None)).token_ids) == 500
    assert len((await ask(kind(server.url, model="m"), max_tokens=7)).token_ids) == 7


async def test_a_server_that_does_not_give_its_context_length_needs_a_bound(server: Server) -> None:
    server.give({"data": [{"id": "m"}]})
    with pytest.raises(PolicyError, match="max_model_len"):
        await ask(VLLMCompletionsEngine(server.url), max_tokens=None)


async def test_missing_logprobs_stay_none(server: Server) -> None:
    server.give({"choices": [{"token_ids": [5], "finish_reason": "stop", "logprobs": None}]})
    for kind in (VLLMGenerateEngine, VLLMCompletionsEngine):
        assert (await ask(kind(server.url))).logprobs is None
    server.give({"output_ids": [5], "meta_info": {"finish_reason": {"type": "abort"}}})
    assert await ask(SGLangEngine(server.url)) == Sample([5], None, "abort", None)


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize(
    ("body", "status", "message", "retryable"),
    [
        ("upstream gone", 503, r"answered HTTP 503: .*upstream gone.* \(after 3 attempts\)", True),
        ({"error": "no"}, 400, "answered HTTP 400", False),
        ("<html>", 200, "JSON: '<html>'", False),
        ([1], 200, "usable answer", None),
        ({"choices": [], "meta_info": {}}, 200, "usable answer", None),
    ],
)
async def test_a_server_that_misbehaves_is_named(
    server: Server, kind: Any, body: Any, status: int, message: str, retryable: bool | None
) -> None:
    server.give(body, status)
    with pytest.raises(PolicyError, match=message) as caught:
        await ask(kind(server.url))
    assert caught.value.retryable is retryable
    assert server.url in str(caught.value)


async def test_a_key_goes_before_the_login_of_an_address(server: Server) -> None:
    server.give({"output_ids": [5], "meta_info": {"finish_reason": {"type": "stop"}}})
    await ask(SGLangEngine(server.url.replace("//", "//user:hunter-2@"), api_key="secret"))
    assert server.headers[0]["Authorization"] == "Bearer secret"


async def test_a_refusal_that_repeats_the_password_of_the_address_does_not_show_it(server: Server) -> None:
    server.give("a-token-of-mine:hunter/22, written hunter%2F22, is not welcome", 403)
    with pytest.raises(PolicyError, match="is not welcome") as caught:
        await ask(SGLangEngine(server.url.replace("//", "//a-token-of-mine:hunter%2F22@")))
    assert not any(secret in str(caught.value) for secret in ("hunter", "a-token-of-mine"))


@pytest.mark.parametrize("first", ["reset", "busy"])
async def test_a_lost_connection_and_a_busy_server_are_tried_again(server: Server, first: str) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        if len(server.bodies) > 1:
            return web.json_response({"choices": [{"token_ids": [5], "finish_reason": "stop"}]})
        if first == "busy":
            return web.Response(status=503, headers={"Retry-After": "0"})
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    server.handler = handler
    assert (await ask(VLLMGenerateEngine(server.url), seed=7)).token_ids == [5]
    assert len(server.bodies) == 2
    assert server.bodies[0] == server.bodies[1]


async def test_idle_connections_are_given_up_before_uvicorn_closes_them() -> None:
    """It does after 5 s; a request on a connection that is being closed is lost."""
    engine = VLLMGenerateEngine("http://127.0.0.1:9")
    assert engine._client()._keepalive_s < 5
    await engine.close()


async def test_a_server_without_return_token_ids_is_told_apart(server: Server) -> None:
    server.give({"choices": [{"text": "x", "finish_reason": "stop", "logprobs": None}]})
    with pytest.raises(TokenDataError, match="return_token_ids"):
        await ask(VLLMCompletionsEngine(server.url))


async def test_no_answer_in_time_is_an_error_and_the_server_is_told(server: Server) -> None:
    """The connection is closed, by which vLLM aborts the request."""
    gone = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        try:
            await asyncio.Event().wait()
        finally:
            gone.set()
        raise AssertionError("unreachable")

    server.handler = handler
    with pytest.raises(PolicyError, match=r"\b0\.2 s"):
        await ask(VLLMGenerateEngine(server.url, timeout_s=0.2))
    await asyncio.wait_for(gone.wait(), 5)


@pytest.mark.filterwarnings("ignore")  # of the loop that is left without closing, which is what is tested
async def test_an_engine_serves_several_event_loops(server: Server) -> None:
    """As trainers call it; each loop has its own connections, and one that is gone leaves none to the next."""
    server.give({"choices": [{"token_ids": [5], "finish_reason": "stop", "logprobs": None}]})
    engine = VLLMGenerateEngine(server.url)
    await asyncio.to_thread(asyncio.run, engine.generate([1], {}, session="not closed"))
    samples = [await asyncio.to_thread(asyncio.run, ask(engine)) for _ in range(2)]
    assert [sample.token_ids for sample in [*samples, await ask(engine)]] == [[5]] * 3
    assert not engine._clients
    gc.collect()


def test_an_address_without_scheme_is_refused() -> None:
    with pytest.raises(PolicyError, match="'localhost:8000'"):
        VLLMGenerateEngine("localhost:8000")
