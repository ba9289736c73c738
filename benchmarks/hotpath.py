"""CPU profile of the stack's daemon under load, as a flame graph.

    ./dev python -m benchmarks hotpath --out docs/hotpath.svg [--seconds 15]

Needs py-spy on PATH or in the environment (`pip install py-spy`), which needs leave to trace a process of the same
user. The load is the scripted policy at concurrency 20; idle time is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
from pathlib import Path

from benchmarks.contenders import ENVIRONMENT, rate, stack_run
from benchmarks.machine import describe
from benchmarks.scripted_policy import scripted_policy
from gymgate.api import load_catalog
from gymgate.config import HTTPEndpoint, StackConfig
from gymgate.stack import acquire


async def profile(url: str, out: Path, seconds: int) -> None:
    spy = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    if spy is None:
        raise SystemExit("benchmarks: py-spy is not there; `pip install py-spy`")
    path = load_catalog().find(ENVIRONMENT).data_file().path
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    async with acquire(StackConfig(environments=(ENVIRONMENT,))) as stack:
        run = stack_run(stack, HTTPEndpoint(base_url=url, dialect="responses"))
        await rate(rows, 200, 20, run)
        pid = (await stack.status())["pid"]
        options = ["-r", "500", "-d", str(seconds), "-o", str(out), "-p", str(pid)]
        recording = await asyncio.create_subprocess_exec(spy, "record", *options)
        while recording.returncode is None:
            await rate(rows, 100, 20, run)
        assert await recording.wait() == 0


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("hotpath.svg"))
    parser.add_argument("--seconds", type=int, default=15)
    args = parser.parse_args(argv)
    print(describe("aiohttp"), flush=True)
    with scripted_policy() as url:
        asyncio.run(profile(url, args.out, args.seconds))


if __name__ == "__main__":
    main()
