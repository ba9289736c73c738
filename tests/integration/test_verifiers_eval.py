"""`gymgate eval run` and `vf-eval` as a user runs them: real processes, real Gym, exit codes and files."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import verifiers.v1 as vf
from verifiers.v1.serve import EnvClient, env_config_data

from nemo_gym_env import load_environment
from support.scripted import MARK, ScriptedPolicy, marked, until_none_is_left

pytestmark = [pytest.mark.gym, pytest.mark.warm]

GYMGATE = [sys.executable, "-m", "gymgate", "eval", "run"]
VF_EVAL = [sys.executable, "-c", "from verifiers.v1.cli.eval.main import main; main()"]


@pytest.fixture
async def policy() -> AsyncIterator[ScriptedPolicy]:
    async with ScriptedPolicy().serving() as policy:
        yield policy


async def start(command: list[str], cwd: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *command,
        cwd=cwd,
        env={**os.environ, "OPENAI_API_KEY": "unused"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


async def finish(command: list[str], cwd: Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    process = await start(command, cwd)
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def traces(run: Path) -> list[dict[str, Any]]:
    lines = (run / "traces.jsonl").read_text().splitlines()
    return [trace for line in lines for trace in json.loads(line)["traces"]]


def row_of(out: str, environment: str) -> list[str]:
    (line,) = [line for line in out.splitlines() if line.startswith(f"{environment} ")]
    return line.split()


async def test_the_main_job_needs_no_key_and_resumes(tmp_path: Path) -> None:
    """Replayed rollouts of the default task; half of the saved ones are lost and run again, at another port.

    The stack starts while verifiers is imported: its progress is on stderr, once, and not in verifiers' log.
    """
    command = [*GYMGATE, "nemo-gym-env", "-r", "6", "-c", "3", "--run.name", "main"]
    code, out, err = await finish(command, tmp_path)
    assert code == 0, err
    assert row_of(out, "example_session_state_mgmt")[1:3] == ["6", "1.000"]
    assert re.match("policy: .* example_session_state_mgmt, replayed", err)
    assert "replayed" in out
    assert len(out.splitlines()) < 8, "verifiers' dashboard prints a line per rollout"
    assert "vf-eval will be deprecated" not in out + err
    assert err.index("loading verifiers") < err.index("importing ")
    assert err.count("importing ") == 1
    run = tmp_path / "outputs" / "main"
    before = traces(run)
    assert all(trace["ok"] and trace["rewards"]["reward"]["score"] == 1.0 for trace in before)
    file = run / "traces.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:3]))
    settings = json.loads((run / "configs" / "resolved" / "eval.json").read_text())
    with socket.create_server(("127.0.0.1", urlsplit(settings["client"]["base_url"]).port or 0)):
        code, out, err = await finish([*GYMGATE, "--resume", "outputs/main"], tmp_path)
    assert code == 0, err
    assert row_of(out, "example_session_state_mgmt")[1:3] == ["6", "1.000"]
    assert [trace["id"] for trace in traces(run)[:3]] == [trace["id"] for trace in before[:3]]


@pytest.mark.heavy
async def test_failed_rollouts_make_it_fail_and_say_why(tmp_path: Path, policy: ScriptedPolicy) -> None:
    policy.fail = 500
    code, out, err = await finish([*GYMGATE, "-b", policy.base_url, "-r", "2"], tmp_path)
    assert code == 1
    assert row_of(out, "example_session_state_mgmt")[1:3] == ["2", "2"]
    assert re.search(r"2 x ProviderError: .*no capacity today", err)


async def test_an_unknown_environment_is_one_line_before_anything_heavy(tmp_path: Path) -> None:
    code, out, err = await finish([*GYMGATE, "--env", "workplace_asistant"], tmp_path)
    assert (code, out) == (1, "")
    assert "workplace_assistant" in err
    assert "loading verifiers" not in err
    assert "Traceback" not in err


async def test_vf_eval_runs_the_plugin_by_itself(tmp_path: Path, policy: ScriptedPolicy) -> None:
    command = [
        *(
            *VF_EVAL,
            "nemo-gym-env",
            "--env.taskset.env",
            "workplace_assistant",
            "-n",
            "2",
            "-r",
            "2",
            "-c",
            "4",
        ),
        *("-m", "x", "--client.base-url", policy.base_url, "--client.api-key-var", "NO_KEY"),
        *("--no-push", "--run.name", "vf"),
    ]
    code, _, err = await finish(command, tmp_path)
    assert code == 0, err
    found = traces(tmp_path / "outputs" / "vf")
    assert len(found) == 4
    assert len({trace["task"]["key"] for trace in found}) == 2
    assert all(trace["info"]["nemo_gym"]["environment"] == "workplace_assistant" for trace in found)
    said = (tmp_path / "outputs" / "vf" / "logs" / "latest" / "eval.log").read_text()
    assert "ran now: 4 rollouts: " in said


async def test_a_toml_file_blends_environments_in_one_stack(tmp_path: Path) -> None:
    """Rows of two environments in one file, each routed by its `agent_ref`."""
    from gymgate.gym.runtime import open_catalog

    catalog = open_catalog()
    names = ["example_single_tool_call", "example_session_state_mgmt"]
    rows = []
    for name in names:
        environment = catalog.find(name)
        row = json.loads(environment.data_file().path.read_text().splitlines()[0])
        agent = environment.config(None).agents[0].name
        rows.append({**row, "agent_ref": {"type": "responses_api_agents", "name": agent}})
    (tmp_path / "blend.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.toml").write_text(
        'num_rollouts = 2\n[run]\nname = "blend"\n'
        f'[env.taskset]\nid = "nemo-gym-env"\nenv = {json.dumps(names)}\ndata = "blend.jsonl"\n'
    )
    code, out, err = await finish([*GYMGATE, "@", "run.toml"], tmp_path)
    assert code == 0, err
    for name in names:
        assert row_of(out, name)[1:3] == ["2", "1.000"]


async def test_ctrl_c_stops_everything_and_exits_130(
    tmp_path: Path, policy: ScriptedPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice, in the middle of rollouts."""
    monkeypatch.setenv(MARK, str(tmp_path))
    policy.hang = True
    command = [
        *GYMGATE,
        "-b",
        policy.base_url,
        "-r",
        "2",
        "--run.name",
        "cut",
        "--env.taskset.env-vars",
        MARK,
    ]
    process = await start(command, tmp_path)
    while not policy.calls["chat"]:
        assert process.returncode is None, (await process.communicate())[1].decode()
        await asyncio.sleep(0.1)
    assert len(marked(str(tmp_path))) >= 4  # this eval, the daemon, the fork server, an agent
    os.killpg(process.pid, signal.SIGINT)
    os.killpg(process.pid, signal.SIGINT)
    _, err = await process.communicate()
    assert process.returncode == 130, err.decode()
    await until_none_is_left(str(tmp_path))


