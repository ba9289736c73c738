"""`gymgate data`: rows made ready for `--data`, the taskset and the trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gymgate.cli.environments import environment_configs, writable_path
from gymgate.cli.options import (
    DIRECTORY,
    OTHER,
    OUTPUT_FILE,
    agent_option,
    config_option,
    env_var_option,
    field_option,
    gym_option,
    json_option,
    number_option,
    option_fields,
    parsed,
    set_option,
)
from gymgate.cli.output import echo, log, print_json, print_table
from gymgate.cli.texts import key_value
from gymgate.core.config import StackConfig
from gymgate.core.errors import ConfigError
from gymgate.gym.preparation import (
    Manifest,
    PrepareConfig,
    ScriptHelp,
    blend_files,
    parse_blend_file,
    prepare_data,
)


@click.group("data")
def command() -> None:
    """Prepare the data of environments; blend files of rows."""


@command.command("prepare")
@click.argument("environment", metavar="ENV|BENCHMARK")
@click.argument("script_arguments", nargs=-1, metavar="[-- SCRIPT_ARG...]")
@click.option("-o", "--output", type=DIRECTORY, help="Directory for the files. [data/ENV]")
@field_option(
    OTHER,
    PrepareConfig,
    "splits",
    "--split",
    type=click.Choice(["train", "validation", "benchmark", "example"]),
    help="Kind of declared data to prepare; with --input or a script, the file to write. Repeatable. "
    "[all but example; train]",
)
@field_option(
    OTHER,
    PrepareConfig,
    "arguments",
    "--arg",
    metavar="KEY=VALUE",
    callback=parsed(lambda texts: [key_value("--arg", text) for text in texts]),
)
@field_option(OTHER, PrepareConfig, "script", metavar="FILE")
@field_option(OTHER, PrepareConfig, "input", metavar="FILE")
@field_option(
    OTHER,
    PrepareConfig,
    "rename",
    metavar="OLD=NEW",
    callback=parsed(lambda texts: [key_value("--rename", text) for text in texts]),
    help="Rename a field of the rows, as the environment calls it. Repeatable.",
)
@field_option(OTHER, PrepareConfig, "prompt", metavar="FILE")
@config_option
@agent_option
@set_option
@field_option(OTHER, PrepareConfig, "requirements", "--with", metavar="PACKAGE")
@field_option(OTHER, PrepareConfig, "token_env", "--token-var", metavar="NAME")
@env_var_option
@field_option(OTHER, PrepareConfig, "skip_bad")
@field_option(OTHER, PrepareConfig, "refresh")
@field_option(OTHER, PrepareConfig, "timeout_s", "--prepare-timeout")
@gym_option
@json_option
@click.pass_context
def prepare(
    context: click.Context,
    /,
    environment: str,
    output: Path | None,
    as_json: bool,
    script_arguments: tuple[str, ...],
    **_: Any,
) -> None:
    """Download the data of an environment or benchmark.

    Runs NeMo Gym's own preparation: the dataset's prepare() or download, in NeMo Gym's virtual environment. Fills raw rows
    into their prompt, checks every row, adds agent_ref, and writes train.jsonl, validation.jsonl or benchmark.jsonl with a
    manifest.json. Downloads are kept, so the next time needs no network.

    \b
      gymgate data prepare workplace_assistant
      gymgate data prepare aime24 -o data/aime24
      gymgate data prepare reasoning_gym -- --help
      gymgate data prepare reasoning_gym -- --task knights_knaves --size 500 --seed 1
      gymgate data prepare math_with_judge --input raw.csv --prompt prompt.yaml --rename answer=expected_answer
    """
    fields = option_fields(context)
    file = fields[PrepareConfig].get("input")
    if script_arguments and not script_arguments[0].startswith("-"):
        raise ConfigError(
            f"one environment at a time, not {script_arguments[0]!r} as well; arguments of a script come after --"
        )
    if file and (script_arguments or "script" in fields[PrepareConfig]):
        raise ConfigError("--input and a script both give rows; name only one of them")
    if file and not Path(file).expanduser().is_file():
        raise ConfigError(f"--input {file!r}: there is no such file")
    (config,) = environment_configs(context, [environment])
    settings = {**fields[PrepareConfig], **fields[StackConfig]}
    settings |= {"environment": config, "script_arguments": script_arguments}
    target = writable_path(output or Path("data") / _file_name(environment))
    try:
        manifest = prepare_data(PrepareConfig.model_validate(settings), target, progress=log)
    except ScriptHelp as text:
        echo(str(text))
        return
    if as_json:
        print_json(manifest)
    else:
        _print(manifest, target)


def _file_name(environment: str) -> str:
    """`aime24` for `benchmarks/aime24`, `my_env` for `configs/my_env.yaml`."""
    name = environment.rstrip("/").rpartition("/")[2]
    return name.removesuffix(".yaml").removesuffix(".yml") or "data"


def _print(manifest: Manifest, target: Path) -> None:
    rows = []
    for name, note in manifest.files.items():
        repeats = max((source.repeats for source in note.sources), default=1)
        hint = f"NeMo Gym's own evaluation runs each row {repeats} times: -r {repeats}" if repeats > 1 else ""
        rows.append((str(target / name), str(note.rows), ", ".join(note.agents), note.sha256[:16], hint))
    print_table(("file", "rows", "agents", "sha256", ""), rows, fixed=2)
    first = next(iter(manifest.files))
    log(f"next: gymgate run {manifest.environment} --data {target / first} -b URL")


@command.command("blend")
@click.argument("files", nargs=-1, required=True, metavar="FILE[:WEIGHT[:CAP]]...")
@click.option("-o", "--output", type=OUTPUT_FILE, required=True, help="File to write.")
@number_option("-n", "--rows", help="Rows to write at most. [all]")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the order.")
@json_option
def blend(files: tuple[str, ...], output: Path, rows: int | None, seed: int, as_json: bool) -> None:
    """Mix JSONL files of rows into one, in proportion to their weights.

    Each next row comes from FILE with a probability in proportion to WEIGHT (1 if not given); the order within a
    file is kept. A file that is exhausted, or has given CAP rows, drops out and the others share its weight.
    """
    parsed = [parse_blend_file(text) for text in files]
    result = blend_files(parsed, output, rows=rows, seed=seed)
    if as_json:
        print_json(result)
    else:
        print_table(("file", "rows"), [(name, str(count)) for name, count in result.taken.items()])
        echo(f"{result.path}: {result.rows} rows, sha256 {result.sha256[:16]}")
    if result.without_agent and len(parsed) > 1:
        log(
            f"warning: {result.without_agent} rows have no agent_ref; they run only with a single environment "
            "(`gymgate data prepare` adds it)"
        )
