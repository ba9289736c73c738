"""The real runtime: made, found again, checked; and what setup and doctor say when something is wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gymgate.core.config import RuntimeConfig, StackConfig
from gymgate.core.errors import SetupError
from gymgate.gym.runtime import clean_env, ensure_runtime, find_interpreters, find_runtime
from gymgate.gym.runtime.cache import cache_entries
from gymgate.stack import acquire
from support.faulty import with_recordings
from support.json_output import read_output
from support.stacks import SIMPLE

pytestmark = [pytest.mark.gym, pytest.mark.timeout(600)]

DEAD_INDEX = {"UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple", "UV_HTTP_RETRIES": "0"}


def gymgate(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gymgate", *arguments]
    environment = {**os.environ, **variables}
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=500, check=False
    )


@pytest.mark.parametrize("release", ["0.7.0", "0.6.0"])
def test_made_once_then_instant_and_offline(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = RuntimeConfig(version=release)
    made = ensure_runtime(config)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("UV_DEFAULT_INDEX", DEAD_INDEX["UV_DEFAULT_INDEX"])
    started = time.monotonic()
    assert ensure_runtime(config) == find_runtime(config) == made
    assert time.monotonic() - started < 2
    assert (made.version, made.requirements) == (release, ())
    assert (made.site / "resources_servers").is_dir()


def test_an_interpreter_that_has_it_is_used_as_it_is() -> None:
    made = ensure_runtime(RuntimeConfig())
    given = ensure_runtime(RuntimeConfig(interpreter=str(made.python)))
    assert (given.python, given.site.resolve(), given.version) == (made.python, made.site.resolve(), "0.7.0")
    with pytest.raises(SetupError, match="has no nemo-gym installed"):
        ensure_runtime(RuntimeConfig(interpreter=sys.executable))
    with pytest.raises(SetupError, match="'/no/python'"):
        ensure_runtime(RuntimeConfig(interpreter="/no/python"))


def test_requirements_that_fit_beside_the_locked_versions() -> None:
    lines: list[str] = []
    made = ensure_runtime(RuntimeConfig(), ["xmltodict==1.0.2", "tomli-w==1.2.0"], progress=lines.append)
    code = "import xmltodict, tomli_w, nemo_gym.server_utils"
    subprocess.run([made.python, "-I", "-c", code], env=clean_env(), check=True)
    assert made.requirements == ("tomli-w==1.2.0", "xmltodict==1.0.2")
    assert not [line for line in lines if "moved" in line]


def test_a_requirement_that_nemo_gym_forbids() -> None:
    with pytest.raises(SetupError, match=r"^openai<2 .*nemo-gym 0\.7\.0: .*openai==2"):
        ensure_runtime(RuntimeConfig(), ["openai<2"])
    assert find_runtime(RuntimeConfig(), ["openai<2"]) is None


def test_setup_a_second_time_says_where_it_is(tmp_path: Path) -> None:
    made = ensure_runtime(RuntimeConfig())
    done = gymgate("setup", cwd=tmp_path, **DEAD_INDEX)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"nemo-gym 0.7.0 at {made.python}\n"
    listed = gymgate("setup", "workplace_assistant", "--json", cwd=tmp_path, **DEAD_INDEX)
    report = read_output("setup", listed.stdout)
    assert [runtime["python"] for runtime in report["runtimes"]] == [str(made.python)]


def test_nemo_gyms_own_command_line(tmp_path: Path) -> None:
    """Its output and exit codes, with the variables of a user who has another virtual environment."""
    misleading = {"UV_PYTHON": "3.9", "VIRTUAL_ENV": "/nowhere", "PYTHONPATH": "/nowhere"}
    shown = gymgate("gym", "--", "--help", cwd=tmp_path, **misleading)
    assert (shown.returncode, shown.stdout.split()[:2]) == (0, ["usage:", "gym"])
    listed = gymgate("gym", "--", "list", "environments", cwd=tmp_path, **misleading)
    assert listed.returncode == 0, listed.stderr
    assert "reasoning_gym" in listed.stdout
    assert gymgate("gym", "nosuchcommand", cwd=tmp_path).returncode == 2


def test_nemo_gyms_own_command_line_keeps_its_runtime() -> None:
    """The program that replaces gymgate holds what gymgate held: here one that waits for its input to end."""
    code = (
        "import os, sys\n"
        "from gymgate.core.config import RuntimeConfig\n"
        "from gymgate.gym.runtime import find_runtime\n"
        "from gymgate.gym.runtime.locks import inherit_locks_on_exec\n"
        "assert find_runtime(RuntimeConfig())\n"
        "inherit_locks_on_exec()\n"
        "os.execv(sys.executable, [sys.executable, '-c', 'print(flush=True); input()'])\n"
    )
    ensured = ensure_runtime(RuntimeConfig()).python.parents[1]
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        [entry] = [entry for entry in cache_entries() if entry.path == ensured]
        assert process.pid in (entry.users() or [])
        process.communicate(b"\n")


ELSEWHERE = "nowhere @ http://127.0.0.1:9/nowhere-1.0-py3-none-any.whl"


@pytest.mark.heavy  # a runtime is made before its requirements are looked for
def test_setup_installs_what_an_index_has_and_says_what_it_cannot(tmp_path: Path) -> None:
    """Of three environments one requires what is on no index, and one downloads when it starts."""
    config = with_recordings(tmp_path)
    (config.parents[1] / "requirements.txt").write_text(f"tiktoken\n{ELSEWHERE}\n")
    done = gymgate("setup", str(config), "mcqa", "bird_sql", "--json", cwd=tmp_path, UV_HTTP_RETRIES="0")
    report = read_output("setup", done.stdout)
    assert done.returncode == 1
    [failed] = report["failed"]
    assert failed["environment"] == str(config)
    assert ELSEWHERE in failed["detail"]
    assert "Connection refused" in failed["detail"]
    [_, made] = report["runtimes"]
    assert (made["environment"], made["requirements"]) == ("mcqa", ["tiktoken"])
    subprocess.run([made["python"], "-I", "-c", "import tiktoken, nemo_gym"], env=clean_env(), check=True)
    needs = [need for need in report["needs"] if need["environment"] == "bird_sql"]
    assert [need["kind"] for need in needs] == ["download"]


@pytest.mark.parametrize("version", ["0.144.4", "0.1"])
def test_setup_uses_the_commands_that_are_there(tmp_path: Path, version: str) -> None:
    """In the version that the config names; without npm in any other one, which is told."""
    programs, cache = tmp_path / "programs", tmp_path / "cache"
    for path in (programs, cache):
        path.mkdir()
    made = ensure_runtime(RuntimeConfig())
    (cache / "runtimes").symlink_to(made.python.parents[2])
    (programs / "codex").write_text(f"#!/bin/sh\necho codex-cli {version}\n")
    (programs / "codex").chmod(0o755)
    variables = {"PATH": f"{programs}:/nowhere", "GYMGATE_CACHE": str(cache)}
    done = gymgate("setup", "codex_reasoning_gym", "--json", cwd=tmp_path, **variables)
    report = read_output("setup", done.stdout)
    assert (done.returncode, report["commands"], report["failed"]) == (0, [], [])
    told = f"warning: {programs}/codex is not codex 0.144.4; it is used because npm is not installed"
    assert (told in done.stderr.splitlines()) == (version != "0.144.4")
    (programs / "codex").unlink()
    done = gymgate("setup", "codex_reasoning_gym", "--json", cwd=tmp_path, **variables)
    needs = [need["detail"] for need in json.loads(done.stdout)["needs"]]
    assert any("npm " in need and "@openai/codex" in need for need in needs)


@pytest.mark.parametrize(
    ("arguments", "variables", "says"),
    [
        (["--gym", "9.9.9"], {}, "nemo-gym 9.9.9"),
        (["--python", "/no/python"], {}, "'/no/python'"),
        (["no_such_environment"], {}, "no_such_environment"),
        ([], {**DEAD_INDEX, "GYMGATE_CACHE": "cache"}, "index: Connection refused"),
        ([], {"GYMGATE_OFFLINE": "1", "GYMGATE_CACHE": "cache", "UV_CACHE_DIR": "uv"}, "network"),
        ([], {"GYMGATE_CACHE": "/proc/none"}, "/proc/none/runtimes"),
    ],
)
def test_what_is_wrong_in_one_line(
    tmp_path: Path, arguments: list[str], variables: dict[str, str], says: str
) -> None:
    if "UV_DEFAULT_INDEX" in variables:
        variables = {**variables, "UV_CACHE_DIR": "uv"}
    variables = {
        name: str(tmp_path / value) if value in ("cache", "uv") else value
        for name, value in variables.items()
    }
    done = gymgate("setup", *arguments, cwd=tmp_path, **variables)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("gymgate: "), done.stderr
    assert says in last
    assert "Traceback" not in done.stderr
    assert ("making " in done.stderr) is (variables != {} and "/proc/none" not in variables.values())
    assert not list(tmp_path.glob("cache/runtimes/nemo-gym*"))


def test_a_full_disk(tmp_path: Path) -> None:
    """The real installation into a real file system of 64 MB, where this user may mount one."""
    own = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
    script = 'mount -t tmpfs -o size=64m none "$1" || exit 77; "$2" -m gymgate setup; code=$?; ls "$1/runtimes"; exit $code'
    command = [*own, "sh", "-c", script, "sh", str(tmp_path), sys.executable]
    environment = {**os.environ, "GYMGATE_CACHE": str(tmp_path)}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=300, check=False
        )
    except FileNotFoundError:
        pytest.skip("no unshare here")
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("this user may not mount a file system")
    assert done.returncode == 1
    assert "no space" in done.stderr.splitlines()[-1]
    assert done.stdout == ""


def test_doctor(tmp_path: Path) -> None:
    ensure_runtime(RuntimeConfig())
    done = gymgate("doctor", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert re.search(r"^ok +nemo-gym 0\.7\.0", done.stdout, re.MULTILINE)
    checks = {
        each["name"]: each["ok"] for each in json.loads(gymgate("doctor", "--json", cwd=tmp_path).stdout)
    }
    assert checks["uv"] is checks["loopback"] is checks["cache directory"] is True
    unknown = gymgate("doctor", "nosuch", cwd=tmp_path)
    assert unknown.returncode == 1
    last = unknown.stdout.splitlines()[-1]
    assert last.startswith("FAILED environments ")
    assert "'nosuch' in nemo-gym 0.7.0" in last
    bare = gymgate("doctor", cwd=tmp_path, GYMGATE_CACHE="/proc/none")
    assert bare.returncode == 1
    assert re.search(r"^FAILED +cache directory +cannot write /proc/none", bare.stdout, re.MULTILINE)


@pytest.mark.heavy
def test_every_minor_version_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.7.0, below its declared minimum too."""
    monkeypatch.setenv("GYMGATE_CACHE", str(tmp_path))
    minors = sorted({each.version[:2] for each in find_interpreters()})
    for major, minor in minors:
        made = ensure_runtime(RuntimeConfig(python=f"{major}.{minor}"))
        assert made.site.parts[-2] == f"python{major}.{minor}"
        packaged = made.site / "resources_servers" / "mcqa" / "app.py"
        assert packaged.stat().st_nlink == 1, (
            "a server that writes beside its code writes for its runtime alone"
        )


async def test_a_running_stack_keeps_its_runtime() -> None:
    async with acquire(StackConfig(environments=(SIMPLE,))) as stack:
        daemon = (await stack.status())["pid"]
        [runtime] = [
            part for part in cache_entries() if part.path == ensure_runtime(RuntimeConfig()).python.parents[1]
        ]
        assert daemon in (runtime.users() or [])
