"""A stack that `serve-stack` serves over TLS: rollouts from another process, and what callers cannot do."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import json
import os
import select
import signal
import socket
import ssl
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from gymgate.core.config import (
    CallableEndpoint,
    EnvironmentConfig,
    HTTPEndpoint,
    ReplayEndpoint,
    StackConfig,
    StackServer,
)
from gymgate.core.errors import ConfigError, DataError, GymgateError, StackLostError
from gymgate.stack import Stack, SyncStack, acquire, acquire_sync, connect, network, stack_server
from gymgate.stack.client import Lease
from gymgate.stack.network import connect_to
from gymgate.stack.protocol import PROTOCOL, _frame
from gymgate.stack.stack_server import MAX_FRAME, serve_stack
from gymgate.stack.wire import endpoint_to_wire
from support.stacks import ROW, SESSIONS, SIMPLE, all_gone, call_then_answer, pids_of, stack_config
from support.upstream import MODELS, Seen, Upstream, upstream
from support.vanishing import vanish

pytestmark = [pytest.mark.gym, pytest.mark.warm]

TOKEN = "canary-token-0123456789"
COMMAND = [sys.executable, "-m", "gymgate", "serve-stack"]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of 127.0.0.1 that signs itself, with its key in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "stack")])
    now = datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    plain = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = tmp_path_factory.mktemp("tls") / "stack.pem"
    path.write_bytes(plain + signed.public_bytes(serialization.Encoding.PEM))
    return path


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STACK_TOKEN", TOKEN)


@pytest.fixture(scope="module")
def held() -> Iterator[SyncStack]:
    """A lease for the module, so that each server joins a stack that is up."""
    with acquire_sync(stack_config()) as stack:
        yield stack


@asynccontextmanager
async def served(certificate: Path | None, **fields: Any) -> AsyncIterator[StackServer]:
    """The stack of `held`, or another if it differs in `fields`, served by this process."""
    context = None
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
    ready = asyncio.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        work = serve_stack(stack_config(**fields), listener, TOKEN, context, ready.set, print)
        serving = asyncio.create_task(work)
        await ready.wait()
        scheme = "gymgate" if certificate is None else "gymgates"
        try:
            yield StackServer(f"{scheme}://127.0.0.1:{port}", certificates=certificate and str(certificate))
        finally:
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving


@pytest.fixture
async def server(held: SyncStack, certificate: Path) -> AsyncIterator[StackServer]:
    async with served(certificate) as where:
        yield where


@pytest.fixture
async def policy() -> AsyncIterator[Upstream]:
    async def script(seen: Seen) -> web.Response:
        asked_for_models = seen.path.endswith("/models")
        return web.json_response(MODELS if asked_for_models else call_then_answer(seen.body))

    async with upstream(script) as serving:
        yield serving


@pytest.fixture
async def slow() -> AsyncIterator[Upstream]:
    """A policy that never answers."""

    async def script(seen: Seen) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async with upstream(script) as serving:
        yield serving


def endpoint(policy: Upstream, **fields: Any) -> HTTPEndpoint:
    return policy.endpoint(dialect="responses", **fields)


def address(server: StackServer) -> tuple[str, int]:
    host, _, port = server.url.partition("://")[2].partition(":")
    return host, int(port)


def asking(*environments: str | EnvironmentConfig, **fields: Any) -> StackConfig:
    return StackConfig(environments=environments or (SIMPLE,), **fields)


@pytest.mark.parametrize("encrypted", [True, False])
async def test_rollouts_run_on_it(
    held: SyncStack, certificate: Path, policy: Upstream, encrypted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are scored and recorded as on a stack of this machine, with the caller's own key."""
    monkeypatch.setenv("POLICY_KEY", "sk-caller")
    async with (
        served(certificate if encrypted else None) as where,
        acquire(asking(share="machine"), where=where) as stack,
    ):
        chosen = endpoint(policy, api_key_env="POLICY_KEY")
        rollouts = await asyncio.gather(
            *(stack.run(ROW, policy=chosen, record_bodies=True) for _ in range(8))
        )
        status = await stack.status()
    assert [rollout.error for rollout in rollouts] == [None] * 8
    assert [rollout.reward for rollout in rollouts] == [1.0] * 8
    assert all(len(rollout.policy_calls) == 2 for rollout in rollouts)
    assert {seen.headers["Authorization"] for seen in policy.seen} == {"Bearer sk-caller"}
    assert status["rollouts"] == 0


