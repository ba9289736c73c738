"""The versions of a command that agents of one stack run, with an npm of our own and a real fork server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gymgate.catalog.resolve import AGENTS, ServerInstance
from gymgate.runtime import ensure_runtime
from gymgate.stack import plan
from gymgate.stack.forkserver_pool import ForkServerPool
from support.stacks import runtime, stack_config

pytestmark = pytest.mark.gym

NPM = """#!/bin/sh
for word; do case $word in @openai/codex@*) version=${word##*@} ;; esac; done
while [ "$1" != --prefix ]; do shift; done
mkdir -p "$2/bin" "$2/lib/node_modules/@openai/codex"
printf '#!/bin/sh\\necho codex %s\\n' "$version" > "$2/bin/codex" && chmod +x "$2/bin/codex"
"""
AGENT = "import subprocess; subprocess.run(['codex'])"


async def said(context: Any, logs: Path, *versions: str) -> list[str]:
    """What `codex` says to each agent of an environment; their settings pin these versions."""
    agents = [
        ServerInstance(
            f"agent {number}", AGENTS, "codex_agent", {"entrypoint": "app.py", "codex_version": version}
        )
        for number, version in enumerate(versions)
    ]
    directories = {agent.name: context.directory for agent in agents}
    found: Any = SimpleNamespace(
        servers=agents, agents={**directories}, directories=directories, ray=frozenset()
    )
    await asyncio.to_thread(plan.link_programs, found, context, logs)
    fork_server = await context.fork_server()
    for agent in agents:
        child = await plan.start_server(found, fork_server, logs, agent, agent.name, {}, {})
        assert await asyncio.wait_for(asyncio.shield(child.exited), 30) == 0, child.log_tail()
    return [(logs / f"agent_{number}.log").read_text().split("\n")[-2] for number in range(len(versions))]


async def test_each_agent_runs_the_version_that_its_settings_pin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one environment, of several, and where an earlier start has left another version."""
    python = ensure_runtime(runtime()).python
    monkeypatch.setenv("GYMGATE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "npm").write_text(NPM)
    (tmp_path / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "app.py").write_text(AGENT)
    for name in ("stack", "one", "two"):
        (tmp_path / name).mkdir()
    pool = ForkServerPool(stack_config(), tmp_path / "stack", lambda _: None)
    context = SimpleNamespace(
        directory=tmp_path,
        fork_servers=pool,
        progress=lambda _: None,
        fork_server=lambda: pool.client(python),
    )
    try:
        assert await said(context, tmp_path / "one", "0.144.4", "0.150.0") == [
            "codex 0.144.4",
            "codex 0.150.0",
        ]
        assert await said(context, tmp_path / "two", "0.151.0") == ["codex 0.151.0"]
        assert await said(context, tmp_path / "one", "0.151.0") == ["codex 0.151.0"]
    finally:
        await pool.close()
