"""`gymgate doctor`: what this machine has of what a run needs."""

from __future__ import annotations

import sys

import click

_SIGNS = {True: "ok", False: "FAILED", None: "-"}


@click.command(name="doctor")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool) -> None:
    """Check what a run needs of this machine; exit code 1 if something required is missing."""
    from gymgate.runtime.checks import run_checks

    found = []
    for check in run_checks():
        found.append(check)
        if not as_json:
            click.echo(f"{_SIGNS[check.ok]:<7}{check.name:<18}{check.detail}")
    if as_json:
        import orjson

        click.echo(orjson.dumps([check._asdict() for check in found], option=orjson.OPT_INDENT_2))
    sys.exit(int(any(check.ok is False for check in found)))
