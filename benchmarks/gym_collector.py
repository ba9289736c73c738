"""NeMo Gym's own launcher and collector, as its CLI runs them: start time, memory of the stack, rollouts/s.

    ./dev python -m benchmarks.gym_collector [--rollouts 500] [--concurrency 20]

A contender of the other benchmarks; alone it prints its own figures as JSON. Warm, the servers run in gymgate's runtime
through symbolic links (`skip_venv_if_present`), so no virtual environment is built while the clock runs. Cold, Gym's command
makes one for each kind of server, with the uv, the uv cache and the package index that gymgate uses.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.machine import free_port, pss_mb, session_pids
from gymgate.core.config import RuntimeConfig
from gymgate.gym.catalog import Catalog
from gymgate.gym.runtime import Runtime, clean_env, ensure_runtime
from gymgate.gym.runtime.interpreters import numbered_commands, text
from gymgate.gym.runtime.lockfile import PYTHON_FLOOR
from gymgate.gym.runtime.uv import find_uv, run_uv
from gymgate.gym.runtime.variables import installer_env

ENVIRONMENT = "example_single_tool_call"
SHARED = (
    "responses_api_agents/simple_agent",
    "responses_api_models/openai_model",
    "environment_servers/legacy_agent",
)
MODEL_CONFIG = "responses_api_models/openai_model/configs/openai_model.yaml"


class Stock:
    """A stack that `gym env start` launched; `start_s` until every server was ready, memory in MB of PSS."""

    def __init__(self, runtime: Runtime, directory: Path, head_port: int) -> None:
        self.runtime, self.directory, self.head_port = runtime, directory, head_port
        self.start_s = 0.0
        self.processes = 0
        self.memory_mb = 0.0

    def collect(self, rollouts: int, concurrency: int, rows: int = 5) -> float:
        """Rollouts per second of `gym eval run --no-serve`, by its own progress bar (start-up left out)."""
        output = self.directory / f"rollouts-{time.monotonic_ns()}.jsonl"
        log = self.run(
            f"{ENVIRONMENT}_simple_agent",
            f"resources_servers/{ENVIRONMENT}/data/example.jsonl",
            output,
            repeats=rollouts // rows,
            concurrency=concurrency,
        )
        rates = re.findall(r"Collecting rollouts: 100%.*?, *([\d.]+)it/s", log)
        assert rates, log[-2000:]
        assert len(output.read_text().splitlines()) == rollouts
        return float(rates[-1])

    def run(
        self, agent: str, rows: str | Path, output: Path, *, repeats: int = 1, concurrency: int = 1
    ) -> str:
        """What `gym eval run --no-serve` prints; it writes its results to `output`."""
        arguments = [
            f"+agent_name={agent}",
            f"+input_jsonl_fpath={rows}",
            f"+output_jsonl_fpath={output}",
            f"+num_repeats={repeats}",
            f"+num_samples_in_parallel={concurrency}",
            "+head_server.host=127.0.0.1",
            f"+head_server.port={self.head_port}",
            "+route_failures_to_sidecar=true",  # else a failed rollout ends the run
        ]
        done = subprocess.run(
            [self.runtime.python.parent / "gym", "eval", "run", "--no-serve", *arguments],
            cwd=self.directory,
            env=gym_environment(self.runtime),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"gym eval run ended with {done.returncode}:\n{done.stdout[-3000:]}")
        return done.stdout


def gym_environment(runtime: Runtime) -> dict[str, str]:
    """For Gym's command: its own interpreter's programs first on PATH, as an activated environment has them."""
    environment = {**clean_env(), "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    environment["PATH"] = f"{runtime.python.parent}{os.pathsep}{environment['PATH']}"
    return environment


def installing_environment(stock: Stock) -> dict[str, str]:
    """The same, and what uv needs: itself and the interpreters on PATH, the index, and, as gymgate's own runtime is made,
    packages for the Python that the release declares as its minimum, which the one here may be below."""
    programs = stock.directory / "bin"
    programs.mkdir()
    for name, program in {**numbered_commands(), "uv": Path(find_uv())}.items():
        (programs / name).symlink_to(program)
    config = stock.directory / "uv.toml"
    config.write_text(f'[pip]\npython-version = "{text(PYTHON_FLOOR)}"\n')
    plain = gym_environment(stock.runtime)
    path = os.pathsep.join([plain["PATH"], str(programs)])
    return {**installer_env(), **plain, "PATH": path, "UV_CONFIG_FILE": str(config)}


def uv_cache() -> Path:
    return Path(run_uv("cache", "dir").strip())


@contextlib.contextmanager
def stock_stack(
    policy_url: str,
    version: str = "0.7.0",
    timeout_s: float = 540,
    environments: Sequence[str] = (ENVIRONMENT,),
    cold: bool = False,
    servers: Sequence[str] = SHARED,
    model_configs: Sequence[str | Path] = (MODEL_CONFIG,),
    overrides: Mapping[str, str] | None = None,
    config: str | None = None,
) -> Iterator[Stock]:
    """Start the environments with NeMo Gym's own command; kills the whole session on the way out.

    `config` is theirs, if not the default one. All of them must run in gymgate's plain runtime and have an agent of `servers`.
    Cold, no virtual environment is there.
    """
    runtime = ensure_runtime(RuntimeConfig(version=version))
    with tempfile.TemporaryDirectory(prefix="gymgate-bench-") as name:
        directory = Path(name)
        stock = Stock(runtime, directory, free_port())
        if cold:
            environment, settings = installing_environment(stock), {"uv_cache_dir": str(uv_cache())}
        else:
            link_environments(runtime, directory / "venvs", environments, servers)
            environment, settings = gym_environment(runtime), {"skip_venv_if_present": "true"}
        log = directory / "start.log"
        started = time.perf_counter()
        with log.open("w") as sink:
            process = subprocess.Popen(
                start_command(
                    stock, policy_url, environments, model_configs, settings | dict(overrides or {}), config
                ),
                cwd=directory,
                env=environment,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            wait_until_ready(process, log, timeout_s)
            stock.start_s = time.perf_counter() - started
            pids = session_pids(process.pid)
            stock.processes, stock.memory_mb = len(pids), sum(map(pss_mb, pids))
            yield stock
        finally:
            for pid in session_pids(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def start_command(
    stock: Stock,
    policy_url: str,
    environments: Sequence[str],
    model_configs: Sequence[str | Path],
    more: Mapping[str, str],
    config: str | None = None,
) -> list[str]:
    settings = {
        "policy_base_url": policy_url,
        "policy_api_key": "none",
        "policy_model_name": "scripted",
        "uv_venv_dir": str(stock.directory / "venvs"),
        "head_server.host": "127.0.0.1",
        "head_server.port": str(stock.head_port),
        **more,
    }
    catalog = Catalog(stock.runtime.site, stock.runtime.version)
    paths = [
        str(catalog.find(name).config(config).path.relative_to(stock.runtime.site)) for name in environments
    ]
    configs = [argument for config in (*paths, *map(str, model_configs)) for argument in ("--config", config)]
    gym = str(stock.runtime.python.parent / "gym")
    return [gym, "env", "start", *configs, *(f"++{key}={value}" for key, value in settings.items())]


def link_environments(
    runtime: Runtime, directory: Path, environments: Sequence[str], servers: Sequence[str]
) -> None:
    for server in (*(f"resources_servers/{Path(name).name}" for name in environments), *servers):
        (directory / server).mkdir(parents=True)
        (directory / server / ".venv").symlink_to(runtime.python.parent.parent)


def wait_until_ready(process: subprocess.Popen[bytes], log: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not re.search(r"All \d+ / \d+ servers ready", log.read_text()):
        if process.poll() is not None or time.monotonic() > deadline:
            parts = log.read_text().split("Found global config dict yaml")  # long, and no help
            raise RuntimeError(f"gym env start did not get ready:\n{parts[0][-2000:]}\n{parts[-1][-2000:]}")
        time.sleep(0.1)


def main() -> None:
    from benchmarks.scripted_policy import scripted_policy

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=500)
    parser.add_argument("--concurrency", type=int, default=20)
    args = parser.parse_args()
    with scripted_policy() as url, stock_stack(url) as stock:
        rate = stock.collect(args.rollouts, args.concurrency)
        figures = {"start_s": stock.start_s, "memory_mb": stock.memory_mb, "processes": stock.processes}
        print(json.dumps({**figures, "rollouts_per_s": rate}, indent=2))


if __name__ == "__main__":
    main()
