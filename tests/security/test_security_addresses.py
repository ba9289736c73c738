"""Keys, and user and password of an address: an endpoint repeats them, and nothing that is kept or shown has them."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from gymgate.cli.texts import endpoint_list, parse_judges
from gymgate.core.config import HTTPEndpoint, StackConfig, validation_message
from gymgate.core.errors import PolicyError
from gymgate.core.http_client import HTTPClient
from gymgate.doctor.server_checks import check_servers
from gymgate.gateway.backends.http import HTTPBackend
from gymgate.stack.client.daemons import DaemonProcess
from gymgate.stack.client.launch import DaemonCommand
from gymgate.stack.client.stack import checked_policy
from gymgate.stack.wire import endpoint_from_wire, endpoint_to_wire
from gymgate.tokens.engines.http import VLLMCompletionsEngine
from support.leaky import KEY, KINDS, PASSWORD, SECRETS, SENT, USER, leaky, with_login
from support.upstream import Seen, say_hello, upstream, upstream_in_thread

ENVIRONMENT = "example_single_tool_call"
MODELS = {"one": "", "other": "org/m@", "third": "m@001@"}
"""By judge, its model as it stands before the address."""


def assert_clean(text: str, where: object = "") -> None:
    assert not [secret for secret in SECRETS if secret in text], (where, text[:2000])


def endpoint(url: str, way: str, **fields: object) -> HTTPEndpoint:
    """One that gets its secret by this way."""
    options = {"key": {"api_key": KEY}, "header": {"headers": {"Authorization": f"Token {KEY}"}}}.get(way, {})
    address = with_login(url) if way == "address" else url
    return HTTPEndpoint.model_validate({"base_url": address, "max_retries": 0, **options, **fields})


@pytest.mark.parametrize("way", ["key", "header", "address"])
@pytest.mark.parametrize("kind", KINDS)
async def test_an_error_holds_nothing_that_the_endpoint_was_told(kind: str, way: str) -> None:
    async with upstream(leaky(itertools.repeat(kind))) as serving, HTTPClient() as client:
        backend = HTTPBackend(endpoint(serving.url, way), client)
        with pytest.raises(PolicyError) as raised:
            await backend.call({"model": "m", "messages": []})
        error = raised.value
        assert serving.seen[-1].headers["Authorization"].split()[-1] in (KEY, SENT)
        assert_clean(f"{error} {error!r} {error.args} {vars(error)} {backend!r}", kind)


async def test_what_an_endpoint_answers_well_is_its_own_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """A placeholder of a key may be a word that a model says."""
    async with upstream(say_hello) as serving, HTTPClient() as client:
        backend = HTTPBackend(endpoint(serving.url, "key", api_key="hello-hello"), client)
        answer = await backend.call({"model": "m", "messages": [], "note": "hello-hello"})
        assert answer.body["choices"][0]["message"]["content"] == "hello"


def test_an_address_shows_itself_without_user_and_password() -> None:
    made = HTTPEndpoint(
        base_url=with_login("http://a/v1"), replicas=(with_login("http://b/v1/"), "http://c/v1")
    )
    assert made.base_urls == ("http://a/v1", "http://b/v1", "http://c/v1")
    shown = f"{made} {made!r} {made.model_dump()} {made.model_dump_json()}"
    assert_clean(shown)
    assert USER not in shown
    again = endpoint_from_wire(endpoint_to_wire(made))
    assert again == made
    assert [secret.get_secret_value() for _, secret in again.logins] == [f"{USER}:{PASSWORD}"] * 2


@pytest.mark.parametrize(
    "url",
    [
        *("ftp://{0}:{1}@host/v1", "http://{0}:{1}@", "http:/{0}:{1}@host/v1", "{0}:{1}@host:8000/v1"),
        *(f"http://{{0}}:pass{mark}{{1}}@host/v1" for mark in "/?# \t"),
    ],
)
def test_an_address_that_is_refused_is_not_shown_with_its_password(url: str) -> None:
    with pytest.raises(ValidationError) as raised:
        HTTPEndpoint(base_url=url.format(USER, "password-canary"))
    assert "password-canary" not in validation_message(raised.value)


@pytest.mark.parametrize(
    "refused",
    [
        lambda: HTTPEndpoint(base_url=f"ftp://{USER}:{PASSWORD}@host"),
        lambda: HTTPEndpoint(base_url="http://h/v1", replicas=with_login("http://a/v1")),  # type: ignore[arg-type]
        lambda: HTTPEndpoint(base_url="http://h/v1", headers={"Authorization": [KEY]}),  # type: ignore[arg-type]
        lambda: HTTPEndpoint(base_url="http://h/v1", api_key=[KEY]),  # type: ignore[arg-type]
        lambda: StackConfig(environments="mcqa", models={"judge": with_login("http://a/v1")}),  # type: ignore[arg-type]
        lambda: checked_policy(with_login("http://a/v1")),
        lambda: endpoint_list(with_login("ftp://a/v1")),
        lambda: endpoint_list(f"{USER}:{PASSWORD}@a/v1,http://b/v1"),
        lambda: endpoint_list(f"{with_login('http://a/v1')},{with_login('http://a/v1')}"),
        lambda: parse_judges([with_login("http://a/v1")]),
        lambda: parse_judges([f"judge={with_login('ftp://a/v1')}"]),
        lambda: parse_judges([f"judge=m@{USER}:{PASSWORD}@a/v1"]),
    ],
)
def test_what_a_config_refuses_is_not_shown(refused: Callable[[], object]) -> None:
    """Python shows an error as it is: `str()` of pydantic's repeats the value unless told otherwise."""
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        refused()
    assert_clean(f"{raised.value} {raised.value!r}")


