"""The process that checks one environment: `python -m gymgate.check.worker`, a job on stdin, events on stdout."""

from __future__ import annotations

import asyncio
import signal
import sys

import orjson

from gymgate.check.environment import check_environment
from gymgate.check.model import Job
from gymgate.errors import GymgateError
from gymgate.stack.forkserver.processes import PR_SET_PDEATHSIG, prctl


def main() -> int:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # its stack ends with it
    job = Job.model_validate_json(sys.stdin.buffer.read())

    def say(message: str) -> None:
        _emit({"progress": message})

    try:
        check = asyncio.run(check_environment(job, say))
    except GymgateError as error:
        _emit({"error": error.to_wire()})
        return 1
    _emit({"check": check.model_dump(mode="json")})
    return 0


def _emit(event: dict[str, object]) -> None:
    sys.stdout.buffer.write(orjson.dumps(event) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
