"""`serve-stack` without a NeMo Gym behind it, in a process of its own, whose memory and CPU time a test can read.

    python -m support.served

The token is in `STACK_TOKEN`. Prints its port.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from gymgate.core.config import StackConfig, StackServer
from gymgate.stack import stack_server
from gymgate.stack.protocol import Reply

TOKEN = "canary-token-0123456789"


class Served:
    """Takes the place of a stack of two environments; keeps what is passed on to its daemon."""

    description: ClassVar = {
        "agents": {
            name: {"environment": name, "instance": name, "type": "simple_agent"} for name in ("one", "two")
        },
        "gateway_url": "http://127.0.0.1:1",
        "names": {"one": "one", "two": "two"},
        "settings": {"environments": []},
    }
    config = StackConfig(environments=("one", "two"))

    def __init__(self) -> None:
        self.passed: list[dict[str, Any]] = []
        self.ports: list[int] = []
        """At which its servers listen."""

    async def forward(self, message: dict[str, Any], row: bytes) -> Reply:
        self.passed.append(message)
        return Reply(None, row)

    async def status(self) -> dict[str, Any]:
        return {"rollouts": 0, "ports": self.ports, "environments": {}}

    async def close(self) -> None:
        """Nothing runs."""


class Process:
    """The process that serves."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = process
        self.port = port
        self.server = StackServer(f"gymgate://127.0.0.1:{port}")

    def peak_mb(self) -> float:
        """The most memory that it has had, in MiB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024

    def cpu_s(self) -> float:
        """The CPU time that it has used, in seconds."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving_process(*command: str, errors: Path | None = None) -> Iterator[Process]:
    """Start the process, behind the words of `command`, and end it. `errors` gets what it writes to stderr."""
    environment = {**os.environ, "STACK_TOKEN": TOKEN, "PYTHONPATH": str(Path(__file__).parents[1])}
    with contextlib.ExitStack() as exits:
        stderr = None if errors is None else exits.enter_context(errors.open("w"))
        process = exits.enter_context(
            subprocess.Popen(
                [*command, sys.executable, "-m", "support.served"],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=environment,
            )
        )
        assert process.stdout is not None
        try:
            yield Process(process, int(process.stdout.readline()))
        finally:
            process.kill()


async def main() -> None:
    stack = Served()

    async def connect(config: StackConfig, **_: Any) -> Served:
        return stack

    stack_server.connect = connect  # type: ignore[assignment]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        token = os.environ["STACK_TOKEN"]
        await stack_server.serve_stack(
            stack.config, listener, token, None, lambda: print(port, flush=True), print
        )


if __name__ == "__main__":
    asyncio.run(main())
