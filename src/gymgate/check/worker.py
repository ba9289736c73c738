"""The process that checks one environment: `python -m gymgate.check.worker`, a request on stdin, events on stdout."""

from __future__ import annotations

import asyncio
import signal
import sys

import orjson

from gymgate.check.environment import check_environment
from gymgate.check.model import CheckRequest
from gymgate.errors import GymgateError
from gymgate.stack.forkserver.processes import PR_SET_PDEATHSIG, prctl


def main() -> int:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # its stack ends with it
    request = CheckRequest.model_validate_json(sys.stdin.buffer.read())
    try:
        check = asyncio.run(check_environment(request, lambda message: _emit({"progress": message})))
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