async def test_a_large_row_passes(server: StackServer, policy: Upstream) -> None:
    text = "x" * (20 << 20)
    params = {**ROW["responses_create_params"], "input": [{"role": "user", "content": text}]}
    async with acquire(asking(server=server)) as stack:
        rollout = await stack.run({"responses_create_params": params}, policy=endpoint(policy))
    assert (rollout.error, rollout.reward) == (None, 1.0)
    assert policy.seen[0].body["input"][0]["content"] == text


@pytest.mark.parametrize("sent", ["wrong-token-0123456789", "x", TOKEN[:-1], "y" * 5000, ""])
async def test_without_the_token_there_is_one_answer(
    server: StackServer, certificate: Path, sent: str
) -> None:
    """A wrong, short, long or empty one: the same bytes, then the end."""
    context = ssl.create_default_context(cafile=certificate)
    reader, writer = await asyncio.open_connection(*address(server), ssl=context)
    for number, (method, said) in enumerate({"enter": {"nonce": "n"}, "prove": {"proof": sent}}.items(), 1):
        writer.writelines(_frame({"id": number, "call": method, "with": said}))
    answers = await reader.read()
    refused = b'{"id":2,"error":{"error":"ConfigError","message":"refused"}}'
    assert answers.endswith(struct.pack("<II", len(refused), 0) + refused)
    writer.close()
    await writer.wait_closed()


async def test_what_is_no_frame_ends_the_connection(server: StackServer, certificate: Path) -> None:
    context = ssl.create_default_context(cafile=certificate)
    reader, writer = await asyncio.open_connection(*address(server), ssl=context)
    writer.write(b"GET / HTTP/1.1\r\n" + b"\0" * 100)
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""
    writer.transport.abort()


async def test_a_message_that_is_too_long_is_not_waited_for(server: StackServer) -> None:
    """Up to 4 GiB of it would be kept in memory until its end."""
    async with connection(server) as lease, asyncio.timeout(30):
        lease.peer._send((struct.pack("<II", 100, MAX_FRAME - 99),))
        await lease.peer.lost.wait()


