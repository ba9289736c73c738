"""`gymgate data`: rows made ready for `--data`, the taskset and the trainers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import orjson
import yaml

from gymgate.cli.options import Seconds
from gymgate.config import DEFAULT_NEMO_GYM, RuntimeConfig
from gymgate.errors import ConfigError

if TYPE_CHECKING:
    from gymgate.preparation import Manifest, PrepareConfig


@click.group("data")
def command() -> None:
    """Prepare the data of environments and benchmarks; blend files of rows."""


@command.command("prepare")
@click.argument("environment", metavar="ENV|BENCHMARK")
@click.argument("script_arguments", nargs=-1, metavar="[-- SCRIPT_ARG...]")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory for the files. [data/ENV]",
)
@click.option(
    "--split",
    "splits",
    multiple=True,
    type=click.Choice(["train", "validation", "benchmark", "example"]),
    help="Only this kind of declared data; with --input or a script, the file to write. [all but example; train]",
)
@click.option(
    "--arg", "arguments", multiple=True, metavar="KEY=VALUE", help="Argument of the data's prepare()."
)
@click.option("--script", metavar="FILE", help="Script of ENV to run in place of what its config declares.")
@click.option(
    "--input", "input_", metavar="FILE", help="Rows of your own (JSONL) in place of the declared data."
)
@click.option(
    "--prompt", metavar="FILE", help="Prompt (YAML: user, system) to put raw rows to. [the declared one]"
)
@click.option("--config", help="Which of the environment's configs.")
@click.option("--agent", metavar="NAME", help="Agent instance that the rows go to. [the declared one]")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Override in the config, dotted.")
@click.option("--with", "requirements", multiple=True, metavar="PACKAGE", help="Package that a script needs.")
@click.option(
    "--token-var",
    default="HF_TOKEN",
    show_default=True,
    metavar="NAME",
    help="Variable with the hub's token.",
)
@click.option(
    "--env-var", "env_vars", multiple=True, metavar="NAME", help="Further variable that a script may see."
)
@click.option("--skip-bad", is_flag=True, help="Leave out rows that cannot run, in place of an error.")
@click.option("--refresh", is_flag=True, help="Fetch again what was fetched earlier.")
@click.option(
    "--timeout", type=Seconds(0, min_open=True), default=14400.0, show_default=True, help="Seconds."
)
@click.option("--gym", default=DEFAULT_NEMO_GYM, show_default=True, help="nemo-gym release.")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest.")
def prepare(as_json: bool, output: Path | None, **options: Any) -> None:
    """Download the data of an environment or benchmark and write rows that run.

    Runs NeMo Gym's own preparation: the dataset's prepare() or download, in NeMo Gym's environment. Puts raw rows to
    their prompt, checks every row, adds agent_ref, and leaves train.jsonl, validation.jsonl or benchmark.jsonl with a
    manifest.json. What was fetched once is kept, so that the next time needs no network.

    \b
      gymgate data prepare workplace_assistant
      gymgate data prepare aime24 -o data/aime24
      gymgate data prepare reasoning_gym -- --help
      gymgate data prepare reasoning_gym -- --task knights_knaves --size 500 --seed 1
      gymgate data prepare math_with_judge --input raw.jsonl --prompt prompt.yaml
    """
    from gymgate.cli.environments import writable_path
    from gymgate.preparation import ScriptHelp
    from gymgate.preparation import prepare as prepare_data

    config = _prepare_config(**options)
    target = writable_path(output or Path("data") / _file_name(config.environment.name))
    try:
        manifest = prepare_data(config, target, progress=lambda line: click.echo(line, err=True))
    except ScriptHelp as shown:
        click.echo(str(shown))
        return
    if as_json:
        click.echo(manifest.model_dump_json(indent=2))
    else:
        _print(manifest, target)


def _prepare_config(
    environment: str,
    script_arguments: tuple[str, ...],
    splits: tuple[Any, ...],
    arguments: tuple[str, ...],
    script: str | None,
    input_: str | None,
    prompt: str | None,
    config: str | None,
    agent: str | None,
    settings: tuple[str, ...],
    requirements: tuple[str, ...],
    token_var: str,
    env_vars: tuple[str, ...],
    skip_bad: bool,
    refresh: bool,
    timeout: float,
    gym: str,
) -> PrepareConfig:
    from gymgate.cli.environments import environment_configs
    from gymgate.preparation import PrepareConfig

    if script_arguments and not script_arguments[0].startswith("-"):
        raise ConfigError(
            f"one environment at a time, not {script_arguments[0]!r} as well; arguments of a script come after --"
        )
    if input_ and (script or script_arguments):
        raise ConfigError("--input names rows, and a script is to make some: one or the other")
    if input_ and not Path(input_).expanduser().is_file():
        raise ConfigError(f"--input {input_!r}: there is no such file")
    (found,) = environment_configs((environment,), config, agent, settings)
    return PrepareConfig(
        environment=found,
        runtime=RuntimeConfig(version=gym),
        **({"splits": splits} if splits else {}),
        arguments=tuple(_argument(text) for text in arguments),
        script=script,
        script_arguments=script_arguments,
        input=input_,
        prompt=prompt,
        requirements=requirements,
        token_env=token_var,
        env_vars=env_vars,
        skip_bad=skip_bad,
        refresh=refresh,
        timeout_s=timeout,
    )


def _argument(text: str) -> tuple[str, Any]:
    """`KEY=VALUE`, the value as YAML."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ConfigError(f"--arg {text!r}: write KEY=VALUE")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--arg {text!r}: the value is not YAML: {' '.join(str(error).split())}") from None


