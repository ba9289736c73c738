"""`gymgate serve`: a policy made of recordings, for any client, as a process, in a thread and on this loop."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import openai
import pytest

from gymgate.core.errors import ConfigError, DataError
from gymgate.runs.collected.replay_server import ReplayServer, serve_replay

QUESTION = "what is the weather?"
CALL = {
    "type": "function_call",
    "id": "fc_1",
    "call_id": "call_1",
    "name": "get_weather",
    "arguments": '{"city": "Oslo"}',
    "status": "completed",
}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": '{"sky": "grey"}'}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "look it up"}]}
ANSWER = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "It is grey.", "annotations": []}],
}
TOOL = {"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {}}}
ANY_KEY = "0123456789abcdef" * 2


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    response = {
        "id": "resp_1",
        "created_at": 7.0,
        "model": "recorded",
        "output": [REASONING, CALL, OUTPUT, ANSWER],
    }
    other = {**response, "output": [ANSWER]}
    path = tmp_path_factory.mktemp("recorded") / "rollouts.jsonl"
    lines = [
        {"responses_create_params": {"input": QUESTION}, "response": response, "reward": 1.0},
        {"responses_create_params": {"input": "and now?"}, "response": other, "reward": 0.0},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def server(recorded: Path) -> Iterator[ReplayServer]:
    with ReplayServer(files=[recorded]) as running:
        yield running


@pytest.fixture
def client(server: ReplayServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.base_url, api_key=ANY_KEY, max_retries=0) as client:
        yield client


def test_chat(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    first = client.chat.completions.create(model="any", messages=messages)
    (call,) = first.choices[0].message.tool_calls or []
    assert (first.choices[0].finish_reason, call.id) == ("tool_calls", "call_1")
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    messages += [
        first.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": OUTPUT["output"]},
    ]
    second = client.chat.completions.create(model="any", messages=messages)
    assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("It is grey.", "stop")


def test_responses_plain_and_streamed(client: openai.OpenAI) -> None:
    tools: list[Any] = [TOOL]
    first = client.responses.create(model="any", input=QUESTION, tools=tools)
    assert [item.type for item in first.output] == ["reasoning", "function_call"]
    assert (first.created_at, first.model, first.tools[0].type) == (7, "recorded", "function")
    given: Any = [{"role": "user", "content": QUESTION}, *[i.model_dump() for i in first.output], OUTPUT]
    with client.responses.stream(model="any", input=given, tools=tools) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_response().output_text == "It is grey."
    assert {"response.created", "response.output_text.delta", "response.completed"} <= kinds


def test_chat_stream(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "and now?"}]
    chunks = client.chat.completions.create(model="any", messages=messages, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "It is grey."


async def test_messages(server: ReplayServer) -> None:
    body = {"model": "any", "max_tokens": 9, "messages": [{"role": "user", "content": "and now?"}]}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{server.base_url}/messages", json=body, headers={"x-api-key": ANY_KEY}) as answer,
    ):
        assert (answer.status, (await answer.json())["content"][-1]["text"]) == (200, "It is grey.")


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["replay"]


def test_an_unknown_conversation_is_an_error_that_nobody_retries(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "what is the whether?"}]
    with pytest.raises(openai.UnprocessableEntityError, match=r"rollouts\.jsonl:1, .* message 1"):
        client.chat.completions.create(model="any", messages=messages)


async def test_in_process_and_pinned(recorded: Path) -> None:
    async with serve_replay([recorded], index=1) as base_url, aiohttp.ClientSession() as session:
        for text, status in (("and now?", 200), (QUESTION, 422)):
            async with session.post(f"{base_url}/responses", json={"input": text}) as answer:
                assert answer.status == status


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_it_cleanly(recorded: Path, number: signal.Signals) -> None:
    argv = [sys.executable, "-m", "gymgate", "serve", "--replay-file", str(recorded)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(b"http://127.0.0.1:")
        process.send_signal(number)
        assert (process.wait(10), process.stderr.read()) == (130, b"")


def test_close_is_prompt(recorded: Path) -> None:
    with ReplayServer(files=[recorded]) as server:
        address = urlsplit(server.base_url)
        assert address.hostname is not None
        assert address.port is not None
        socket.create_connection((address.hostname, address.port), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address.hostname, address.port), timeout=5)


def test_it_does_not_outlive_a_killed_parent(recorded: Path) -> None:
    program = (
        "import sys; from gymgate.runs.collected.replay_server import ReplayServer\n"
        "with ReplayServer(files=sys.argv[1:]) as server: print(server.base_url, flush=True); sys.stdin.read()"
    )
    argv = [sys.executable, "-c", program, str(recorded)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        address = urlsplit(parent.stdout.readline().decode())
        parent.kill()
        parent.wait()
    assert address.port is not None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", address.port), timeout=5)


async def test_a_taken_port_is_one_line(recorded: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"^port {port} "):
            await serve_replay([recorded], port=port).__aenter__()


def test_bad_recordings_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("<PLACEHOLDER ROW>\n")
    with (
        pytest.raises(DataError, match=r"^[^\n]*bad\.jsonl:1 [^\n]*JSON[^\n]*$"),
        ReplayServer(files=[tmp_path / "bad.jsonl"]) as server,
    ):
        _ = server.base_url


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "environment"),
        (["--replay-file", "x.jsonl", "--index", "-1"], "--index"),
    ],
)
def test_wrong_arguments(args: list[str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gymgate", "serve", *args], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert said in done.stderr
