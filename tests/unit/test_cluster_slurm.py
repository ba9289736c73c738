"""The Slurm scripts: what is in them, that bash reads them, and how a task ends."""

from __future__ import annotations

import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pydantic import ValidationError

from gymgate.cli import slurm
from gymgate.cli.interrupts import INTERRUPTED
from gymgate.cli.slurm import command
from gymgate.cluster.slurm import SlurmJob, aggregate_script, array_script, seconds_of, submit_script
from gymgate.core.errors import ConfigError, GymgateError
from gymgate.runs.described.plan import parse_seeds

RUN = ("mcqa", "-b", "http://h/v1", "-m", "a model's name")


def job(tmp_path: Path, **fields: Any) -> SlurmJob:
    return SlurmJob(**{"arguments": RUN, "output": tmp_path / "a run", "shards": 4, **fields})


def checked(script: str) -> str:
    """What bash can read."""
    done = subprocess.run(
        ["bash", "-n"], input=script, text=True, capture_output=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    return script


def test_an_array_of_shards(tmp_path: Path) -> None:
    script = checked(
        array_script(
            job(tmp_path, at_once=2, time="1:00:00", options={"partition": "gpu", "exclusive": None})
        )
    )
    lines = script.splitlines()
    assert "#SBATCH --array=1-4%2" in lines
    assert "#SBATCH --signal=B:USR1@600" in lines
    assert "#SBATCH --partition=gpu" in lines
    assert "#SBATCH --exclusive" in lines
    assert """-m 'a model'"'"'s name'""" in script
    assert f"-o '{tmp_path / 'a run'}'" in script
    checked(aggregate_script(job(tmp_path)))
    checked(submit_script(tmp_path / "a b", tmp_path / "c"))


def test_what_the_user_says_of_the_run_holds_for_its_job(tmp_path: Path) -> None:
    """His wait for the policy, and for both jobs the account, partition and quality of service."""
    served = job(tmp_path, arguments=("mcqa", "--wait-for-policy", "5"), serve=("--", "vllm", "serve", "m"))
    assert served.command().count("--wait-for-policy") == 1
    options = {"account": "me", "partition": "gpu", "qos": "high", "exclusive": None}
    carried = aggregate_script(job(tmp_path, options=options)).splitlines()
    assert {f"#SBATCH --{name}={options[name]}" for name in ("account", "partition", "qos")} <= {*carried}
    assert "#SBATCH --exclusive" not in carried


def test_relative_paths_lead_where_the_scripts_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example `--data data/x.jsonl`, wherever `submit.sh` is called."""
    monkeypatch.chdir(tmp_path)
    assert f"#SBATCH --chdir={tmp_path}" in array_script(job(Path("x"))).splitlines()
    elsewhere = job(tmp_path, options={"chdir": "/elsewhere"})
    assert "#SBATCH --chdir=/elsewhere" in array_script(elsewhere).splitlines()


def words_of(script: str, program: str) -> list[str]:
    """What the script calls a program with in its third task, as bash and the program take it apart."""
    [line] = [line for line in checked(script).splitlines() if line.startswith(program)]
    line = line.removesuffix(" &")
    done = subprocess.run(
        ["bash", "-c", f'printf "%s\\0" {line}'],
        env={"SLURM_ARRAY_TASK_ID": "3", "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return done.stdout.split("\0")[:-1]


def test_servers_in_the_job(tmp_path: Path) -> None:
    serve = ("a 'model'", "--replicas", "2", "--", "--max-model-len", "64")
    words = words_of(
        array_script(job(tmp_path, serve=serve, arguments=("mcqa", "-m", "a 'model'"))), "gymgate serve"
    )
    assert words[:5] == ["gymgate", "serve-policy", "a 'model'", "--replicas", "2"]
    assert words[5:7] == ["--logs", f"{tmp_path}/a run/logs/servers-3"]
    assert words[9:] == ["--", "--max-model-len", "64"]
    expected = ["gymgate", "run", "mcqa", "-m", "a 'model'", "-b", "{urls}", "--wait-for-policy", "1800"]
    assert shlex.split(words[8]) == [*expected, "-o", f"{tmp_path}/a run", "--shard", "3/4"]


def test_an_array_over_seeds(tmp_path: Path) -> None:
    wanted = job(tmp_path, shards=None, seeds=(3, 1, 7))
    script = array_script(wanted)
    assert "#SBATCH --array=1,3,7" in script.splitlines()
    assert words_of(script, "gymgate run")[-4:] == ["-o", f"{tmp_path}/a run/seed-3", "--seeds", "3-3"]
    assert parse_seeds("3-3") == (3,)
    words = words_of(aggregate_script(wanted), "gymgate aggregate")
    assert words[2:5] == [f"{tmp_path}/a run/seed-{seed}" for seed in (1, 3, 7)]
    served = job(tmp_path, shards=None, seeds=(3, 1), serve=("m",), arguments=("mcqa",))
    inner = words_of(array_script(served), "gymgate serve")[-1]
    assert shlex.split(inner)[-4:] == ["-o", f"{tmp_path}/a run/seed-3", "--seeds", "3-3"]


def test_a_sandbox_beside_a_hosted_endpoint(tmp_path: Path) -> None:
    sandbox = ("--sandbox-command", "run it", "--sandbox-url", "http://127.0.0.1:6000/")
    script = array_script(job(tmp_path, serve=sandbox, serves_policy=False))
    assert "{urls}" not in script
    assert "-b http://h/v1" in script


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"arguments": ("mcqa", "--shard=1/2")}, "--shard"),
        ({"arguments": ("mcqa", "-o", "x")}, "-o "),
        ({"arguments": ("mcqa", "-ox")}, "-ox "),
        ({"serve": ("m",)}, "-b "),
        ({"serve": ("m",), "arguments": ("mcqa", "-bhttp://h/v1")}, "-b "),
        ({"seeds": (1, 2)}, "give either --shards N or --seeds LIST"),
        ({"shards": None}, "give either --shards N or --seeds LIST"),
        ({"shards": None, "seeds": (1,), "arguments": ("mcqa", "--seeds", "4")}, "--seeds"),
        ({"options": {"array": "1"}}, "sets itself"),
        ({"options": {"a b": "1"}}, "'a b'"),
        ({"options": {"dependency": None}}, "dependency"),
        (
            {"options": {"nodes": "2"}, "serve": ("m",), "arguments": ("mcqa",)},
            "--slurm-nodes",
        ),
        ({"time": "10:00"}, "leaves nothing"),
        ({"time": "soon"}, "write minutes"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        job(tmp_path, **fields)


def test_an_array_has_a_shard(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="shards"):
        job(tmp_path, shards=0)


def test_an_array_waits_for_other_jobs(tmp_path: Path) -> None:
    """It is cancelled if it would wait for ever, and the aggregation follows in any case."""
    lines = array_script(job(tmp_path, options={"dependency": "afterok:17,afterany:18"})).splitlines()
    assert "#SBATCH --dependency=afterok:17,afterany:18" in lines
    assert "#SBATCH --kill-on-invalid-dep=yes" in lines
    chosen = {"dependency": "afterok:17", "kill-on-invalid-dep": "no"}
    assert "#SBATCH --kill-on-invalid-dep=no" in array_script(job(tmp_path, options=chosen)).splitlines()
    assert "kill-on-invalid-dep" not in array_script(job(tmp_path))
    assert "dependency" not in aggregate_script(job(tmp_path, options=chosen))


def test_servers_on_every_node_may_have_several_nodes(tmp_path: Path) -> None:
    served = job(tmp_path, serve=("m", "--slurm-nodes"), options={"nodes": "2"}, arguments=("mcqa",))
    assert "#SBATCH --nodes=2" in array_script(served).splitlines()


def test_an_option_cannot_smuggle_a_line_in(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="comment"):
        array_script(job(tmp_path, options={"comment": "x\n#SBATCH --uid=0"}))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("10:30", 630),
        ("2:00:00", 7200),
        ("1-12", 129600),
        ("1-00:30", 88200),
        ("2-1:02:03", 176523),
    ],
)
def test_walltimes(text: str, seconds: int) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(
    ("ends", "code", "requeued"),
    [
        ("exit 0", 0, False),
        ("exit 1", 1, False),
        ("drain", 75, True),
        ("early", 75, True),
        ("setup", 75, True),
    ],
)
def test_how_a_task_ends(tmp_path: Path, ends: str, code: int, requeued: bool) -> None:
    """The script itself, with a collector that says when it is up and a scontrol that writes down its arguments.

    `early` has no handler for SIGUSR1 yet, and dies of it; in `setup` there is none yet, nor will there be.
    """
    programs = tmp_path / "bin"
    programs.mkdir()
    fifo, go = tmp_path / "up", tmp_path / "go"
    os.mkfifo(fifo)
    os.mkfifo(go)
    waits = f"echo up > {fifo}; while :; do sleep 0.05; done"
    body = {"drain": f"trap 'exit 75' USR1; {waits}", "early": waits}.get(ends, ends)
    setup = {"setup": (f"echo up > {fifo}", f"read -r < {go}")}.get(ends, ())
    _program(programs / "gymgate", f'echo "$@" > {tmp_path}/arguments; {body}')
    _program(programs / "scontrol", f'echo "$@" > {tmp_path}/scontrol')
    _program(programs / "sleep", f'[ "$1" = 60 ] || exec {shutil.which("sleep")} "$@"')
    (tmp_path / "array.sh").write_text(array_script(job(tmp_path, setup=setup)))
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    environment |= {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_JOB_ID": "17"}
    with (
        go.open("r+b", buffering=0) as gate,
        subprocess.Popen(["bash", str(tmp_path / "array.sh")], env=environment) as process,
    ):
        if ends in ("drain", "early", "setup"):
            assert fifo.read_text() == "up\n"
            process.send_signal(signal.SIGUSR1)
        gate.write(b"\n")
        assert process.wait(30) == code
    arguments = tmp_path / "arguments"
    assert not arguments.exists() if ends == "setup" else arguments.read_text().endswith("--shard 3/4\n")
    assert (tmp_path / "scontrol").exists() is requeued
    if requeued:
        assert (tmp_path / "scontrol").read_text() == "requeue 17_3\n"


def _program(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["-o", str(tmp_path / "x"), "--shards", "2", "--sbatch", "partition=p"]
    dry = CliRunner().invoke(command, [*arguments, "--dry-run", "--", *RUN])
    assert dry.exit_code == 0, dry.output
    assert "#SBATCH --partition=p" in dry.output
    assert not (tmp_path / "x").exists()
    for policy, is_warned in (
        ([], True),
        (["-bhttp://h/v1"], False),
        (["--base-url=http://127.example.com/v1"], False),
        (["-b", "http://a:b@127.0.0.1:8000/v1"], True),
        (["-b", "http://h:1/v1,HTTP://localhost"], True),
        (["-b", "http://h:1/v1?x=http://localhost:3/", "--env-var", "P=http://localhost:1/"], False),
        (["-b", "http://h/v1", "--judge", "j=M@http://[::1]:9/v1"], True),
    ):
        done = CliRunner().invoke(command, [*arguments, "--dry-run", "--", "mcqa", *policy])
        assert ("warning" in done.output) is is_warned, policy
    own = [*arguments, "--dry-run", "--setup", "start-it", "--", "mcqa", "-b", "http://localhost:8000/v1"]
    assert "warning" not in CliRunner().invoke(command, own).output
    written = CliRunner().invoke(command, [*arguments, "--no-submit", "--", *RUN])
    assert written.output == f"bash {tmp_path / 'x' / 'submit.sh'}\n"
    assert (tmp_path / "x" / "logs").is_dir()
    with_login = CliRunner().invoke(
        command, [*arguments, "--no-submit", "--", "mcqa", "-bhttp://me:secret@h/v1"]
    )
    assert "array.sbatch holds the user and password" in with_login.output
    assert "secret" not in with_login.output
    wrong = CliRunner().invoke(command, [*arguments, "--dry-run", "--", "mcqa", "--no-such-option"])
    assert "--no-such-option" in wrong.output
    assert wrong.exit_code == 2
    for serve, reason in (
        ("m --run x", "--run in --serve"),
        ("m --run=x", "--run in --serve"),
        ("m --logs=x", "--logs in --serve"),
        ("--replicas 0 m", "--replicas"),
        ("m --no-such", "--no-such"),
    ):
        refused = CliRunner().invoke(command, [*arguments, "--serve", serve, "--dry-run", "--", "mcqa"])
        assert reason in f"{refused.output}{refused.exception}"
        assert refused.exit_code
    for serve in ("m -- -q", "m -- --logs"):
        served = CliRunner().invoke(command, [*arguments, "--serve", serve, "--dry-run", "--", "mcqa"])
        assert "gymgate serve-policy m --logs" in served.output, served.output
    monkeypatch.setenv("PATH", str(tmp_path))
    nowhere = CliRunner().invoke(command, [*arguments, "--", *RUN])
    assert isinstance(nowhere.exception, GymgateError)
    assert "sbatch" in str(nowhere.exception)


@pytest.mark.parametrize(
    ("run", "most"),
    [
        (("mcqa",), 5),
        (("mcqa", "-n", "2"), 2),
        (("mcqa", "calendar", "-n", "3", "-r", "2", "--seeds", "2"), 24),
        (("--spec", "{tmp}/run.toml"), 8),
        (("mcqa", "--data", "{tmp}/rows.jsonl"), 3),
        (("mcqa", "calendar", "--data", "{tmp}/rows.jsonl", "-n", "9"), 3),
    ],
)
def test_there_are_no_more_shards_than_rollouts(tmp_path: Path, run: tuple[str, ...], most: int) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n\n{}\n{}\n")
    (tmp_path / "run.toml").write_text('environments = "mcqa"\nrows = 4\nrepeats = 2\n')
    words = [word.format(tmp=tmp_path) for word in run]

    def submitted(shards: int, *options: str) -> Any:
        arguments = ["-o", str(tmp_path / "x"), "--shards", str(shards), "--dry-run", *options, "--", *words]
        return CliRunner().invoke(command, arguments)

    refused = submitted(most + 1)
    assert isinstance(refused.exception, ConfigError), refused.output
    assert f"--shards {most + 1}:" in str(refused.exception)
    assert str(refused.exception).endswith(f" {most}")
    assert submitted(most).exit_code == 0
    assert submitted(most + 1, "--sbatch", "dependency=afterok:1").exit_code == 0


def test_shards_of_rows_that_are_not_here_are_not_counted(tmp_path: Path) -> None:
    arguments = ["-o", str(tmp_path / "x"), "--shards", "50", "--dry-run", "--", "mcqa", "--data", "hf:a/b"]
    assert CliRunner().invoke(command, arguments).exit_code == 0


@pytest.mark.parametrize(
    ("sbatch", "says"),
    [
        ("exec sleep 60", "0.5 s"),
        ("echo no such account >&2; exit 1", "no such account"),
    ],
)
def test_an_sbatch_that_refuses_or_hangs_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sbatch: str, says: str
) -> None:
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\n{sbatch}\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("gymgate.cli.slurm.SUBMIT_TIMEOUT_S", 0.5)
    arguments = ["-o", str(tmp_path / "x"), "--shards", "2", "--", *RUN]
    done = CliRunner().invoke(command, arguments)
    assert done.exit_code != 0
    assert says in str(done.exception)


def test_the_scripts_are_submitted_or_sbatch_says_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    arguments = ["-o", str(tmp_path / "x"), "--shards", "2", "--", *RUN]
    _program(tmp_path / "sbatch", "echo 17")
    submitted = CliRunner().invoke(command, arguments)
    assert submitted.output == "array 17\n"
    _program(tmp_path / "sbatch", "echo no such partition >&2; exit 1")
    refused = CliRunner().invoke(command, arguments)
    assert isinstance(refused.exception, ConfigError)
    assert "no such partition" in str(refused.exception)
    _program(tmp_path / "sbatch", "sleep 60")
    monkeypatch.setattr(slurm, "SUBMIT_TIMEOUT_S", 0.5)
    hung = CliRunner().invoke(command, arguments)
    assert isinstance(hung.exception, ConfigError)
    assert "0.5 s" in str(hung.exception)


def test_ctrl_c_ends_an_sbatch_that_hangs(tmp_path: Path) -> None:
    """Otherwise it submits after the user has gone. The pipe that it holds ends with it."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    _program(tmp_path / "sbatch", f"exec > {fifo}; echo $$; exec sleep 60")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    arguments = ["slurm", "-o", str(tmp_path / "x"), "--shards", "2", "--", *RUN]
    ended: list[Any] = []
    sbatch = 0
    with subprocess.Popen([sys.executable, "-m", "gymgate", *arguments], env=environment) as gymgate:
        try:
            with fifo.open() as pipe:
                sbatch = int(pipe.readline())
                gymgate.send_signal(signal.SIGINT)
                assert gymgate.wait(30) == INTERRUPTED
                ended, _, _ = select.select([pipe], [], [], 20)
        finally:
            gymgate.kill()
            if sbatch and not ended:
                os.kill(sbatch, signal.SIGKILL)
    assert ended
