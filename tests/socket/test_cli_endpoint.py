"""The policy's endpoint is asked on the command line, and by `gymgate.evaluate`, before anything is installed or started."""

from __future__ import annotations

import asyncio
import http.server
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import gymgate
from gymgate.cli import cli
from gymgate.cli.eval import Line, with_judges
from gymgate.cli.texts import parse_judges
from gymgate.core.config import HTTPEndpoint
from gymgate.core.errors import ConfigError, GymgateError, PolicyError
from gymgate.integrations.eval_options import EvalOptions
from gymgate.integrations.verifiers.evaluation import parse_settings, taskset_of
from gymgate.integrations.verifiers.policy import check_policy
from gymgate.runs.collected.policies import ask_judges

COMMANDS = {
    "run": ("run", "mcqa", "-n", "1", "-o", "{tmp}/run"),
    "eval run": ("eval", "run", "--env", "mcqa"),
    "check": ("check", "mcqa"),
}


@dataclass
class Hosted:
    """A server that behaves like a hosted API: it needs a key, lists its models, and knows one more than it lists."""

    models: tuple[str, ...] = ("m",)
    key: str | None = "good"
    models_status: int = 200
    body: str | None = None
    """In place of the list of models."""
    has_responses: bool = True
    url: str = ""
    seen: list[tuple[str, str, str | None, str | None]] = field(default_factory=list)
    """Method, path, key and header `x-team` of each request."""

    def answer(self, method: str, path: str, key: str | None, body: dict[str, Any]) -> tuple[int, Any]:
        if not path.startswith("/v1/"):
            return 404, {"error": {"message": "no such path"}}
        if self.key is not None and key != f"Bearer {self.key}":
            return 401, {"error": {"message": "wrong key"}}
        if method == "GET":
            return self.models_status, self.body or {"data": [{"id": name} for name in self.models]}
        if path.endswith("/responses") and not self.has_responses:
            return 404, {"detail": "Not Found"}
        if body["model"] not in (*self.models, "unlisted"):
            return 404, {"error": {"message": f"The model {body['model']} does not exist"}}
        message = {"role": "assistant", "content": "x"}
        return 200, {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


@contextmanager
def serving(hosted: Hosted) -> Iterator[Hosted]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            key = self.headers.get("Authorization")
            hosted.seen.append((self.command, self.path, key, self.headers.get("x-team")))
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, value = hosted.answer(self.command, self.path, key, json.loads(raw or b"{}"))
            text = (value if isinstance(value, str) else json.dumps(value)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        hosted.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        try:
            yield hosted
        finally:
            server.shutdown()
            thread.join()


class NothingInstalled(GymgateError):
    """In place of reading the catalog, which installs the release."""


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def catalog(*args: Any, **options: Any) -> None:
        raise NothingInstalled("the endpoint is fine")

    for module in (
        "cli.run_spec",
        "runs.collected.prepare",
        "runs.collected.stream",
        "cli.check",
        "gym.runtime",
    ):
        monkeypatch.setattr(f"gymgate.{module}.open_catalog", catalog)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("GOOD", "good")
    monkeypatch.setenv("BAD", "bad")


def invoke(command: str, tmp: Path, *words: str) -> Result:
    arguments = [word.format(tmp=tmp) for word in COMMANDS[command]]
    return CliRunner().invoke(cli, [*arguments, *words], standalone_mode=False)


def refusal(command: str, tmp: Path, *words: str) -> GymgateError:
    error = invoke(command, tmp, *words).exception
    assert isinstance(error, GymgateError), error
    assert "\n" not in str(error)
    return error


def test_another_dialect_or_scheme_than_the_servers_is_told_before_a_run(tmp_path: Path) -> None:
    with serving(Hosted(key=None, has_responses=False)) as hosted:
        error = refusal("run", tmp_path, "-b", hosted.url, "-m", "m", "--dialect", "responses")
        assert isinstance(error, ConfigError)
        assert "/responses answered 404" in str(error)
        secure = hosted.url.replace("http://", "https://")
        assert "http://" in str(refusal("run", tmp_path, "-b", secure)).partition(secure)[2]


def test_of_two_replicas_the_one_that_lacks_the_path_or_the_model_is_named(tmp_path: Path) -> None:
    """Each is asked itself, and for one token, which is the least that shows it."""
    with serving(Hosted(key=None)) as good, serving(Hosted(key=None, has_responses=False)) as bad:
        urls = f"{good.url},{bad.url}"
        error = refusal("run", tmp_path, "-b", urls, "-m", "m", "--dialect", "responses")
        assert f"{bad.url}/responses answered 404" in str(error)
    with serving(Hosted(key=None)) as good, serving(Hosted(key=None, models=("other",))) as bad:
        error = refusal("run", tmp_path, "-b", f"{good.url},{bad.url}", "-m", "m")
        assert f"{bad.url} has no model 'm'; it serves other" in str(error)
        assert [path for method, path, *_ in bad.seen if method == "POST"] == ["/v1/chat/completions"]


@pytest.mark.parametrize("command", ["run", "eval run", "check"])
def test_a_wrong_address_key_or_model_is_one_line_that_says_which(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(Hosted(models=("m", "n"))) as hosted:
        for model in (("-m", "m"), ()):
            error = refusal(command, tmp_path, "-b", hosted.url, *model)
            assert isinstance(error, ConfigError)
            assert "key" in str(error)
            assert "-m" not in str(error).split()
            error = refusal(command, tmp_path, "-b", hosted.url, *model, "--api-key-var", "BAD")
            assert isinstance(error, ConfigError)
            assert "'BAD'" in str(error)
            assert "-m" not in str(error).split()
        key = ("--api-key-var", "GOOD")
        assert "m, n" in str(refusal(command, tmp_path, "-b", hosted.url, *key, "-m", "other"))
        assert "m, n" in str(refusal(command, tmp_path, "-b", hosted.url, *key))
        without = hosted.url.removesuffix("/v1")
        assert f"-b {hosted.url}?" in str(refusal(command, tmp_path, "-b", without, "-m", "m", *key))
        fine = [invoke(command, tmp_path, "-b", hosted.url, "-m", m, *key) for m in ("m", "unlisted")]
        monkeypatch.setenv("OPENAI_API_KEY", "good")
        fine.append(invoke(command, tmp_path, "-b", hosted.url, "-m", "m"))
    assert [type(each.exception) for each in fine] == [NothingInstalled] * 3
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    error = refusal(command, tmp_path, "-b", f"http://127.0.0.1:{port}/v1", "-m", "m")
    assert isinstance(error, PolicyError)
    assert f":{port}/v1" in str(error)
    assert not (tmp_path / "run").exists()


def evaluated(**endpoint: Any) -> GymgateError:
    """What ends `gymgate.evaluate` before a stack is planned."""
    with pytest.raises(GymgateError) as raised:
        gymgate.evaluate("mcqa", policy=HTTPEndpoint(**endpoint), progress=False)
    assert "\n" not in str(raised.value)
    return raised.value


def test_evaluate_asks_as_a_run_does() -> None:
    """Else the servers started, and each rollout failed for the same reason."""
    with serving(Hosted(models=("m", "n"))) as hosted:
        key = {"base_url": hosted.url, "api_key_env": "GOOD"}
        wrong = [evaluated(**key, model="other"), evaluated(**{**key, "api_key_env": "BAD"}, model="m")]
        assert [type(error) for error in wrong] == [ConfigError] * 2
        assert "'other'" in str(wrong[0])
        assert "'BAD'" in str(wrong[1])
        assert isinstance(evaluated(**key, model="unlisted"), NothingInstalled)
    gone = evaluated(**key, model="m")
    assert isinstance(gone, PolicyError)
    assert gone.endpoint == hosted.url
    for unlisted in (Hosted(key=None, body="<html>"), Hosted(key=None, models_status=404)):
        with serving(unlisted) as hosted:
            assert isinstance(evaluated(base_url=hosted.url, model="any"), NothingInstalled)
    with pytest.raises(NothingInstalled):
        gymgate.evaluate("mcqa", policy=lambda request: "x", progress=False)


def test_the_only_model_is_asked_past_a_proxy_and_of_a_replica_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with serving(Hosted(key=None)) as hosted:
        for urls in (hosted.url, f"http://127.0.0.1:9/v1,{hosted.url}"):
            assert isinstance(invoke("run", tmp_path, "-b", urls).exception, NothingInstalled)
    assert len(hosted.seen) == 2


@pytest.mark.parametrize(
    ("hosted", "said"),
    [
        (Hosted(key=None, models=("m", "n")), "serves m, n"),
        (Hosted(key=None, models=()), "serves none"),
        (Hosted(key=None, body="<html>"), "list of models"),
        (Hosted(key=None, models_status=405), "answered 405"),
    ],
)
def test_an_endpoint_that_does_not_say_its_model(hosted: Hosted, said: str, tmp_path: Path) -> None:
    with serving(hosted):
        error = refusal("run", tmp_path, "-b", hosted.url)
        assert isinstance(error, ConfigError)
        assert "-m" in str(error)
        assert said in str(error)
        # Some servers have no list, and a key may be allowed to call a model but not to list them.
        listed = len(hosted.models) > 1
        model = "m" if listed else "unlisted"
        assert isinstance(invoke("run", tmp_path, "-b", hosted.url, "-m", model).exception, NothingInstalled)


@pytest.mark.parametrize("model", [(), ("-m", "m")])
def test_a_proxy_that_wants_a_password_is_told_from_a_model_that_is_not_said(
    model: tuple[str, ...], tmp_path: Path
) -> None:
    with serving(Hosted(key=None, models_status=407)) as hosted:
        error = refusal("run", tmp_path, "-b", hosted.url, *model)
    assert isinstance(error, ConfigError)
    assert "password" in str(error)


@pytest.mark.parametrize("command", ["run", "check"])
def test_an_endpoint_with_a_named_model_is_waited_for(command: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    words = ("-b", f"http://127.0.0.1:{port}/v1", "-m", "m", "--wait-for-policy", "0.6")
    assert "after 0.6 s" in str(refusal(command, tmp_path, *words))


def test_headers_reach_the_endpoint_and_their_values_no_message(tmp_path: Path) -> None:
    with serving(Hosted(key=None)) as hosted:
        words = ("-b", hosted.url, "--header", "x-team=a=b", "--max-retries", "0")
        assert isinstance(invoke("run", tmp_path, *words).exception, NothingInstalled)
        assert [seen[3] for seen in hosted.seen] == ["a=b"]
        for wrong in ("s3cret", "=s3cret", "x y=s3cret", "x=s3cret\r\nHost: y"):
            error = refusal("run", tmp_path, "-b", hosted.url, "--header", wrong)
            assert isinstance(error, ConfigError)
            assert "--header" in str(error)
            assert "s3cret" not in str(error)


@pytest.mark.parametrize("command", ["run", "eval run", "check"])
def test_a_judge_is_asked_before_the_start_too(command: str, tmp_path: Path) -> None:
    """Else each rollout failed at it, after the policy's tokens were paid for."""

    def judged(judge: str, *words: str) -> tuple[str, ...]:
        return "--judge", f"grader={judge}", "--judge-key-var", "grader=GOOD", *words

    with serving(Hosted()) as hosted:
        fine = [invoke(command, tmp_path, *judged(f"{m}{hosted.url}")) for m in ("", "m@", "unlisted@")]
        fine.append(invoke(command, tmp_path, "--judge", "grader=policy", "--judge", "other=none"))
        unknown = refusal(command, tmp_path, *judged(f"x@{hosted.url}"))
        without = refusal(command, tmp_path, *judged(f"m@{hosted.url.removesuffix('/v1')}"))
        wrong = refusal(command, tmp_path, "--judge", f"g=m@{hosted.url}", "--judge-key-var", "g=BAD")
        keyless = refusal(command, tmp_path, "--judge", f"grader=m@{hosted.url}")
    assert [type(each.exception) for each in fine] == [NothingInstalled] * 4
    assert {type(each) for each in (unknown, without, wrong, keyless)} == {ConfigError}
    assert "'grader'" in str(unknown)
    assert "'x'" in str(unknown)
    assert f"--judge grader=m@{hosted.url}?" in str(without)
    assert "'BAD'" in str(wrong)
    assert "--judge-key-var g=VAR" in str(wrong)
    assert "--judge-key-var grader=VAR" in str(keyless)
    gone = refusal(command, tmp_path, *judged(f"m@{hosted.url}"))
    assert isinstance(gone, PolicyError)
    assert "'grader'" in str(gone)
    assert hosted.url in str(gone)


@pytest.mark.parametrize(("models", "sent"), [(("m",), "m"), (("m", "n"), None)])
def test_a_judge_gets_the_only_model_that_its_endpoint_serves(
    models: tuple[str, ...], sent: str | None
) -> None:
    with serving(Hosted(models=models, key=None)) as hosted:
        judges = parse_judges([f"grader={hosted.url}", f"named=unlisted@{hosted.url}", "other=policy"])
        asked = asyncio.run(ask_judges(judges, 0, lambda line: None))
    assert asked == judges | {"grader": HTTPEndpoint(base_url=hosted.url, model=sent)}


def test_an_eval_sends_a_judges_only_model_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gymgate.integrations.verifiers.policy.require_needs", lambda *args, **options: None)
    monkeypatch.setattr(EvalOptions, "find_environments", lambda self, log: {})
    with serving(Hosted(key=None)) as hosted:
        options = EvalOptions(env="mcqa", models={"grader": hosted.url, "other": "policy"})
        policy = check_policy(options, lambda line: None)
    line = with_judges(Line(["nemo-gym-env", "--env.taskset.models", "{}"], options), policy)
    assert line.eval_options is not None
    config = parse_settings(line.argv, 1)
    for taskset in (line.eval_options, taskset_of(config)):
        assert taskset is not None
        [(_, grader), (_, other)] = taskset.run_spec().stack.models
        assert (grader.model, grader.base_url, other) == ("m", hosted.url, "policy")
