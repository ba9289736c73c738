"""An endpoint that fails: what the agent gets, what the record keeps, and what is tried again."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from openai.types.responses import ResponseErrorEvent

from gymgate.core import retrying
from gymgate.core.config import HTTPEndpoint, RolloutLimits
from gymgate.core.errors import PolicyError
from gymgate.gateway.backends.callable import CallableBackend
from gymgate.gateway.handler import StreamTimes
from gymgate.gateway.route import Route
from gymgate.gateway.server import Gateway
from gymgate.rollouts.record import Usage
from support.upstream import RawConnection, Script, Seen, chat_answer, drop, drop_midway, upstream

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
SECRET = "sk-very-secret"


@pytest.fixture(autouse=True)
def no_long_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "LONGEST_BACKOFF_S", 0.01)


def gives(
    status: int, body: Any, kind: str = "application/json", **headers: str
) -> Callable[[], web.Response]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return lambda: web.Response(status=status, body=data, content_type=kind, headers=headers)


def answer_with(status: int, body: Any) -> Script:
    async def answers(seen: Seen) -> web.Response:
        return gives(status, body)()

    return answers


async def post(route: Route, body: Any = BODY, operation: str = "chat/completions") -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{route.base_url}/{operation}", json=body) as response,
    ):
        return response.status, await response.json()


async def ask(route: Route, body: Any = BODY, operation: str = "chat/completions") -> tuple[int, str]:
    status, answer = await post(route, body, operation)
    return status, (answer.get("error") or {}).get("message", "")


ANSWERS = {
    "401": (
        gives(401, {"error": {"message": f"bad key {SECRET}"}}),
        401,
        ["HTTP 401", "'POLICY_KEY'", "***"],
    ),
    "403": (gives(403, {"detail": "no"}), 403, ["HTTP 403", "'POLICY_KEY'", ": no"]),
    "404": (
        gives(404, {"message": "unknown model"}),
        404,
        ["/v1/chat/completions", "'mine'", "unknown model"],
    ),
    "400": (gives(400, {"error": "x " * 400}), 400, ["HTTP 400", "..."]),
    "413": (
        gives(413, b"<style>a {b: c}</style><h1>too  big</h1>", "text/html"),
        413,
        ["text/html", "'too big'"],
    ),
    "429": (gives(429, {"error": {"message": "slow down"}}, Retry_After="0"), 502, ["HTTP 429", "slow down"]),
    "500": (gives(500, b"", "text/plain"), 502, ["HTTP 500", "nothing"]),
    "504": (gives(504, {}), 504, ["HTTP 504"]),
    "redirect": (gives(307, b"", Location="https://x/"), 502, ["redirects to 'https://x/'"]),
    "html": (
        gives(200, b"<html>\n" + b"log in " * 90, "text/html"),
        502,
        ["text/html", "'log in log in", "..."],
    ),
    "empty": (gives(200, b"", "application/json"), 502, ["empty body"]),
    "a list": (gives(200, []), 502, ["JSON list"]),
    "no choices": (gives(200, {"id": 1, "object": "x"}), 502, ["without 'choices' (it has id, object)"]),
    "no message": (gives(200, {"choices": [{}]}), 502, ["without 'message'"]),
    "error in a 200": (gives(200, {"error": {"message": "overloaded"}}), 502, ["overloaded"]),
}


@pytest.mark.parametrize("case", ANSWERS)
async def test_one_clear_line(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, status, texts = ANSWERS[case]
    monkeypatch.setenv("POLICY_KEY", SECRET)

    async def script(seen: Seen) -> web.Response:
        return answer()

    async with upstream(script) as policy, Gateway() as gateway:
        route = gateway.open(policy.endpoint(api_key_env="POLICY_KEY", model="mine"))
        got, message = await ask(route)
        assert got == status
        assert all(text in message for text in [policy.url, *texts]), message
        assert SECRET not in message
        assert "\n" not in message
        assert len(message) < 500
        assert isinstance(route.failure, PolicyError)
        assert (route.failure.message, route.failure.endpoint) == (message, policy.url)
        [call] = route.calls
        assert (call.status_code, call.error) == (status, message)


async def test_an_empty_message_is_an_answer() -> None:
    async def script(seen: Seen) -> web.Response:
        return web.json_response(chat_answer(None))

    async with upstream(script) as policy, Gateway() as gateway:
        route = gateway.open(policy.endpoint())
        assert await ask(route) == (200, "")
        assert (await ask(route, {"input": "hi"}, "responses"))[0] == 200
        assert route.failure is None


async def test_unreachable() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        async with Gateway() as gateway:
            status, message = await ask(gateway.open(HTTPEndpoint(base_url=url, max_retries=1)))
    assert status == 502
    assert f" {url}: " in message
    assert message.endswith("(after 2 attempts)")


async def test_a_silent_endpoint_times_out() -> None:
    async def script(seen: Seen) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async with upstream(script) as policy, Gateway() as gateway:
        route = gateway.open(policy.endpoint(timeout_s=0.1, max_retries=2))
        assert await ask(route) == (504, f"{policy.url}: no answer in 0.1 s")
        assert len(policy.seen) == 1


async def unavailable(seen: Seen) -> web.StreamResponse:
    return web.Response(status=503)


async def busy(seen: Seen) -> web.StreamResponse:
    return web.Response(status=429, headers={"Retry-After": "0.01"})


@pytest.mark.parametrize("trouble", [unavailable, busy, drop, drop_midway])
async def test_passing_trouble_is_tried_again(trouble: Script) -> None:
    async def script(seen: Seen) -> web.StreamResponse:
        return await trouble(seen) if len(policy.seen) == 1 else web.json_response(chat_answer())

    async with upstream(script) as policy, Gateway() as gateway:
        route = gateway.open(policy.endpoint(max_retries=1))
        assert (await ask(route))[0] == 200
        assert route.failure is None
        one, two = policy.seen
        assert one.raw == two.raw
        assert one.headers["Idempotency-Key"] == two.headers["Idempotency-Key"]
        assert two.headers["x-stainless-retry-count"] == "1"


async def test_retry_after_is_honoured() -> None:
    async def script(seen: Seen) -> web.Response:
        if len(policy.seen) > 1:
            return web.json_response(chat_answer())
        return web.Response(status=429, headers={"Retry-After": "0.3"})

    async with upstream(script) as policy, Gateway() as gateway:
        started = time.monotonic()
        assert (await ask(gateway.open(policy.endpoint(max_retries=1))))[0] == 200
        assert time.monotonic() - started >= 0.3


async def test_an_untranslatable_request_is_the_agents_fault() -> None:
    async with upstream() as policy, Gateway() as gateway:
        route = gateway.open(policy.endpoint())
        status, message = await ask(route, {"input": "hi", "previous_response_id": "resp_0"}, "responses")
        assert status == 400
        assert "previous_response_id" in message
        assert policy.seen == []


async def test_a_stream_that_fails_early_has_a_status_and_late_has_an_event() -> None:
    release = asyncio.Event()

    async def script(seen: Seen) -> web.Response:
        await release.wait()
        return web.Response(status=400, text=json.dumps({"error": "too long"}))

    streaming = {**BODY, "stream": True}
    async with upstream(script) as policy:
        async with Gateway() as gateway:
            release.set()
            status, message = await ask(gateway.open(policy.endpoint()), streaming)
            assert status == 400
            assert "too long" in message
        release.clear()
        async with Gateway(stream_times=StreamTimes(0.02, 0.02)) as gateway, aiohttp.ClientSession() as http:
            url = gateway.open(policy.endpoint()).base_url + "/chat/completions"
            async with http.post(url, json=streaming) as response:
                assert response.status == 200
                assert await response.content.readline() == b": waiting\n"
                release.set()
                events = await response.text()
            assert "event: error\ndata: {" in events
            assert "too long" in events


async def test_a_stream_that_the_end_of_its_rollout_cuts_says_so() -> None:
    async def script(seen: Seen) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async with upstream(script) as policy, Gateway(stream_times=StreamTimes(0.01, 0.01)) as gateway:
        route = gateway.open(policy.endpoint())
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{route.base_url}/chat/completions", json={**BODY, "stream": True}) as response,
        ):
            assert await response.content.readline() == b": waiting\n"
            await route.close()
            event = (await response.text()).partition("event: error\ndata: ")[2]
    assert "released" in json.loads(event)["error"]["message"]


@pytest.mark.parametrize(
    ("operation", "body"), [("chat/completions", BODY), ("responses", {"input": "hi"}), ("messages", BODY)]
)
async def test_the_error_event_has_the_form_of_its_dialect(operation: str, body: Any) -> None:
    release = asyncio.Event()

    async def script(seen: Seen) -> web.Response:
        await release.wait()
        return gives(400, {"error": {"message": "too long", "code": "c", "param": "p"}})()

    async with upstream(script) as policy, Gateway(stream_times=StreamTimes(0.01, 0.01)) as gateway:
        url = f"{gateway.open(policy.endpoint()).base_url}/{operation}"
        async with (
            aiohttp.ClientSession() as http,
            http.post(url, json={**body, "stream": True}) as response,
        ):
            await response.content.readline()
            release.set()
            event = json.loads((await response.text()).partition("event: error\ndata: ")[2])
    if operation == "responses":
        parsed = ResponseErrorEvent.model_validate(event)
        assert ("too long" in parsed.message, parsed.code, parsed.param) == (True, "c", "p")
    elif operation == "messages":
        assert (event["type"], event["error"]["type"]) == ("error", "invalid_request_error")
    else:
        assert (event["error"]["code"], event["error"]["param"]) == ("c", "p")
    assert "too long" in event["error"]["message"]


async def test_an_endpoint_is_not_asked_to_stream() -> None:
    """Answers are collected whole, in whatever dialect."""
    async with upstream() as policy, Gateway() as gateway:
        route = gateway.open(policy.endpoint())
        fields = {"stream": True, "stream_options": {"include_usage": True}}
        for operation, body in (("chat/completions", BODY), ("responses", {"input": "hi"})):
            async with (
                aiohttp.ClientSession() as http,
                http.post(f"{route.base_url}/{operation}", json={**body, **fields}) as response,
            ):
                assert response.headers["Content-Type"].startswith("text/event-stream")
                assert "hello" in await response.text()
    assert [seen.body.keys() & fields.keys() for seen in policy.seen] == [set(), set()]


async def test_a_slow_stream_gets_signs_of_life_and_then_its_answer() -> None:
    release = asyncio.Event()

    async def script(seen: Seen) -> web.Response:
        await release.wait()
        return web.json_response(chat_answer())

    async with upstream(script) as policy, Gateway(stream_times=StreamTimes(0.01, 0.01)) as gateway:
        url = gateway.open(policy.endpoint()).base_url + "/chat/completions"
        async with (
            aiohttp.ClientSession() as http,
            http.post(url, json={**BODY, "stream": True}) as response,
        ):
            for _ in range(2):
                assert await response.content.readline() == b": waiting\n"
                assert await response.content.readline() == b"\n"
            release.set()
            assert (await response.text()).endswith("data: [DONE]\n\n")


async def test_a_call_that_is_sent_again_is_no_stream_unless_one_was_asked_for() -> None:
    asked, release = asyncio.Event(), asyncio.Event()

    async def script(seen: Seen) -> web.Response:
        asked.set()
        await release.wait()
        return web.json_response(chat_answer())

    async with upstream(script) as policy, Gateway(stream_times=StreamTimes(0.01, 0.01)) as gateway:
        url = gateway.open(policy.endpoint()).base_url + "/chat/completions"
        async with aiohttp.ClientSession() as http:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1), http.post(url, json=BODY):
                    pass
            await asked.wait()
            asyncio.get_running_loop().call_later(0.1, release.set)
            async with http.post(url, json=BODY) as response:
                assert response.content_type == "application/json"
                assert (await response.json())["object"] == "chat.completion"
    assert len(policy.seen) == 1


async def answer_async(body: dict[str, Any]) -> dict[str, Any]:
    body["mutated"] = True
    return chat_answer(body["messages"][0]["content"])


def answer_sync(body: dict[str, Any]) -> dict[str, Any]:
    return chat_answer(body["messages"][0]["content"])


@pytest.mark.parametrize("fn", [answer_async, answer_sync, functools.partial(answer_async)])
async def test_a_callable_answers(fn: Any) -> None:
    async with Gateway() as gateway:
        route = gateway.open(CallableBackend(fn))
        assert (await ask(route))[0] == 200
        [call] = route.calls
        assert call.request == BODY
        assert call.response == chat_answer("hi")


async def test_a_function_that_is_not_async_holds_nobody_up() -> None:
    """The first of two calls waits for the second, each in a thread that finds its caller's context variables."""
    both, context = threading.Barrier(2, timeout=30), contextvars.ContextVar("name", default="nobody")

    def waits(body: dict[str, Any]) -> dict[str, Any]:
        both.wait()
        return chat_answer(context.get())

    backend = CallableBackend(waits)
    context.set("caller")
    answers = await asyncio.gather(*(backend.call(BODY) for _ in range(2)))
    assert [answer.body["choices"][0]["message"]["content"] for answer in answers] == ["caller"] * 2


