"""Servers to start and their commands: vLLM's, or one that the caller writes."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from pydantic import Field

from gymgate.core.config import Config
from gymgate.core.errors import ConfigError, OptionError
from gymgate.gym.runtime import clean_env
from gymgate.gym.runtime.command import CommandError, run_command

FIRST_PORT, LAST_PORT = 8000, 65535
_NVIDIA_SMI_TIMEOUT_S = 30.0
OWN_ARGUMENTS = {
    "--host": "--host",
    "--port": "--port",
    "--data-parallel-size": "--data-parallel",
    "-dp": "--data-parallel",
    "--tensor-parallel-size": "--tensor-parallel",
    "-tp": "--tensor-parallel",
}
"""vLLM's options that gymgate sets itself, by an option of its own."""
SEVERAL_NODES = frozenset(
    {"--nnodes", "-n", "--node-rank", "-r", "--master-addr", "--headless"}
    | {"--data-parallel-address", "-dpa", "--data-parallel-start-rank", "-dpr"}
)
"""vLLM's options for a server that spans nodes."""


@dataclass(frozen=True)
class Server:
    """A program to start and the address at which it will answer."""

    name: str
    argv: tuple[str, ...]
    url: str
    """Answers when the server is ready; a policy's, up to and including /v1."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables added to this process's own."""
    is_policy: bool = True

    @property
    def probe(self) -> str:
        """The URL that answers when the server is ready."""
        return f"{self.url}/models" if self.is_policy else self.url


