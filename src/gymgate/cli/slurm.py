"""`gymgate slurm`: a run as a Slurm array, with a job that aggregates it."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from gymgate.cli.options import OTHER, field_option, parsed
from gymgate.cli.output import echo, log
from gymgate.cli.texts import parse_judges
from gymgate.cluster.servers import split_command
from gymgate.cluster.slurm import SlurmJob, aggregate_script, array_script, is_option, submit_script
from gymgate.core.addresses import without_login
from gymgate.core.config import HTTPEndpoint
from gymgate.core.errors import ConfigError
from gymgate.core.files import replacing
from gymgate.gym.runtime.command import CommandError, CommandTimeoutError, run_command
from gymgate.runs.described.plan import parse_seeds

SUBMIT_TIMEOUT_S = 120.0
_GIVES_POLICY = frozenset({"-b", "--base-url", "--replay-file", "--spec"})
"""Options of `gymgate run` that say what answers the policy's calls."""


@click.command("slurm", context_settings={"ignore_unknown_options": True})
@field_option(OTHER, SlurmJob, "output", "-o", "--output", required=True, type=click.Path(path_type=Path))
@field_option(OTHER, SlurmJob, "shards")
@field_option(OTHER, SlurmJob, "seeds", callback=parsed(parse_seeds), multiple=False, metavar="N|LIST")
@field_option(OTHER, SlurmJob, "at_once")
@field_option(OTHER, SlurmJob, "name", metavar="NAME")
@field_option(OTHER, SlurmJob, "time", metavar="TIME")
@field_option(OTHER, SlurmJob, "drain_s", "--drain", "drain_s", metavar="SECONDS")
@field_option(OTHER, SlurmJob, "requeues")
@click.option(
    "--sbatch",
    "options",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="Extra sbatch option, e.g. partition=gpu.",
)
@field_option(OTHER, SlurmJob, "setup", metavar="LINE")
@click.option(
    "--serve",
    metavar="ARGUMENTS",
    help="Start policy servers, a sandbox or both in each task, with these arguments of gymgate serve-policy: "
    "'MODEL --replicas 4 -- --max-model-len 32768'.",
)
@click.option("--dry-run", is_flag=True, help="Print the scripts; write and submit nothing.")
@click.option("--no-submit", is_flag=True, help="Write the scripts; print the command that submits them.")
@click.argument("arguments", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- RUN...")
def command(
    output: Path,
    options: tuple[str, ...],
    serve: str | None,
    dry_run: bool,
    no_submit: bool,
    arguments: tuple[str, ...],
    **job_options: Any,
) -> None:
    """Run rollouts as an array of Slurm jobs.

    Writes and submits an array of gymgate run, and a job that aggregates its results. RUN are the arguments of gymgate
    run, without -o and --shard, after a --. Submitting again resumes the run. Example: gymgate slurm -o runs/x --shards 8
    --time 4:00:00 -- mcqa -b http://host:8000/v1 -m M
    """
    words = tuple(split_command("--serve", serve)) if serve else ()
    job = SlurmJob(
        arguments=_checked(
            arguments,
            shards=job_options["shards"],
            files=not any(text.startswith("dependency=") for text in options),
            has_own=bool(serve or job_options["setup"]),
        ),
        output=output,
        options=_pairs(options),
        serve=words,
        serves_policy=_serves_policy(words),
        **job_options,
    )
    if not (job.serves_policy or any(is_option(argument, _GIVES_POLICY) for argument in arguments)):
        log("warning: no policy: each task replays recorded answers; add -b URL after the --, or --serve")
    paths = {part: output.absolute() / f"{part}.sbatch" for part in ("array", "aggregate")}
    scripts = {paths["array"]: array_script(job), paths["aggregate"]: aggregate_script(job)}
    submit = output.absolute() / "submit.sh"
    scripts[submit] = submit_script(paths["array"], paths["aggregate"])
    if dry_run:
        for path, text in scripts.items():
            echo(f"# {path}\n{text}")
        return
    if without_login(scripts[paths["array"]]) != scripts[paths["array"]]:
        log(f"warning: {paths['array']} holds the user and password of an address, for all who may read it")
    for path, text in scripts.items():
        with replacing(path) as file:
            file.write(text.encode())
    (output / "logs").mkdir(exist_ok=True)
    if no_submit:
        echo(f"bash {shlex.quote(str(submit))}")
        return
    _submit(submit)


def _checked(
    arguments: tuple[str, ...], *, shards: int | None, files: bool, has_own: bool
) -> tuple[str, ...]:
    """Check the arguments of `gymgate run` now, so that an error does not occur in every task.

    Without `files`, the rows may come from a job that the array waits for; `has_own`: tasks may start servers on their nodes.
    """
    from gymgate.cli.run_spec import checked_line
    from gymgate.core.http_client import is_for_loopback

    with _parsed("run", [*arguments, "-o", "x"]) as context:
        rollouts = checked_line(context, log, files=files, count=shards is not None)
        judges = parse_judges(context.params["judges"]).values()
        given = (context.params["urls"] or "").split(",")
    given += [judge.base_url for judge in judges if isinstance(judge, HTTPEndpoint)]
    own = [url for url in given if is_for_loopback(url.partition("//")[2])]
    if own and not has_own:
        log(
            f"warning: {without_login(own[0])} is the node that each task runs on; give its host's name, or --serve it"
        )
    if shards is not None and rollouts is not None and shards > rollouts:
        raise ConfigError(
            f"--shards {shards}: more shards than rollouts, so some would be empty; give at most {rollouts}"
        )
    return arguments


def _serves_policy(words: tuple[str, ...]) -> bool:
    """Check the arguments of `gymgate serve-policy`; return whether they start a policy."""
    if not words:
        return False
    with _parsed("serve-policy", words) as context:
        for option in context.command.params:
            if option.opts[0] in ("--run", "--dry-run", "--logs") and context.params[str(option.name)]:
                raise ConfigError(f"{option.opts[0]} in --serve is set for each array task; leave it out")
        return context.params["model"] is not None or context.params["command"] is not None


def _parsed(name: str, words: Sequence[str]) -> click.Context:
    """Parse the arguments of another command."""
    from gymgate.cli import cli

    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    return command.make_context(f"gymgate {name}", list(words))


def _pairs(options: tuple[str, ...]) -> dict[str, str | None]:
    pairs: dict[str, str | None] = {}
    for text in options:
        name, equals, value = text.removeprefix("--").partition("=")
        if name in pairs:
            raise ConfigError(f"--sbatch {name} is given twice")
        pairs[name] = value if equals else None
    return pairs


def _submit(submit: Path) -> None:
    if shutil.which("sbatch") is None:
        raise ConfigError(f"sbatch is not installed on this machine; submit elsewhere with: bash {submit}")
    errors: list[str] = []
    try:
        output = run_command(
            ["bash", submit],
            env=os.environ,
            timeout_s=SUBMIT_TIMEOUT_S,
            on_stderr=errors.append,
            in_session=True,
        )
    except CommandTimeoutError as error:
        raise ConfigError(
            f"sbatch did not answer within {SUBMIT_TIMEOUT_S:g} s; check with squeue before you submit again: "
            f"bash {submit}"
        ) from error
    except CommandError as error:
        raise ConfigError(f"sbatch refused: {' '.join((error.errors or str(error)).split())}") from error
    echo("".join(errors).strip() or output.strip())