def raises(body: dict[str, Any]) -> dict[str, Any]:
    raise KeyError("weights")


async def cancels(body: dict[str, Any]) -> dict[str, Any]:
    raise asyncio.CancelledError


async def hangs(body: dict[str, Any]) -> dict[str, Any]:
    await asyncio.Event().wait()
    return {}


BAD = {
    "raises KeyError: 'weights'": (raises, 502, "raised KeyError: 'weights'"),
    "raises CancelledError": (cancels, 502, "raised CancelledError"),
    "wrong type": (lambda body: 0.5, 502, "returned float"),
    "no choices": (lambda body: {"text": "hi"}, 502, "without 'choices' (it has text)"),
    "not JSON": (lambda body: chat_answer(x={1, 2}), 502, "JSON cannot hold"),
    "too slow": (hangs, 504, "gave no answer in 0.05 s"),
}


@pytest.mark.parametrize("case", BAD)
async def test_a_callables_fault_is_said(case: str) -> None:
    fn, status, text = BAD[case]
    async with Gateway() as gateway:
        route = gateway.open(CallableBackend(fn, timeout_s=0.05 if fn is hangs else 60))
        got, message = await ask(route)
        assert got == status
        assert text in message
        assert route.failure is not None


@pytest.mark.parametrize("end", ["answered", "failed", "cancelled"])
async def test_a_call_says_how_often_it_was_repeated_however_it_ends(end: str) -> None:
    """Each of its requests may have been paid for."""
    asked_again = asyncio.Event()

    async def script(seen: Seen) -> web.Response:
        if len(policy.seen) > 1 and end == "answered":
            return web.json_response(chat_answer())
        if len(policy.seen) > 1 and end == "cancelled":
            asked_again.set()
            await asyncio.Event().wait()
        return web.json_response({}, status=503)

    async with upstream(script) as policy, Gateway() as gateway:
        route = gateway.open(policy.endpoint(max_retries=1))
        asking = asyncio.create_task(ask(route))
        if end == "cancelled":
            await asked_again.wait()
            await route.close()
        await asking
        assert len(policy.seen) == 2
        (call,) = route.calls
        assert call.details["retries"] == 1


