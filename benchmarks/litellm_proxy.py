"""LiteLLM's proxy as a contender: one worker, no database, no key, one model that goes to the scripted endpoint."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from benchmarks.machine import free_port

START_TIMEOUT_S = 120


@contextlib.contextmanager
def litellm_proxy(interpreter: str, target: str, model: str) -> Iterator[str]:
    """Base URL of a LiteLLM proxy that `interpreter`'s environment holds (`pip install 'litellm[proxy]'`)."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="gymgate-bench-") as name:
        config = Path(name) / "config.yaml"
        parameters = {"model": f"openai/{model}", "api_base": target, "api_key": "none"}
        settings = {
            "model_list": [{"model_name": model, "litellm_params": parameters}],
            "litellm_settings": {"num_retries": 0, "telemetry": False},
        }
        config.write_text(json.dumps(settings))
        command = [str(Path(interpreter).parent / "litellm"), "--config", str(config), "--host", "127.0.0.1"]
        environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}
        environment["LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY"] = "true"
        log = (Path(name) / "log").open("w")
        with subprocess.Popen(
            [*command, "--port", str(port)], env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=name
        ) as process:
            try:
                wait_until_alive(f"http://127.0.0.1:{port}/health/liveliness", process, Path(log.name))
                yield f"http://127.0.0.1:{port}/v1"
            finally:
                process.kill()


def wait_until_alive(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        with (
            contextlib.suppress(urllib.error.URLError, ConnectionError),
            urllib.request.urlopen(url, timeout=5),
        ):
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"LiteLLM did not start:\n{log.read_text()[-2000:]}")
        time.sleep(0.2)