async def test_a_wrong_token_is_one_line(server: StackServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STACK_TOKEN", "wrong-token-0123456789")
    with pytest.raises(ConfigError, match="refused the token in 'STACK_TOKEN'") as raised:
        await connect_to(server)
    assert "wrong-token" not in str(raised.value)
    monkeypatch.delenv("STACK_TOKEN")
    with pytest.raises(ConfigError, match="'STACK_TOKEN' is not set"):
        await connect_to(server)


async def test_a_caller_that_does_not_begin_tls_is_dropped(
    server: StackServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack_server, "HANDSHAKE_S", 0.2)
    reader, writer = await asyncio.open_connection(*address(server))
    async with asyncio.timeout(30):
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
    writer.transport.abort()


async def test_a_certificate_that_is_not_trusted(server: StackServer) -> None:
    """Nor one of another name; nor a server that does not speak TLS, or only that."""
    strange = server.model_copy(update={"certificates": None})
    with pytest.raises(ConfigError, match="is not trusted: self-signed certificate"):
        await connect_to(strange)
    named = server.model_copy(update={"url": server.url.replace("127.0.0.1", "localhost")})
    with pytest.raises(ConfigError, match=r"is not trusted: .*localhost"):
        await connect_to(named)
    plain = server.model_copy(update={"url": server.url.replace("gymgates", "gymgate")})
    with pytest.raises(StackLostError, match="closed the connection"):
        await connect_to(plain)


async def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(StackLostError, match=f"cannot reach the stack at gymgates://127.0.0.1:{port}"):
        await connect_to(StackServer(f"gymgates://127.0.0.1:{port}"))


async def test_the_server_decides_all_other_settings(server: StackServer) -> None:
    refused = {
        "runtime": asking(runtime={"interpreter": "/bin/sh"}, server=server),
        "models": asking(models={"*": ReplayEndpoint(rollouts=("/etc/passwd",))}, server=server),
        "env_vars": asking(env_vars=("STACK_TOKEN",), server=server),
        "overrides": asking(EnvironmentConfig(name=SIMPLE, overrides={"a.b": 1}), server=server),
        SESSIONS: asking(SESSIONS, server=server),
    }
    for what, config in refused.items():
        with pytest.raises(ConfigError, match=what) as raised:
            async with acquire(config):
                pass
        assert "\n" not in str(raised.value)


@asynccontextmanager
async def connection(server: StackServer, config: dict[str, Any] | None = None) -> AsyncIterator[Lease]:
    """A lease without this package's own checks."""
    lease, _ = await connect_to(server)
    try:
        config = config or {"environments": [{"name": SIMPLE}]}
        await lease.peer.call("hello", protocol=PROTOCOL, config=config)
        yield lease
    finally:
        lease.peer.abort()


async def test_a_hello_with_settings_is_refused_there_too(server: StackServer) -> None:
    recordings = {"*": {"type": "replay", "rollouts": ["/etc/passwd"]}}
    with pytest.raises(ConfigError, match="models"):
        async with connection(server, {"environments": [{"name": SIMPLE}], "models": recordings}):
            pass
    with pytest.raises(ConfigError, match="environments"):
        async with connection(server, {"environments": 5}):
            pass
    lease, _ = await connect_to(server)
    with pytest.raises(StackLostError, match="protocol"):
        await lease.peer.call("hello", protocol=PROTOCOL + 1, config={})
    lease.peer.abort()


async def test_a_rollout_reaches_no_file_and_no_variable(
    server: StackServer, policy: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret.jsonl"
    secret.write_text('{"canary": 1}\n')
    good = {
        "policy": endpoint_to_wire(endpoint(policy)),
        "judge_policy": None,
        "limits": {"timeout_s": 30.0, "max_calls": 5},
        "rollout_id": "r",
        "record_bodies": False,
        "environment": None,
        "agent": None,
    }
    monkeypatch.setenv("SERVERS_SECRET", "canary")
    http = {"type": "http", "base_url": policy.url, "dialect": "responses"}
    replay = endpoint_to_wire(ReplayEndpoint(rollouts=(str(secret),)))
    row = b'{"responses_create_params": {"input": "hi"}}'
    wrong: list[tuple[dict[str, Any], bytes, type[GymgateError], str]] = [
        ({"policy": replay}, row, ConfigError, "HTTP endpoints only"),
        ({"judge_policy": replay}, row, ConfigError, "HTTP endpoints only"),
        ({"policy": {"type": "callable", "name": "x"}}, row, ConfigError, "HTTP endpoints only"),
        ({"policy": "none"}, row, ConfigError, "HTTP endpoints only"),
        ({"policy": {**http, "api_key_env": "SERVERS_SECRET"}}, row, ConfigError, "api_key_env"),
        ({"judge_policy": {**http, "api_key_env": "SERVERS_SECRET"}}, row, ConfigError, "api_key_env"),
        ({"policy": {**http, "base_url": "file:///etc/passwd"}}, row, ConfigError, "not a URL"),
        ({"limits": {"timeout_s": -1}}, row, ConfigError, "timeout_s"),
        ({"rollout_id": "a\nb"}, row, ConfigError, "rollout_id"),
        ({"agent": 7}, row, ConfigError, "agent"),
        ({"extra": 7}, row, ConfigError, "extra"),
        ({"environment": SESSIONS}, row, ConfigError, "not in this stack"),
        ({}, b"[]", DataError, "row"),
        ({}, b'{"responses_create_params": {"input": 1}}x', DataError, "row"),
    ]
    async with connection(server) as lease:
        for change, body, kind, reason in wrong:
            with pytest.raises(kind, match=reason) as raised:
                await lease.peer.exchange("run", {**good, **change}, body)
            assert "\n" not in str(raised.value)
        with pytest.raises(GymgateError):
            await lease.peer.call("policy", name="x")
        assert (await lease.peer.exchange("run", good, row)).body
    assert "canary" not in "".join(f"{seen.headers}{seen.raw!r}" for seen in policy.seen)


async def test_a_callers_policy_is_no_port_of_the_stack(server: StackServer) -> None:
    """Neither the gateway's nor a server's: a caller without a key of its own could speak there as another one."""
    async with acquire(asking(server=server)) as stack:
        status = await stack.status()
        servers = status["environments"][SIMPLE.rpartition("/")[2]]["servers"].values()
        gateway = int(stack.gateway_url.rpartition(":")[2])
        for port in (gateway, *(each["port"] for each in servers)):
            policy = HTTPEndpoint(base_url=f"http://localhost:{port}/v1", model="m")
            with pytest.raises(ConfigError, match=str(port)):
                await stack.run(ROW, policy=policy)


async def test_a_callable_is_one_line(server: StackServer) -> None:
    async with acquire(asking(server=server)) as stack:
        with pytest.raises(ConfigError, match="HTTP endpoints only"):
            await stack.run(ROW, policy=call_then_answer)
        with pytest.raises(ConfigError, match="HTTP endpoints only"):
            await stack.run(ROW, policy=CallableEndpoint(name="x"))


async def idle(held: SyncStack) -> None:
    """Return when no rollout is left on the served stack."""
    while (await asyncio.to_thread(held.call, held.stack.status()))["rollouts"]:  # noqa: ASYNC110
        await asyncio.sleep(0.05)


class Wire:
    """A TCP relay between a caller and the server, which can be cut."""

    def __init__(self, server: StackServer) -> None:
        self.server = server
        self.writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*address(self.server))
        self.writers += [writer, back]
        self._tasks += [asyncio.create_task(self._carry(*pair)) for pair in ((reader, back), (there, writer))]

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)

    def cut(self) -> None:
        for writer in self.writers:
            writer.transport.abort()

    async def close(self) -> None:
        self.cut()
        await asyncio.gather(*self._tasks)