async def test_logs_hold_no_keys(caplog: pytest.LogCaptureFixture) -> None:
    async def script(seen: Seen) -> web.Response:
        return web.json_response({"error": f"bad key {seen.headers['Authorization']}"}, status=401)

    caplog.set_level("DEBUG")
    async with upstream(script) as policy, Gateway() as gateway:
        route = gateway.open(policy.endpoint(api_key=SECRET), rollout_id="public")
        await ask(route)
        broken = await RawConnection.open(gateway.port)
        broken.writer.write(f"POST /ng-rollout/{route.key}/v1/responses HTTP/9\x00\r\n\r\n".encode())
        assert (await broken.answer())[0] == 400
        await broken.drop()
        await route.close()
        await ask(route)
    assert "rollout public: " in caplog.text
    assert route.key not in caplog.text
    assert SECRET not in caplog.text


async def test_a_refused_key_is_answered_with_the_options_that_set_one() -> None:
    """A key comes to the daemon without its variable's name, so the options of both kinds of endpoint are shown."""

    async def refuses(_: Seen) -> web.Response:
        return web.json_response({"error": {"message": "bad key"}}, status=401)

    async with upstream(refuses) as policy, Gateway() as gateway:
        _, message = await ask(gateway.open(policy.endpoint(api_key=SECRET)))
    assert "--api-key-var" in message
    assert "--judge-key-var" in message
    assert SECRET not in message


