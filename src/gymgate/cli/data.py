"""`gymgate data`: rows made ready for `--data`, the taskset and the trainers."""

from __future__ import annotations

from pathlib import Path

import click
import orjson


@click.group("data")
def command() -> None:
    """Prepare the data of environments and benchmarks; blend files of rows."""


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
    from gymgate.cli.tables import print_table
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