class PolicyServers(Config):
    """The policy servers to start. Raises `ConfigError` for settings that contradict each other."""

    model: str | None = None
    """Model for vLLM to serve."""
    arguments: tuple[str, ...] = ()
    """Extra arguments for vLLM."""
    command: str | None = None
    """Command that starts a server other than vLLM, e.g. `'python -m sglang.launch_server --model-path M --port {port}'`."""
    data_parallel: int | None = Field(default=None, ge=1)
    """Copies behind one address, by vLLM's own option."""
    replicas: int | None = Field(default=None, ge=1)
    """Servers per node, each with its own GPUs and address."""
    tensor_parallel: int | None = Field(default=None, ge=1)
    """GPUs per copy."""
    nodes: tuple[str, ...] = ()
    """Nodes to start them on with srun; none: this machine."""
    srun: tuple[str, ...] = ()
    """Extra srun option, e.g. `container-image=X`."""
    host: str | None = None
    """Address to listen on. `None`: 127.0.0.1; every address with `--slurm-nodes`."""
    port: int | None = Field(default=None, ge=1, le=LAST_PORT)
    """First port. `None`: free ones; 8000 with `--slurm-nodes`."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        if self.model is not None and self.command is not None:
            raise ConfigError(
                f"MODEL {self.model!r} is for vLLM and --command for another server: give one of them"
            )
        if self.model is None and self.command is None:
            raise ConfigError("give a MODEL for vLLM to serve, or another server's --command")
        vllm_only = {
            "--data-parallel": self.data_parallel,
            "--tensor-parallel": self.tensor_parallel,
            "arguments after --": self.arguments,
        }
        if self.command is not None and (idle := [name for name, value in vllm_only.items() if value]):
            raise ConfigError(f"{' and '.join(idle)}: only for vLLM; write it into --command")
        if self.command is not None and "{port}" not in self.command:
            raise ConfigError(f"--command {self.command!r}: write {{port}} where the server takes its port")
        if (self.data_parallel or 1) > 1 and (self.replicas or 1) > 1:
            raise ConfigError(
                f"--data-parallel {self.data_parallel} (copies behind one address) and --replicas {self.replicas} "
                "(an address each) do the same: give one of them"
            )
        for argument in self.arguments:
            name = argument.partition("=")[0]
            if own := OWN_ARGUMENTS.get(name):
                raise ConfigError(f"{argument} after --: use gymgate's own {own}")
            if name in SEVERAL_NODES:
                raise ConfigError(
                    f"{argument} after --: a server of gymgate serve-policy runs on one node, where it is restarted if it "
                    "dies; start one that spans nodes yourself and give its URL with -b"
                )
        if self.port is not None and (last := self.port + (self.replicas or 1) - 1) > LAST_PORT:
            raise OptionError(
                f"--port {self.port} with --replicas {self.replicas} would need port {last}; there are ports up to {LAST_PORT}"
            )
        if self.srun and not self.nodes:
            raise ConfigError("--srun is for the nodes of a Slurm job: add --slurm-nodes")

    def servers(self, gpus: Sequence[str], ports: Sequence[int] = ()) -> list[Server]:
        """Return the servers with their commands. `gpus` are those of one node, `ports` are free ones on this machine."""
        shares, first = self.shares(gpus), self.port or FIRST_PORT
        use_free = not self.nodes and self.port is None
        return [
            self._server(node, number, shares[number], ports[number] if use_free else first + number)
            for node in (self.nodes or [""])
            for number in range(self.replicas or 1)
        ]

    def shares(self, gpus: Sequence[str]) -> list[tuple[str, ...]]:
        """Return the GPUs of each server of a node; empty for a server that sees all of them."""
        count, gpus_each = self.replicas or 1, (self.tensor_parallel or 1) * (self.data_parallel or 1)
        if gpus and count * gpus_each > len(gpus):
            request = f"{count} server{'s' * (count > 1)} of {gpus_each} GPU{'s' * (gpus_each > 1)}"
            raise ConfigError(
                f"{request} need {count * gpus_each}, but there are only {len(gpus)}: {', '.join(gpus)}"
            )
        if count == 1:
            return [()]
        if not gpus and self.model is not None:
            raise ConfigError(
                f"--replicas {count}: found no GPUs to divide among them; set CUDA_VISIBLE_DEVICES to those that they may use"
            )
        if not gpus:
            return [()] * count
        size = gpus_each if self.model is not None else len(gpus) // count
        return [tuple(gpus[size * number : size * (number + 1)]) for number in range(count)]

    def _server(self, node: str, number: int, gpus: Sequence[str], port: int) -> Server:
        listen = self.host or ("0.0.0.0" if node else "127.0.0.1")
        reached = node or ("127.0.0.1" if listen in ("0.0.0.0", "::") else listen)
        seen = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
        argv = self._command(listen, port)
        if node:
            further = [f"--{option.removeprefix('--')}" for option in self.srun]
            step = ["srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}", *further]
            variables = ["env", *(f"{name}={value}" for name, value in seen.items())] if seen else []
            argv = [*step, *variables, *argv]
        return Server(
            name=f"{node or 'server'}-{number + 1}" if not node or (self.replicas or 1) > 1 else node,
            argv=tuple(argv),
            url=f"http://{reached}:{port}/v1",
            environment=() if node else tuple(seen.items()),
        )

    def _command(self, host: str, port: int) -> list[str]:
        if self.command is not None:
            words = split_command("--command", self.command)
            return [word.replace("{port}", str(port)).replace("{host}", host) for word in words]
        assert self.model is not None
        argv = ["vllm", "serve", self.model, "--host", host, "--port", str(port)]
        if self.tensor_parallel is not None:
            argv += ["--tensor-parallel-size", str(self.tensor_parallel)]
        if self.data_parallel is not None:
            argv += ["--data-parallel-size", str(self.data_parallel)]
        return [*argv, *self.arguments]


def sandbox_server(command: str, url: str) -> Server:
    """Return a server that runs beside the policy, such as a sandbox for code. Raises `ConfigError` for an invalid URL, and
    `OptionError`."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--sandbox-url {url!r} must look like http://host:port/path")
    return Server(
        name="sandbox", argv=tuple(split_command("--sandbox-command", command)), url=url, is_policy=False
    )


def split_command(option: str, text: str) -> list[str]:
    """Split an option's value into words, as a shell does. Raises `OptionError`."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise OptionError(f"{option} {text!r} is no command line: {error}") from None


def gpus_here(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the GPUs that this process may use, as CUDA names them: from its variables, else from nvidia-smi."""
    if (visible := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for part in visible.split(",") if (name := part.strip()) and name != "-1"]
    if (count := environment.get("SLURM_GPUS_ON_NODE", "")).isdecimal():
        return [str(number) for number in range(int(count))]
    try:
        listed = run_command(["nvidia-smi", "--list-gpus"], env=clean_env(), timeout_s=_NVIDIA_SMI_TIMEOUT_S)
    except CommandError:
        return []
    gpus = [line for line in listed.splitlines() if line.startswith("GPU ")]
    return [str(number) for number in range(len(gpus))]