async def test_a_password_in_an_endpoints_url_stands_in_no_message() -> None:
    async with Gateway() as gateway:
        route = gateway.open(HTTPEndpoint(base_url=f"http://user:{SECRET}@127.0.0.1:1/v1", max_retries=0))
        status, message = await ask(route)
    assert (status, "127.0.0.1:1" in message, SECRET in message) == (502, True, False)


async def test_a_failing_judge_is_named() -> None:
    async with upstream() as policy, Gateway() as gateway:
        route = gateway.open(policy.endpoint(), judges={"judge": CallableBackend(raises)})
        port = await gateway.port_for("judge")
        route.base_url = route.base_url.replace(str(gateway.port), str(port))
        status, message = await ask(route)
        assert status == 502
        assert message.startswith("model server 'judge': ")
        assert "KeyError" in message


REFUSING = RolloutLimits(context_overflow="refuse")
VLLM_OVERFLOW = "This model's maximum context length is 32768 tokens. However, you requested 32818 tokens"


@pytest.mark.parametrize(
    "body",
    [
        {"message": VLLM_OVERFLOW, "type": "BadRequestError", "code": 400},
        {"error": {"message": VLLM_OVERFLOW, "type": "BadRequestError", "code": 400}},
        {"error": {"message": "Input length (9) exceeds model's maximum context length (8)."}},
        {
            "error": {
                "message": "Requested token count exceeds the model's maximum context length of 8 tokens."
            }
        },
        {"message": "The input (9 tokens) is longer than the model's context length (8 tokens)."},
        {"message": "max_tokens must be at least 1, got -186.", "code": 400},
        {"error": {"message": "too long", "code": "context_length_exceeded"}},
    ],
)
@pytest.mark.parametrize("key", ["x", "e", "context", SECRET])
async def test_a_context_overflow_counts_as_truncated(
    monkeypatch: pytest.MonkeyPatch, body: Any, key: str
) -> None:
    """Whatever the key: local servers take any, and it may be a letter of the message."""
    monkeypatch.setenv("POLICY_KEY", key)
    async with upstream(answer_with(400, body)) as policy, Gateway() as gateway:
        route = gateway.open(policy.endpoint(api_key_env="POLICY_KEY"), limits=REFUSING)
        status, answer = await post(route)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert body.get("error", body)["message"] in answer["error"]["message"]
        assert route.truncated == "context_length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("replicas", [False, True])
