"""One vLLM server on this machine's CPU with the real model.

    ./dev engine python -m benchmarks.engine.server [--port 8000] [VLLM OPTIONS]

Its weights can be replaced over HTTP (see `benchmarks.engine.weights`). Sixty to 110 seconds pass until it answers, most of
them for imports. Beside other load, run it with VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1: its threads wait for each
other at every layer, so that two of them got 7 tokens/s where one got 10 to 37 (load 11 on two cores).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from benchmarks.engine.model import real_model
from benchmarks.machine import free_port, session_pids

MODEL = "SmolLM2-135M-Instruct"
"""The served name."""
START_TIMEOUT_S = 400.0
PLUGIN = Path(__file__).parent / "plugin"
"""A distribution's metadata, which names the weight transfer engine to vLLM."""
ROOT = Path(__file__).parents[2]


def command(port: int, options: Sequence[str] = ()) -> list[str]:
    """The server's command. float32 and `processed_logprobs` make its logprobs comparable with a trainer's."""
    fixed = {
        "--model": str(real_model()),
        "--served-model-name": MODEL,
        "--host": "127.0.0.1",
        "--port": str(port),
        "--dtype": "float32",
        "--max-model-len": "8192",
        "--max-num-seqs": "64",
        "--tool-call-parser": "hermes",
        "--logprobs-mode": "processed_logprobs",
        "--max-logprobs": "-1",
        "--generation-config": "vllm",
        "--structured-outputs-config": '{"backend": "xgrammar", "disable_any_whitespace": true}',
        "--weight-transfer-config": '{"backend": "file"}',
    }
    flags = [
        "--enforce-eager",
        "--enable-server-load-tracking",
        "--enable-auto-tool-choice",
        "--enable-scale-out",
    ]
    program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]  # its console script is broken
    return [*program, *(part for pair in fixed.items() for part in pair), *flags, *options]


def environment() -> dict[str, str]:
    """The server's environment variables; those about vLLM that are set already stay."""
    cores = sorted(os.sched_getaffinity(0))
    return {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **os.environ,
        "VLLM_SERVER_DEV_MODE": "1",  # the routes about weights
        "PYTHONPATH": os.pathsep.join([str(PLUGIN), str(ROOT)]),
    }


@contextlib.contextmanager
def vllm_server(log: Path, port: int | None = None, options: Sequence[str] = ()) -> Iterator[str]:
    """Start the server, wait until it answers, yield its base URL without `/v1`; ends the server and its children.

    Raises `RuntimeError` with the end of `log` if it ends before, or does not answer within `START_TIMEOUT_S`.
    """
    port = port or free_port()
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as sink:
        process = subprocess.Popen(
            command(port, options),
            env=environment(),
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )
    try:
        _wait(process, url, log)
        yield url
    finally:
        _end(process)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        with (
            contextlib.suppress(URLError, TimeoutError, ConnectionError),
            urlopen(f"{url}/health", timeout=5),
        ):
            return
        if process.poll() is not None or time.monotonic() > deadline:
            tail = log.read_text(errors="replace")[-3000:]
            raise RuntimeError(
                f"vLLM did not answer {url}/health; exit status {process.poll()}; the end of {log}:\n{tail}"
            )
        time.sleep(0.5)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the server to stop; after ten seconds, kill what is left of its session."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    for pid in session_pids(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, default=8000)
    args, options = parser.parse_known_args()
    os.execve(sys.executable, command(args.port, options), environment())


if __name__ == "__main__":
    main()
