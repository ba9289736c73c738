"""Whose call is it, and where may it go."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gymgate.core import codec
from gymgate.core.config import RolloutLimits
from gymgate.core.errors import ConfigError
from gymgate.gateway import conversations
from gymgate.gateway.requests import METADATA_KEY
from gymgate.gateway.route import Route
from gymgate.gateway.server import Gateway
from support.upstream import Seen, Upstream, chat_answer, upstream

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "vendor_field": {"kept": [1, 2.50]}}


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with Gateway() as running:
        yield running


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def post(
    http: aiohttp.ClientSession, url: str, body: Any = BODY, **headers: str
) -> tuple[int, dict[str, Any]]:
    async with http.post(url, json=body, headers=headers) as response:
        return response.status, await response.json()


KEY_PLACES = {
    "url": lambda route: ("/ng-rollout/{0}/v1", {}),
    "token capture": lambda route: ("/ng-rollout/{0}/training-token-capture/v1", {}),
    "v1 twice": lambda route: ("/ng-rollout/{0}/v1/v1", {}),
    "bearer": lambda route: ("/v1", {"Authorization": f"Bearer {route.key}"}),
    "bearer without v1": lambda route: ("", {"Authorization": f"bearer {route.key}"}),
    "x-api-key": lambda route: ("/v1", {"x-api-key": route.key}),
}


@pytest.mark.parametrize("place", KEY_PLACES)
async def test_the_key_is_found(
    place: str, gateway: Gateway, policy: Upstream, http: aiohttp.ClientSession
) -> None:
    route, other = gateway.open(policy.endpoint()), gateway.open(policy.endpoint())
    prefix, headers = KEY_PLACES[place](route)
    url = f"{gateway.url}{prefix.format(route.key)}/chat/completions?beta=true"
    assert (await post(http, url, **headers))[0] == 200
    assert len(route.calls) == 1
    assert other.calls == []


@pytest.mark.parametrize("mine", [{}, {"row": "7"}], ids=["ours alone", "beside the row's"])
async def test_metadata_carries_the_key_and_nothing_of_it_goes_on(
    mine: dict[str, str], gateway: Gateway, policy: Upstream, http: aiohttp.ClientSession
) -> None:
    route = gateway.open(policy.endpoint(), metadata_routing=True)
    body = {**BODY, "metadata": {**mine, **route.metadata}}
    url = f"{gateway.url}/v1/chat/completions"
    assert (await post(http, url, body, Authorization="Bearer dummy"))[0] == 200
    expected = {**BODY, "metadata": mine} if mine else BODY
    assert policy.seen[0].body == expected
    assert route.calls[0].request == expected
    assert route.key not in json.dumps(policy.seen[0].headers)


async def test_same_dialect_passes_bytes_through_unchanged(
    gateway: Gateway, http: aiohttp.ClientSession
) -> None:
    answer = (
        b'{ "zeta":1.50, "choices" : [{"message":{"role":"assistant","content":null}}],"alpha":"\\u00e9"}'
    )

    async def script(seen: Seen) -> aiohttp.web.Response:
        return aiohttp.web.Response(body=answer, content_type="application/json")

    async with upstream(script) as policy:
        route = gateway.open(policy.endpoint())
        request = b'{"b": 1.50,  "a":"\\u00e9", "model":"m", "stream": false}'
        async with http.post(f"{route.base_url}/chat/completions", data=request) as response:
            assert await response.read() == answer
        assert policy.seen[0].raw == request
        assert route.calls[0].request == json.loads(request)
        assert route.calls[0].response == json.loads(answer)
        route = gateway.open(policy.endpoint(model="the endpoint's"))
        async with http.post(f"{route.base_url}/chat/completions", data=request) as response:
            assert await response.read() == answer
        assert policy.seen[1].body == {**json.loads(request), "model": "the endpoint's"} | {"stream": False}


@pytest.mark.parametrize("endpoint", ["chat", "responses"])
async def test_anthropic_messages_inward(
    endpoint: Any, gateway: Gateway, policy: Upstream, http: aiohttp.ClientSession
) -> None:
    route = gateway.open(policy.endpoint(dialect=endpoint))
    url = f"{gateway.url}/v1/messages?beta=true"
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    status, answer = await post(http, url, body, **{"x-api-key": route.key})
    assert (status, answer["content"][0]["text"]) == (200, "hello")
    async with http.post(url, json={**body, "stream": True}, headers={"x-api-key": route.key}) as response:
        assert response.content_type == "text/event-stream"
        assert "event: message_stop" in await response.text()
    plain, streamed = route.calls
    assert [(call.index, call.finish_reason) for call in route.calls] == [(0, "stop"), (1, "stop")]
    assert (plain.request, plain.dialect, plain.usage.input_tokens) == (body, "messages", 3)
    assert plain.upstream_request == policy.seen[0].body
    assert plain.upstream_response is not None
    assert streamed.response is not None
    assert streamed.response["content"] == answer["content"]


async def test_why_a_translated_answer_ended_is_known(gateway: Gateway, http: aiohttp.ClientSession) -> None:
    async def cut(seen: Seen) -> web.Response:
        answer = chat_answer("half an ans")
        answer["choices"][0]["finish_reason"] = "length"
        return web.json_response(answer)

    async with upstream(cut) as api:
        route = gateway.open(api.endpoint())
        status, _ = await post(http, f"{route.base_url}/responses", {"input": "hi"})
    assert (status, [call.finish_reason for call in route.calls]) == (200, ["length"])


async def test_a_body_beyond_the_limit_is_refused_and_goes_nowhere(
    gateway: Gateway, policy: Upstream, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gymgate.core.http_client.MAX_BODY", 100_000)
    route = gateway.open(policy.endpoint())
    url = f"{route.base_url}/chat/completions"
    status, answer = await post(http, url, {**BODY, "padding": "x" * 200_000})
    assert status == 413
    assert " 100000 bytes" in answer["error"]["message"]
    assert (policy.seen, route.calls) == ([], [])
    assert (await post(http, url))[0] == 200


async def test_a_large_body_passes(gateway: Gateway, policy: Upstream, http: aiohttp.ClientSession) -> None:
    route = gateway.open(policy.endpoint())
    body = {**BODY, "messages": [{"role": "user", "content": "x" * (3 << 20)}]}
    data = io.BytesIO(json.dumps(body).encode())
    async with http.post(f"{route.base_url}/chat/completions", data=data) as response:
        assert response.status == 200
    assert policy.seen[0].body == body


async def test_overrides_replace_what_the_caller_said(
    gateway: Gateway, policy: Upstream, http: aiohttp.ClientSession
) -> None:
    endpoint = policy.endpoint(
        model="mine",
        sampling=(("max_tokens", 5), ("temperature", 0.1)),
        headers=(("X-Team", "a"),),
        api_key="s3cret",
    )
    route = gateway.open(endpoint)
    await post(
        http,
        f"{route.base_url}/chat/completions",
        {**BODY, "max_completion_tokens": 9},
        Cookie="a=b",
        Authorization="Bearer dummy",
    )
    seen = policy.seen[0]
    assert seen.body == {**BODY, "model": "mine", "max_tokens": 5, "temperature": 0.1}
    assert list(seen.body)[:2] == ["model", "messages"]
    assert (seen.headers["Authorization"], seen.headers["X-Team"]) == ("Bearer s3cret", "a")
    assert "Cookie" not in seen.headers
    assert "s3cret" not in repr(route) + repr(vars(gateway)) + repr(route._targets)


async def test_unknown_and_retired_keys_reach_no_policy(
    gateway: Gateway, policy: Upstream, http: aiohttp.ClientSession
) -> None:
    retired, live = gateway.open(policy.endpoint()), gateway.open(policy.endpoint())
    await retired.close()
    answers = []
    for path in [f"/ng-rollout/{retired.key}/v1", f"/ng-rollout/{'0' * 32}/v1", "/ng-rollout/7-0/v1"]:
        status, body = await post(http, f"{gateway.url}{path}/chat/completions", BODY)
        assert status == 404
        assert "key" in body["error"]["message"]
        assert retired.key not in json.dumps(body)
        answers.append(body)
    assert answers[0] == answers[1], "a retired key must look like one that never was"
    whole = []
    for key in (retired.key, "0" * 32):
        path = f"{gateway.url}/ng-rollout/{key}/v1/responses"
        async with http.post(path, json={"input": "hi"}) as response:
            whole.append((response.status, await response.read(), response.headers["Content-Type"]))
    assert whole[0] == whole[1]
    url = f"{gateway.url}/v1/messages"
    status, body = await post(http, url, BODY, Authorization=f"Bearer {retired.key}")
    assert (status, body["type"], body["error"]["type"]) == (401, "error", "authentication_error")
    status, body = await post(http, url, {**BODY, "metadata": {METADATA_KEY: retired.key}})
    assert (status, body["error"]["type"]) == (401, "authentication_error")
    assert (policy.seen, live.calls, retired.calls) == ([], [], [])


async def test_a_live_key_in_the_url_goes_before_metadata(
    gateway: Gateway, policy: Upstream, http: aiohttp.ClientSession
) -> None:
    """A row cannot send its rollout's calls to another rollout, nor lose them with an entry that is no key."""
    mine, other = gateway.open(policy.endpoint()), gateway.open(policy.endpoint())
    for entry in (other.key, "f" * 32, "not a key", 7):
        body = {**BODY, "metadata": {METADATA_KEY: entry}}
        assert (await post(http, f"{mine.base_url}/chat/completions", body))[0] == 200
    assert (len(mine.calls), other.calls) == (4, [])
    unknown = f"{gateway.url}/ng-rollout/{'e' * 32}/v1/chat/completions"
    body = {**BODY, "metadata": {METADATA_KEY: other.key}}
    assert (await post(http, unknown, body))[0] == 200
    assert len(other.calls) == 1