@pytest.mark.parametrize("operation", ["responses", "chat/completions", "messages"])
async def test_a_context_overflow_is_answered_as_nemo_gyms_vllm_server_does(
    operation: str, replicas: bool, stream: bool
) -> None:
    """With an empty message that is incomplete, in every dialect."""
    body = {"input": "hi"} if operation == "responses" else BODY
    async with upstream(answer_with(400, {"message": VLLM_OVERFLOW})) as policy, Gateway() as gateway:
        more = {"replicas": (policy.url.replace("127.0.0.1", "localhost"),)} if replicas else {}
        route = gateway.open(policy.endpoint(**more))
        if stream:
            url = f"{route.base_url}/{operation}"
            async with aiohttp.ClientSession() as http, http.post(url, json=body | {"stream": True}) as given:
                assert given.status == 200
                assert "error" not in (await given.text()).replace('"error":null', "")
        else:
            status, answer = await post(route, body, operation)
            assert status == 200
            if operation == "responses":
                assert (answer["status"], answer["incomplete_details"]["reason"]) == (
                    "incomplete",
                    "max_output_tokens",
                )
                assert [part["text"] for part in answer["output"][0]["content"]] == [""]
            elif operation == "messages":
                assert (answer["stop_reason"], answer["content"][0]["text"]) == ("max_tokens", "")
            else:
                choice = answer["choices"][0]
                assert (choice["finish_reason"], choice["message"]["content"]) == ("length", None)
        assert (route.truncated, route.failure) == ("context_length", None)
        call = route.calls[0]
        assert (call.status_code, call.error, call.finish_reason) == (200, None, "length")
        assert VLLM_OVERFLOW in call.details["overflow"]
        assert call.usage == Usage()


