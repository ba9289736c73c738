"""`gymgate doctor`: what this machine has of what a run needs."""

from __future__ import annotations

import sys

import click

from gymgate.runtime.checks import run_checks

_SIGNS = {True: "ok", False: "FAILED", None: "-"}


@click.command(name="doctor")
def command() -> None:
    """Check what a run needs of this machine; exit code 1 if something required is missing."""
    failed = False
    for check in run_checks():
        click.echo(f"{_SIGNS[check.ok]:<7}{check.name:<18}{check.detail}")
        failed = failed or check.ok is False
    sys.exit(int(failed))