async def test_an_entry_that_is_no_key_leaves_a_judges_call_keyless(
    policy: Upstream, http: aiohttp.ClientSession
) -> None:
    async with Gateway(judges={"judge": policy.endpoint()}) as gateway:
        url = f"http://127.0.0.1:{await gateway.port_for('judge')}/v1/chat/completions"
        assert (await post(http, url, {**BODY, "metadata": {METADATA_KEY: "mine"}}))[0] == 200
        assert dict(gateway.keyless.counts) == {"judge": 1}
    assert [seen.body.get("metadata") for seen in policy.seen] == [None]


async def test_a_closed_route_is_forgotten(gateway: Gateway, policy: Upstream) -> None:
    route = gateway.open(policy.endpoint())
    assert gateway.find(route.key) is route
    await route.close()
    assert (gateway.find(route.key), gateway.routes) == (None, {})


async def test_a_rollouts_judge_goes_before_the_stacks_and_the_judging_policy_is_apart(
    policy: Upstream, http: aiohttp.ClientSession
) -> None:
    async with (
        upstream() as own,
        upstream() as judging,
        Gateway(judges={"judge": policy.endpoint()}) as gateway,
    ):
        route = gateway.open(
            policy.endpoint(),
            judges={"judge": own.endpoint(), "user": "policy", "agents_own": "policy"},
            judge_policy=judging.endpoint(),
            policy_servers=["agents_own"],
        )
        for name in ("judge", "user", "policy_model_as_judge", "policy_model", "agents_own"):
            port = await gateway.port_for(name)
            url = f"http://127.0.0.1:{port}/ng-rollout/{route.key}/v1/chat/completions"
            assert (await post(http, url))[0] == 200
        assert (len(own.seen), len(judging.seen), len(policy.seen)) == (1, 2, 2)
        assert [call.model_server for call in route.calls].count("policy_model") == 2