@pytest.mark.parametrize("limits", [None, REFUSING])
async def test_an_overflow_after_which_the_agent_goes_on_is_no_limit(limits: RolloutLimits | None) -> None:
    """One that compacts its history, say. A call that was under way at the time, such as one for a title, says nothing."""
    is_full, going_on = True, asyncio.Event()

    async def script(seen: Seen) -> web.StreamResponse:
        if seen.body["messages"] != BODY["messages"]:
            await going_on.wait()
        elif is_full:
            return web.json_response({"message": VLLM_OVERFLOW}, status=400)
        return web.json_response(chat_answer())

    async with upstream(script) as policy, Gateway() as gateway:
        route = gateway.open(policy.endpoint(), limits=limits)
        title = asyncio.create_task(post(route, {"messages": [{"role": "user", "content": "A title?"}]}))
        await policy.arrivals(1)
        await post(route)
        going_on.set()
        assert (await title)[0] == 200
        assert route.truncated == "context_length"
        is_full = False
        assert (await post(route))[0] == 200
        assert route.truncated is None
        is_full = True
        await post(route)
        assert route.truncated == "context_length"


async def test_an_overflow_that_nemo_gyms_vllm_server_would_not_answer_is_refused() -> None:
    """That of a Responses endpoint, and that of a function, whose SDK has a limit of its own."""

    async def overflows(request: Any) -> Any:
        raise PolicyError("too long", status_code=400, retryable=False, code="context_length_exceeded")

    async with upstream(answer_with(400, {"message": VLLM_OVERFLOW})) as policy, Gateway() as gateway:
        for endpoint in (policy.endpoint(dialect="responses"), CallableBackend(overflows)):
            route = gateway.open(endpoint)
            status, answer = await post(route)
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
            assert route.truncated == "context_length"


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (400, "max_tokens must be at least 1, got 0."),
        (400, "context_length is no field of this request"),
        (400, "unknown parameter 'context length'"),
        (413, VLLM_OVERFLOW),
    ],
)
async def test_what_only_mentions_the_context_is_a_failure(status: int, message: str) -> None:
    async with upstream(answer_with(status, {"error": {"message": message}})) as policy, Gateway() as gateway:
        route = gateway.open(policy.endpoint())
        assert (await ask(route))[0] == status
        assert route.truncated is None
        assert route.failure is not None


async def test_code_and_param_of_an_endpoints_error_reach_the_agent() -> None:
    error = {"message": "no", "type": "invalid_request_error", "param": "top_k", "code": "unsupported_value"}
    async with upstream(answer_with(400, {"error": error})) as policy, Gateway() as gateway:
        route = gateway.open(policy.endpoint())
        _, answer = await post(route)
        assert (answer["error"]["param"], answer["error"]["code"]) == ("top_k", "unsupported_value")
        assert isinstance(route.failure, PolicyError)
        assert (route.failure.param, route.failure.code) == ("top_k", "unsupported_value")


@pytest.mark.parametrize(("status", "is_json"), [(400, False), (400, True), (200, False)])
@pytest.mark.parametrize("before", [*range(60, 80, 5), *range(270, 300, 5)])
async def test_no_part_of_a_key_stands_where_a_message_is_cut(
    monkeypatch: pytest.MonkeyPatch, status: int, is_json: bool, before: int
) -> None:
    monkeypatch.setenv("POLICY_KEY", SECRET)

    async def quotes(seen: Seen) -> web.Response:
        text = "x" * before + SECRET + " y" * 400
        return web.Response(text=json.dumps({"error": text}) if is_json else text, status=status)

    async with upstream(quotes) as policy, Gateway() as gateway:
        route = gateway.open(policy.endpoint(api_key_env="POLICY_KEY", model="mine"))
        await ask(route)
        assert route.failure is not None
        assert "sk-v" not in route.failure.message


async def test_a_key_that_a_body_escapes_stands_in_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLICY_KEY", SECRET)

    async def quotes(seen: Seen) -> web.Response:
        escaped = SECRET.replace("-", r"\u002d")
        return web.Response(
            text=f'{{"error": "bad key {escaped}"}}', status=401, content_type="application/json"
        )

    async with upstream(quotes) as policy, Gateway() as gateway:
        route = gateway.open(policy.endpoint(api_key_env="POLICY_KEY", model="mine"))
        await ask(route)
        assert route.failure is not None
        assert "bad key ***" in route.failure.message
