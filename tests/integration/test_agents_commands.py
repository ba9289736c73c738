"""The versions of a command that agents of one stack run, with an npm of our own and a real fork server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gymgate.core.config import EnvironmentConfig
from gymgate.gym.inside.resolve import AGENTS
from gymgate.gym.runtime import Runtime, ensure_runtime
from gymgate.gym.server_code import ServerCode
from gymgate.stack.daemon.forkserver_pool import ForkServerPool
from gymgate.stack.daemon.plan import EnvironmentPlan
from gymgate.stack.daemon.running_environment import RunningEnvironment, StackContext
from support.stacks import runtime, stack_config

pytestmark = pytest.mark.gym

NPM = """#!/bin/sh
for word; do case $word in @openai/codex@*) version=${word##*@} ;; esac; done
while [ "$1" != --prefix ]; do shift; done
mkdir -p "$2/bin" "$2/lib/node_modules/@openai/codex"
printf '#!/bin/sh\\necho codex %s\\n' "$version" > "$2/bin/codex" && chmod +x "$2/bin/codex"
"""
AGENT = "import subprocess; subprocess.run(['codex'])"


async def said(stack: StackContext, runtime: Runtime, name: str, *versions: str) -> list[str]:
    """What `codex` says to each agent of an environment; their settings pin these versions."""
    settings = [{"entrypoint": "app.py", "codex_version": version} for version in versions]
    config = {f"agent {number}": {AGENTS: {"codex_agent": block}} for number, block in enumerate(settings)}
    spec = EnvironmentConfig(name=name)
    code = dict.fromkeys(config, ServerCode(stack.directory))
    environment = RunningEnvironment(spec, [], runtime, stack)
    environment._plan = EnvironmentPlan(spec, stack.config, runtime.version, config, code)
    environment._logs.mkdir(parents=True, exist_ok=True)
    await asyncio.to_thread(environment._link_commands)
    fork_server = await environment._fork_server()
    words = []
    for agent in config:
        child = await environment._start_server(fork_server, agent, agent, {}, {})
        assert await asyncio.wait_for(asyncio.shield(child.exited), 30) == 0, child.log_tail()
        words.append(child.log.read_text().split("\n")[-2])
    return words


async def test_each_agent_runs_the_version_that_its_settings_pin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one environment, of several, and where an earlier start has left another version."""
    installed = ensure_runtime(runtime())
    monkeypatch.setenv("GYMGATE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "npm").write_text(NPM)
    (tmp_path / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "app.py").write_text(AGENT)
    pool = ForkServerPool(stack_config(), tmp_path / "stack", lambda _: None)
    nothing: Any = None
    stack = StackContext(stack_config(), tmp_path, nothing, pool, nothing, lambda _: None)
    try:
        assert await said(stack, installed, "one", "0.144.4", "0.150.0") == [
            "codex 0.144.4",
            "codex 0.150.0",
        ]
        assert await said(stack, installed, "two", "0.151.0") == ["codex 0.151.0"]
        assert await said(stack, installed, "one", "0.151.0") == ["codex 0.151.0"]
    finally:
        await pool.close()