async def test_an_env_server_runs_tasks_it_never_loaded_and_leaves_nothing_when_killed(
    tmp_path: Path, policy: ScriptedPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As prime-rl does it: the client owns the taskset, the server gets one task's data over ZMQ."""
    monkeypatch.setenv(MARK, str(tmp_path))
    env = load_environment(env="example_session_state_mgmt", env_vars=[MARK])
    task = next(iter(env.taskset))
    address = f"ipc://{tmp_path}/env"
    program = (
        "import json, sys; from verifiers.v1.serve import serve_env; serve_env(**json.loads(sys.argv[1]))"
    )
    arguments = {"max_workers": 1, "address": address, "config_data": env_config_data(env.config)}
    server = await start([sys.executable, "-c", program, json.dumps(arguments)], tmp_path)
    client = EnvClient(address)
    try:
        await client.wait_for_server_startup(60, interval=0.2)
        episode = await client.run(
            client=vf.EvalClientConfig(base_url=policy.base_url, api_key_var="NO_KEY"),
            model="scripted",
            sampling=vf.SamplingConfig(),
            task_data=task.data.model_dump(mode="json"),
        )
    finally:
        os.kill(server.pid, signal.SIGKILL)
        await client.close()
        await server.communicate()
    (trace,) = episode.traces
    assert trace.ok, trace.errors
    assert trace.reward == 1.0
    assert trace.num_branches == 1
    assert trace.task.data.row == task.data.row
    await until_none_is_left(str(tmp_path))