async def test_a_call_under_way_is_recorded_again_when_it_is_through(gateway: Gateway) -> None:
    arrived, go_on = asyncio.Event(), asyncio.Event()

    async def script(seen: Seen) -> aiohttp.web.Response:
        arrived.set()
        await go_on.wait()
        return aiohttp.web.json_response(chat_answer())

    async with upstream(script) as policy, aiohttp.ClientSession() as http:
        route = gateway.open(policy.endpoint())
        asking = asyncio.create_task(post(http, f"{route.base_url}/chat/completions"))
        await arrived.wait()
        [before] = route.calls
        assert (before.status_code, before.response, dict(route.in_flight)) == (
            None,
            None,
            {"policy_model": 1},
        )
        go_on.set()
        assert (await asking)[0] == 200
        [after] = route.calls
        assert (after.status_code, after.usage.output_tokens, dict(route.in_flight)) == (200, 2, {})


async def test_without_a_key_it_says_what_to_send(
    gateway: Gateway, policy: Upstream, http: aiohttp.ClientSession
) -> None:
    gateway.open(policy.endpoint())
    status, body = await post(http, f"{gateway.url}/v1/responses", {"input": "hi"})
    assert status == 401
    assert "Authorization: Bearer" in body["error"]["message"]
    assert policy.seen == []