@asynccontextmanager
async def reconnecting(where: StackServer) -> AsyncIterator[Stack]:
    stack = await connect(asking(), where=where, reconnect=True)
    try:
        yield stack
    finally:
        await stack.close()


async def test_a_cut_mid_rollout_leaves_no_orphan(
    server: StackServer, held: SyncStack, slow: Upstream, policy: Upstream
) -> None:
    wire = Wire(server)
    async with await asyncio.start_server(wire, "127.0.0.1", 0) as relay:
        port = relay.sockets[0].getsockname()[1]
        where = server.model_copy(update={"url": f"gymgates://127.0.0.1:{port}"})
        async with reconnecting(where) as stack:
            running = asyncio.create_task(stack.run(ROW, policy=endpoint(slow)))
            await slow.arrivals(1)
            wire.cut()
            with pytest.raises(StackLostError, match=r"connection to the stack at gymgates://.* is lost"):
                await running
            async with asyncio.timeout(10):
                await idle(held)
            assert (await stack.run(ROW, policy=endpoint(policy))).reward == 1.0
        await wire.close()


async def test_a_caller_that_vanishes_leaves_no_orphan(
    server: StackServer, held: SyncStack, slow: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine says nothing any more: the kernel's keepalive ends the connection."""
    monkeypatch.setattr(network, "SILENT_S", 3)
    async with acquire(asking(), where=server) as stack:
        running = asyncio.create_task(stack.run(ROW, policy=endpoint(slow)))
        await slow.arrivals(1)
        sock = stack._last.peer.sock
        assert sock is not None
        vanish(sock)
        async with asyncio.timeout(30):
            await idle(held)
        stack._last.peer.abort()
        with pytest.raises(StackLostError):
            await running


async def test_cancelling_and_closing_end_rollouts_there(
    server: StackServer, held: SyncStack, slow: Upstream
) -> None:
    async with acquire(asking(), where=server) as stack:
        running = asyncio.create_task(stack.run(ROW, policy=endpoint(slow)))
        await slow.arrivals(1)
        running.cancel()
        async with asyncio.timeout(10):
            await idle(held)
        running = asyncio.create_task(stack.run(ROW, policy=endpoint(slow)))
        await slow.arrivals(2)
    with pytest.raises(StackLostError):
        await running
    async with asyncio.timeout(10):
        await idle(held)


async def test_a_stack_that_died_there_starts_again(slow: Upstream, policy: Upstream) -> None:
    async with (
        served(None, start_timeout_s=299) as where,
        acquire(asking(), where=where) as stack,
    ):
        before = pids_of(await stack.status())
        running = asyncio.create_task(stack.run(ROW, policy=endpoint(slow)))
        await slow.arrivals(1)
        os.kill(before[0], signal.SIGKILL)
        with pytest.raises(StackLostError):
            await running
        assert (await stack.run(ROW, policy=endpoint(policy))).reward == 1.0
        after = pids_of(await stack.status())
        assert before[0] != after[0]
    assert await all_gone({*before, *after})


@contextmanager
def command(*arguments: str, **variables: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The URL that the command prints, and its process, which a signal ends."""
    process = subprocess.Popen(
        [*COMMAND, SIMPLE, *arguments, "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **variables},
    )
    assert process.stdout is not None
    try:
        ready, _, _ = select.select([process.stdout], [], [], 100)
        assert ready, "no address"
        yield process.stdout.readline().strip(), process
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 130
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()


async def test_the_command_serves_until_a_signal(certificate: Path, policy: Upstream, slow: Upstream) -> None:
    """Its end is a lost stack for the caller, and leaves no process."""
    with command("--certificate", str(certificate), "--key", str(certificate)) as (url, process):
        assert url.startswith("gymgates://127.0.0.1:")
        where = StackServer(url, certificates=str(certificate))
        async with acquire(asking(), where=where) as stack:
            assert (await stack.run(ROW, policy=endpoint(policy))).reward == 1.0
            pids = pids_of(await stack.status())
            running = asyncio.create_task(stack.run(ROW, policy=endpoint(slow)))
            await slow.arrivals(1)
            process.send_signal(signal.SIGTERM)
            with pytest.raises(StackLostError):
                await running
            await asyncio.to_thread(process.wait, 30)
    assert await all_gone(pids)
    assert TOKEN not in "".join(f"{seen.headers}{seen.raw!r}" for seen in policy.seen)


async def test_the_documented_program_runs(server: StackServer, certificate: Path, policy: Upstream) -> None:
    page = (Path(__file__).parents[2] / "docs/other-machines.md").read_text()
    program = page.partition("```python\n")[2].partition("```")[0]
    places = {
        "gymgates://stacks:7411": server.url,
        "cert.pem": str(certificate),
        'http://gpu:8000/v1"': f'{policy.url}", dialect="responses"',
        '"mcqa"': repr(SIMPLE),
    }
    for documented, here in places.items():
        assert documented in program
        program = program.replace(documented, here)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", "-c", program, stdout=subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert (process.returncode, out) == (0, b"completed 1.0\n")


async def test_a_run_takes_it_from_its_spec(server: StackServer, policy: Upstream, tmp_path: Path) -> None:
    spec = tmp_path / "run.toml"
    spec.write_text(f'[stack.server]\nurl = "{server.url}"\ncertificates = "{server.certificates}"\n')
    arguments = ["run", SIMPLE, "--spec", str(spec), "-b", policy.url, "-m", "m", "--dialect", "responses"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gymgate", *arguments, "-n", "2", "--json", stdout=subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    assert json.loads(out)["finished"] == 2


@pytest.mark.parametrize(
    ("arguments", "variables", "reason"),
    [
        ([], {"STACK_TOKEN": ""}, "'STACK_TOKEN' is not set"),
        ([], {"STACK_TOKEN": "short"}, "16"),
        (["--host", "0.0.0.0"], {}, "needs TLS"),
        (["--stack-token-var", "NOPE"], {}, "'NOPE'"),
        (["--host", "0.0.0.0", "--key", "x"], {}, "--certificate"),
        (["--key", "x"], {}, "--certificate"),
        (["--certificate", "/nonexistent"], {}, "/nonexistent"),
    ],
)
def test_the_command_refuses(arguments: list[str], variables: dict[str, str], reason: str) -> None:
    done = subprocess.run(
        [*COMMAND, SIMPLE, *arguments, "--port", "0"],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert reason in done.stderr
    assert len(done.stderr.splitlines()) == 1
