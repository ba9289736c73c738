"""Commands of policy servers, the nodes they run on, and what does not belong together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from click.testing import CliRunner

from gymgate.cli.serve_policy import command
from gymgate.cluster.servers import PolicyServers, gpus_here, sandbox_server
from gymgate.cluster.slurm_nodes import expand, job_nodes
from gymgate.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("n1", ["n1"]),
        ("a,b", ["a", "b"]),
        ("node[01-03,7],login", ["node01", "node02", "node03", "node7", "login"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[098-101]-ib", ["n098-ib", "n099-ib", "n100-ib", "n101-ib"]),
        ("r[1-2]n[0-1]", ["r1n0", "r1n1", "r2n0", "r2n1"]),
    ],
)
def test_node_lists(text: str, nodes: list[str]) -> None:
    assert expand(text) == nodes


@pytest.mark.parametrize(
    "text", ["", ",", "a,,b", "n[1-2", "n1-2]", "n[[1]]", "n[]", "n[a]", "n[2-1]", "n[0-999999]", "a, b"]
)
def test_broken_node_lists(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(repr(text))):
        expand(text)


def test_nodes_of_a_job() -> None:
    assert job_nodes({"SLURM_JOB_NODELIST": "n[1-2]"}) == ["n1", "n2"]
    assert job_nodes({"SLURM_NODELIST": "n3"}) == ["n3"]
    assert job_nodes({"SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NODELIST_HET_GROUP_1": "g1"}, group=1) == ["g1"]
    with pytest.raises(ConfigError, match="SLURM_JOB_NODELIST"):
        job_nodes({})


def test_servers_on_the_nodes_of_a_job() -> None:
    wanted = PolicyServers(
        model="a model",
        replicas=2,
        nodes=("n1", "n2"),
        srun=("container-image=x.sqsh",),
        arguments=("--dtype", "auto"),
    )
    servers = wanted.servers(["0", "1", "2"])
    assert [server.url for server in servers] == [
        "http://n1:8000/v1",
        "http://n1:8001/v1",
        "http://n2:8000/v1",
        "http://n2:8001/v1",
    ]
    assert [server.name for server in servers] == ["n1-1", "n1-2", "n2-1", "n2-2"]
    assert servers[3].argv == (
        *("srun", "--overlap", "--nodes=1", "--ntasks=1", "--nodelist=n2", "--container-image=x.sqsh"),
        *("env", "CUDA_VISIBLE_DEVICES=1"),
        *("vllm", "serve", "a model", "--host", "0.0.0.0", "--port", "8001", "--dtype", "auto"),
    )


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "MODEL"),
        ({"model": "m", "command": "x {port}"}, "'m'.*--command"),
        ({"command": "x"}, r"write \{port\} where"),
        ({"command": "x {port}", "data_parallel": 2}, "--data-parallel"),
        (
            {"command": "x {port}", "tensor_parallel": 2, "arguments": ("-q",)},
            "--tensor-parallel",
        ),
        ({"model": "m", "data_parallel": 4, "replicas": 2}, "--data-parallel"),
        ({"model": "m", "arguments": ("--port=1",)}, "--port"),
        ({"model": "m", "arguments": ("-dp", "2")}, "--data-parallel"),
        (
            {"model": "m", "arguments": ("--nnodes=2",)},
            "--nnodes=2",
        ),
        ({"model": "m", "srun": ("x",)}, "add --slurm-nodes"),
    ],
)
def test_what_does_not_belong_together(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        PolicyServers(**fields)


@pytest.mark.parametrize(
    ("fields", "gpus", "reason"),
    [
        ({"replicas": 3, "tensor_parallel": 2}, "0123", r"\b6\b.*\b4\b"),
        ({"data_parallel": 8}, "01", r"\b8\b.*\b2\b"),
        ({"replicas": 2}, "", "no GPUs"),
    ],
)
def test_gpus_that_do_not_do(fields: dict[str, Any], gpus: Sequence[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        PolicyServers(model="m", **fields).servers(list(gpus), [1, 2, 3])


def test_a_model_takes_as_many_gpus_as_it_is_divided_among() -> None:
    servers = PolicyServers(model="m", replicas=2).servers(["a", "b", "c", "d"], [11, 12])
    assert [server.environment for server in servers] == [(("CUDA_VISIBLE_DEVICES", gpu),) for gpu in "ab"]


def test_another_servers_command() -> None:
    wanted = PolicyServers(command="serve 'a b' -p {port} -H {host}", replicas=2)
    [first, second] = wanted.servers(["a", "b", "c", "d"], [11, 12])
    assert first.argv == ("serve", "a b", "-p", "11", "-H", "127.0.0.1")
    assert first.environment == (("CUDA_VISIBLE_DEVICES", "a,b"),)
    assert second.environment == (("CUDA_VISIBLE_DEVICES", "c,d"),)
    assert second.probe == "http://127.0.0.1:12/v1/models"
    assert [server.environment for server in wanted.servers([], [11, 12])] == [(), ()]


def test_which_gpus_are_here() -> None:
    assert gpus_here({"CUDA_VISIBLE_DEVICES": "GPU-1, GPU-2"}) == ["GPU-1", "GPU-2"]
    assert gpus_here({"CUDA_VISIBLE_DEVICES": "", "SLURM_GPUS_ON_NODE": "4"}) == []
    assert gpus_here({"SLURM_GPUS_ON_NODE": "2"}) == ["0", "1"]


def test_a_sandbox_needs_a_url() -> None:
    assert sandbox_server("run it", "http://h:6000/health").probe == "http://h:6000/health"
    with pytest.raises(ConfigError, match="'h:6000'"):
        sandbox_server("run it", "h:6000")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("m", "--sandbox-command", "x"), "--sandbox-command and --sandbox-url together"),
        (("--sandbox-command", "x", "--sandbox-url", "http://h/"), "--run"),
        (
            (
                "--sandbox-command",
                "x",
                "--sandbox-url",
                "http://h/",
                "--run",
                "y",
                "--replicas",
                "2",
                "--port",
                "1",
            ),
            "--replicas and --port",
        ),
        (
            ("m", "--logs", "/proc/none/logs"),
            "--logs /proc/none/logs",
        ),
        (("m", "--slurm-nodes"), "SLURM_JOB_NODELIST"),
        (("m", "--dry-run", "--run", "  "), "--run "),
    ],
)
def test_the_command_refuses(
    arguments: tuple[str, ...], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    done = CliRunner().invoke(command, arguments)
    assert isinstance(done.exception, ConfigError)
    assert reason in str(done.exception)


def test_a_dry_run_shows_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    done = CliRunner().invoke(command, ["m", "--slurm-nodes", "--port", "9000", "--dry-run"])
    assert done.output.splitlines() == [
        "srun --overlap --nodes=1 --ntasks=1 --nodelist=n1 vllm serve m --host 0.0.0.0 --port 9000",
        "srun --overlap --nodes=1 --ntasks=1 --nodelist=n2 vllm serve m --host 0.0.0.0 --port 9000",
        "http://n1:9000/v1,http://n2:9000/v1",
    ]
