"""An endpoint behind a company's network: a private CA, headers that it wants, and what the messages say."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from gymgate.core import http_client
from gymgate.core.config import HTTPEndpoint, StackConfig
from gymgate.core.errors import ConfigError
from gymgate.core.http_client import HTTPClient
from gymgate.core.json_server import probe
from gymgate.runs.collected.policies import ask_models
from gymgate.stack.description import served_models
from support.upstream import Seen, upstream

MODELS = {"data": [{"id": "m"}]}


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """None that names certificates, and none remembered."""
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    http_client._tls.cache_clear()
    yield
    http_client._tls.cache_clear()


def certificate(directory: Path, host: str = "127.0.0.1") -> tuple[Path, Path]:
    """Files of a certificate that signs itself, as a private CA does, and of its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a company")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    files = directory / "ca.pem", directory / "key.pem"
    files[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    files[1].write_bytes(key.private_bytes(encoding, form, serialization.NoEncryption()))
    return files


@asynccontextmanager
async def serving(files: tuple[Path, Path]) -> AsyncIterator[str]:
    """The base URL of an endpoint with that certificate, which serves one model."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*files)
    application = web.Application()

    async def models(request: web.Request) -> web.Response:
        return web.json_response(MODELS)

    application.router.add_get("/v1/models", models)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    try:
        yield f"https://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


async def ask(url: str, **fields: object) -> HTTPEndpoint:
    endpoint = HTTPEndpoint.model_validate({"base_url": url, **fields})
    policy = (await ask_models(StackConfig(environments=("mcqa",)), endpoint, 0, print))[1]
    assert isinstance(policy, HTTPEndpoint)
    return policy


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"])
async def test_a_private_ca_is_trusted_where_a_variable_names_it(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = certificate(tmp_path)
    (tmp_path / "other").mkdir()
    other = str(certificate(tmp_path / "other")[0])
    monkeypatch.setenv("SSL_CERT_FILE", other)
    async with serving(files) as url:
        http_client._tls.cache_clear()
        with pytest.raises(ConfigError, match=f"SSL_CERT_FILE, .*{other}") as refused:
            await ask(url)
        assert "its certificate is not trusted: self-signed certificate" in str(refused.value)
        async with HTTPClient() as client:
            with pytest.raises(ConfigError, match="not trusted") as refused:
                await probe(f"{url}/models".replace("//", "//user:hunter-2@", 1), client)
        assert "hunter-2" not in str(refused.value)
        monkeypatch.delenv("SSL_CERT_FILE")
        monkeypatch.setenv(variable, str(files[0]))
        http_client._tls.cache_clear()
        assert (await ask(url)).model == "m"


async def test_a_certificate_of_another_host_is_not_said_to_lack_a_ca(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = certificate(tmp_path, "127.0.0.2")
    monkeypatch.setenv("SSL_CERT_FILE", str(files[0]))
    async with serving(files) as url:
        with pytest.raises(ConfigError, match=r"not trusted: .*127\.0\.0\.1.*$") as refused:
            await ask(url)
    assert "SSL_CERT_FILE" not in str(refused.value)


@pytest.mark.parametrize("content", [None, "", "no certificate"])
async def test_a_file_without_certificates_is_named(
    content: str | None,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv("SSL_CERT_FILE", str(path))
    async with serving(certificate(tmp_path_factory.mktemp("tls"))) as url:
        with pytest.raises(ConfigError, match=f"SSL_CERT_FILE={path} holds no certificates"):
            await ask(url)


@pytest.mark.parametrize("status", [401, 403])
async def test_an_endpoint_says_itself_why_it_refuses(status: int) -> None:
    """For example a header that a company's proxy wants; the key that it repeats stays hidden."""

    async def script(seen: Seen) -> web.Response:
        return web.json_response(
            {"error": {"message": "missing header X-Team; key 0123456789"}}, status=status
        )

    async with upstream(script) as api:
        with pytest.raises(ConfigError) as refused:
            await ask(api.url, api_key="0123456789")
    assert str(refused.value).endswith(": missing header X-Team; key ***")


async def test_each_replica_of_a_judge_is_asked_with_its_own_login() -> None:
    async def list_models(seen: Seen) -> web.Response:
        return web.json_response(MODELS)

    async with upstream(list_models) as first, upstream(list_models) as second:
        urls = [api.url.replace("//", f"//{name}:of-{name}@") for api, name in ((first, "a"), (second, "b"))]
        judge = HTTPEndpoint(base_url=urls[0], replicas=(urls[1],))
        models = await served_models(StackConfig(environments=("mcqa",), models={"judge": judge}))
    assert models == {"judge": "m"}
    for name, api in (("a", first), ("b", second)):
        [seen] = api.seen
        assert (
            base64.b64decode(seen.headers["Authorization"].removeprefix("Basic "))
            == f"{name}:of-{name}".encode()
        )