REFUSED = {
    "not JSON": ("POST", "chat/completions", b"{", 400, "not JSON"),
    "not an object": ("POST", "chat/completions", b"[]", 400, "not an object"),
    "wrong method": ("GET", "responses", b"", 405, "POST"),
    "tokenize": ("POST", "tokenize", b"{}", 404, "no tokenizer"),
    "count_tokens": ("POST", "messages/count_tokens", b"{}", 404, "no tokenizer"),
    "other": ("POST", "embeddings", b"{}", 404, "does not serve /embeddings"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_refusals_are_clear(
    case: str, gateway: Gateway, policy: Upstream, http: aiohttp.ClientSession
) -> None:
    method, operation, data, status, text = REFUSED[case]
    route = gateway.open(policy.endpoint())
    async with http.request(method, f"{route.base_url}/{operation}", data=data) as response:
        assert response.status == status
        assert text in (await response.json())["error"]["message"]
        assert response.headers["x-should-retry"] == "false"


async def test_health_check_and_models(
    gateway: Gateway, policy: Upstream, http: aiohttp.ClientSession
) -> None:
    route = gateway.open(policy.endpoint(model="mine"))
    async with http.get(gateway.url + "/") as response:
        assert response.status == 200
    async with http.get(f"{route.base_url}/models") as response:
        assert [model["id"] for model in (await response.json())["data"]] == ["mine"]
    async with http.get(f"{gateway.url}/v1/models") as response:
        assert response.status == 401


async def test_judges_are_their_own_endpoints_recorded_apart(
    gateway: Gateway, policy: Upstream, http: aiohttp.ClientSession
) -> None:
    async with upstream() as judge:
        route = gateway.open(
            policy.endpoint(),
            judges={"judge": judge.endpoint(), "user": "policy"},
            limits=RolloutLimits(max_calls=1),
        )

        async def ask(model_server: str) -> tuple[int, dict[str, Any]]:
            port = await gateway.port_for(model_server)
            return await post(http, f"http://127.0.0.1:{port}/ng-rollout/{route.key}/v1/chat/completions")

        assert [(await ask(name))[0] for name in ("judge", "user", "judge", "policy_model")] == [200] * 4
        assert (len(judge.seen), len(policy.seen)) == (2, 2)
        recorded = [call.model_server for call in route.calls]
        assert recorded == ["judge", "user", "judge", "policy_model"]
        assert route.truncated is None
        status, body = await ask("policy_model")
        assert (status, body["error"]["message"]) == (400, "rollout limit: max_calls=1")
        assert (route.truncated, route.failure) == ("max_calls", None)
        status, body = await ask("stranger")
        assert status == 404
        assert all(
            text in body["error"]["message"] for text in ("'stranger'", 'models={"stranger"', "--judge")
        )
        assert route.judges.failure is not None


async def test_keyless_judge_calls_need_a_stack_wide_judge(
    policy: Upstream, http: aiohttp.ClientSession
) -> None:
    async with Gateway(judges={"judge": policy.endpoint()}) as gateway:
        route = gateway.open(policy.endpoint())
        ports = [await gateway.port_for(name) for name in ("judge", "other")]
        urls = [f"http://127.0.0.1:{port}/v1/chat/completions" for port in [*ports, gateway.port]]
        assert [(await post(http, url))[0] for url in urls] == [200, 404, 401]
        assert (dict(gateway.keyless.counts), route.calls) == ({"judge": 1}, [])
        message = (await post(http, urls[1]))[1]["error"]["message"]
        assert "'other'" in message
        assert 'models={"other"' in message
        keyed = f"http://127.0.0.1:{ports[0]}/ng-rollout/{route.key}/v1/chat/completions"
        assert (await post(http, keyed))[0] == 200
        assert [call.model_server for call in route.calls] == ["judge"]


async def test_ports_are_made_once_and_a_bad_endpoint_is_refused_at_open(gateway: Gateway) -> None:
    ports = await asyncio.gather(*(gateway.port_for("judge") for _ in range(5)))
    assert len(set(ports)) == 1
    assert gateway.port not in ports
    with pytest.raises(ConfigError, match="'http://:1"):
        gateway.open(Upstream(url="http://:1").endpoint())


async def test_without_bodies_the_numbers_stay(
    gateway: Gateway, policy: Upstream, http: aiohttp.ClientSession
) -> None:
    route = gateway.open(policy.endpoint(), record_bodies=False)
    await post(http, f"{route.base_url}/chat/completions")
    [call] = route.calls
    assert (call.request, call.response, call.usage.output_tokens) == (None, None, 2)
    assert (call.finish_reason, call.status_code) == ("stop", 200)
    assert call.duration_s > 0


async def test_200_calls_over_50_routes_keep_their_credentials(gateway: Gateway) -> None:
    async def script(seen: Seen) -> aiohttp.web.Response:
        said = seen.headers["Authorization"].removeprefix("Bearer ")
        return aiohttp.web.json_response(chat_answer(f"{said} {seen.body['messages'][0]['content']}"))

    async with upstream(script) as policy, aiohttp.ClientSession() as http:
        routes = [
            gateway.open(policy.endpoint(api_key=f"secret{n}"), judges={"j": "policy"}) for n in range(50)
        ]
        judge_port = await gateway.port_for("j")

        async def ask(number: int, route: Route, turn: int) -> None:
            port = judge_port if turn == 3 else gateway.port
            url = f"http://127.0.0.1:{port}/ng-rollout/{route.key}/v1/chat/completions"
            body = {"messages": [{"role": "user", "content": f"{number}/{turn}"}]}
            status, answer = await post(http, url, body)
            said = answer["choices"][0]["message"]["content"]
            assert (status, said) == (200, f"secret{number} {number}/{turn}")

        async with asyncio.TaskGroup() as group:
            for number, route in enumerate(routes):
                for turn in range(4):
                    group.create_task(ask(number, route, turn))
        assert [len(route.calls) for route in routes] == [4] * 50
        assert all([call.model_server for call in route.calls].count("j") == 1 for route in routes)


@pytest.mark.parametrize("entry", ["key", "url"])
async def test_a_conversation_with_its_key_in_the_body_is_parsed_once(
    entry: str,
    gateway: Gateway,
    policy: Upstream,
    http: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As that of any rollout: what was sent before is left out of the next request before it is parsed."""
    parsed: list[int] = []
    parse = codec.parse_bounded
    monkeypatch.setattr(
        conversations.codec,
        "parse_bounded",
        lambda data, **settings: parsed.append(len(data)) or parse(data, **settings),
    )
    route = gateway.open(policy.endpoint(), metadata_routing=True)
    metadata = {METADATA_KEY: route.key if entry == "key" else route.base_url}
    history: list[dict[str, str]] = []
    for turn in range(6):
        history.append({"role": "user", "content": f"{turn} " + "x" * 20_000})
        body = {"model": "m", "messages": history, "metadata": metadata}
        parsed.clear()
        assert (await post(http, f"{gateway.url}/v1/chat/completions", body))[0] == 200
        assert max(parsed) < 50_000 or turn < 2
    assert [call.request["messages"] for call in route.calls if call.request] == [
        history[: turn + 1] for turn in range(6)
    ]
    assert METADATA_KEY.encode() not in policy.seen[-1].raw