def test_a_judge_may_have_a_login_and_a_model() -> None:
    judges = parse_judges([f"{name}={model}{with_login('http://a/v1')}" for name, model in MODELS.items()])
    for name, model in MODELS.items():
        judge = judges[name]
        assert isinstance(judge, HTTPEndpoint)
        assert (judge.base_url, judge.model) == ("http://a/v1", model.removesuffix("@") or None)
        [(_, login)] = judge.logins
        assert login.get_secret_value() == f"{USER}:{PASSWORD}"


async def test_the_doctor_shows_no_login() -> None:
    async with upstream(say_hello) as serving:
        findings, _ = await check_servers(
            [with_login(serving.url), with_login("http://127.0.0.1:9/v1")], "tokens"
        )
    assert len(findings) == 2
    assert_clean(str(findings))
    assert USER not in str(findings)


def test_the_list_of_stacks_shows_no_login_of_a_command(tmp_path: Path) -> None:
    program = [sys.executable, "-c", "input()", "-b", with_login("http://a/v1")]
    with subprocess.Popen(program, stdin=subprocess.PIPE) as owner:
        command = DaemonCommand(3, tmp_path / "x.sock", tmp_path, tmp_path, owner.pid)
        words = DaemonProcess(os.getpid(), 1 << 60, command).owner_command
        owner.communicate(b"\n")
    assert words is not None
    assert words[-1] == "http://a/v1"


@pytest.mark.parametrize("url", ["http://host:8000/models/m@001/v1", "https://[::1]:8000/v1?at=@"])
def test_an_address_may_have_an_at_sign_elsewhere(url: str) -> None:
    assert HTTPEndpoint(base_url=url).base_url == url


async def test_each_replica_gets_its_own_login() -> None:
    told: dict[str, str] = {}

    async def script(seen: Seen) -> object:
        told[seen.headers["Host"]] = seen.headers.get("Authorization", "")
        return await say_hello(seen)

    async with upstream(script) as one, upstream(script) as other, HTTPClient() as client:
        both = HTTPEndpoint(base_url=with_login(one.url), replicas=(other.url,))
        for url in both.base_urls:
            alone = both.model_copy(update={"base_url": url, "replicas": ()})
            await HTTPBackend(alone, client).call({"model": "m", "messages": []})
    assert sorted(told.values()) == ["", f"Basic {SENT}"]


async def test_an_engine_shows_no_login() -> None:
    engine = VLLMCompletionsEngine(with_login("http://127.0.0.1:9/v1"))
    with pytest.raises(PolicyError) as raised:
        await engine.generate([1], {}, session="s")
    assert_clean(f"{raised.value} {raised.value.endpoint}")


def gymgate(*words: str, home: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "gymgate", *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=home,
    )
    return done.stdout + done.stderr


@pytest.mark.gym
@pytest.mark.parametrize("way", ["key", "address"])
def test_a_run_keeps_and_shows_nothing_that_its_endpoint_was_told(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files, tables, reports, exports and logs of a run whose endpoint repeats its secret in every second answer."""
    monkeypatch.setenv("CANARY_KEY", KEY)
    kinds = itertools.chain.from_iterable((kind, "fine") for kind in itertools.cycle(KINDS))
    with upstream_in_thread(leaky(kinds)) as one, upstream_in_thread(leaky(kinds)) as other:
        urls = [with_login(server.url) if way == "address" else server.url for server in (one, other)]
        policy = ["-b", ",".join(urls), "-m", "m", "--max-retries", "0", "--bodies", "--show"]
        policy += ["--api-key-var", "CANARY_KEY"] if way == "key" else []
        run = str(tmp_path / "run")
        limits = [
            "-n",
            "4",
            "-r",
            "8",
            "-c",
            "2",
            "--retries",
            "0",
            "--timeout",
            "60",
            "--stop-after-failures",
            "0",
        ]
        shown = [gymgate("run", ENVIRONMENT, *policy, *limits, "-o", run, home=tmp_path)]
    assert "bad" in shown[0], shown[0]
    shown += [gymgate("aggregate", run, home=tmp_path)]
    shown += [gymgate("report", run, "-o", str(tmp_path / "report.html"), home=tmp_path)]
    for to in ("atif", "dataset", "gym", "jsonl", "rows", "traces"):
        suffix = "" if to == "atif" else ".csv" if to == "dataset" else ".jsonl"
        shown += [gymgate("export", run, "--to", to, "-o", str(tmp_path / f"{to}{suffix}"), home=tmp_path)]
    for text in shown:
        assert_clean(text)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"rollouts.jsonl", "failures.jsonl", "report.html"} <= {path.name for path in files}
    for path in files:
        assert_clean(path.read_text(errors="replace"), path)