def _file_name(environment: str) -> str:
    """`aime24` for `benchmarks/aime24`, `my_env` for `configs/my_env.yaml`."""
    name = environment.rstrip("/").rpartition("/")[2]
    return name.removesuffix(".yaml").removesuffix(".yml") or "data"


def _print(manifest: Manifest, target: Path) -> None:
    from gymgate.cli.output import print_table

    rows = []
    for name, note in manifest.files.items():
        repeats = max((source.repeats for source in note.sources), default=1)
        hint = f"NeMo Gym's own evaluation runs each row {repeats} times: -r {repeats}" if repeats > 1 else ""
        rows.append((str(target / name), str(note.rows), ", ".join(note.agents), note.sha256[:16], hint))
    print_table(("file", "rows", "agents", "sha256", ""), rows, fixed=2)
    first = next(iter(manifest.files))
    click.echo(f"run them: gymgate run {manifest.environment} --data {target / first} -b URL", err=True)


@command.command("blend")
@click.argument("files", nargs=-1, required=True, metavar="FILE[:WEIGHT[:CAP]]...")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), required=True, help="File to write."
)
@click.option("--cap", type=click.IntRange(1), metavar="N", help="Rows to write at most. [all]")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the order.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def blend(files: tuple[str, ...], output: Path, cap: int | None, seed: int, as_json: bool) -> None:
    """Mix JSONL files of rows into one, in proportion to their weights.

    Each next row comes from FILE with a probability in proportion to WEIGHT (1 if not given); the order within a
    file is kept. A file that is exhausted, or has given CAP rows, drops out and the others share its weight.
    """
    from gymgate.cli.output import print_table
    from gymgate.preparation import blend_files, parse_part

    parts = [parse_part(text) for text in files]
    done = blend_files(parts, output, rows=cap, seed=seed)
    if as_json:
        report = {"path": str(done.path), "rows": done.rows, "sha256": done.sha256, "taken": done.taken}
        click.echo(orjson.dumps(report, option=orjson.OPT_INDENT_2))
    else:
        print_table(("file", "rows"), [(name, str(count)) for name, count in done.taken.items()])
        click.echo(f"{done.path}: {done.rows} rows, sha256 {done.sha256[:16]}")
    if done.without_agent and len(parts) > 1:
        click.echo(
            f"warning: {done.without_agent} rows have no agent_ref; they run only with a single environment "
            "(`gymgate data prepare` adds it)",
            err=True,
        )
