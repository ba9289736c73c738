"""`gymgate view`: the report of a run in a browser, current while the run grows."""

from __future__ import annotations

import contextlib
import os
import threading
import webbrowser
from pathlib import Path

import click

from gymgate.cli.interrupts import serve_interruptibly
from gymgate.cli.listening import bound, url_address
from gymgate.cli.options import per_task_option, port_option, tasks_option
from gymgate.cli.output import echo, log
from gymgate.core.errors import DataError
from gymgate.results.growing import GrowingReport
from gymgate.results.view import ReportView
from gymgate.runs.counted.aggregate import runs_at
from gymgate.runs.stored.layout import TRACES, holds_traces, without_run

SCREENS = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
"""Variables without which `webbrowser` would open a browser of text in this terminal, or none."""


@click.command("view")
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
@tasks_option
@per_task_option
@port_option(0)
@click.option("--no-browser", is_flag=True, help="Only print the URL.")
def command(run: Path, tasks: int, per_task: int, port: int, no_browser: bool) -> None:
    """Show the report of a run in the browser while it grows.

    RUN is a directory of gymgate run, also one with shards or before its first rollout, or a
    rollouts.jsonl of NeMo Gym's collector. New rollouts appear within seconds. Prints the URL, which only this machine
    reaches, and runs until it is interrupted.
    """
    if run.name == TRACES or not runs_at(run):
        if holds_traces(run):
            raise DataError(without_run(run), path=str(run))
        log(f"{without_run(run)}; waiting for one")
    with bound("127.0.0.1", port) as listener:
        url = f"http://{url_address(listener)}/"

        def ready() -> None:
            echo(url)
            if not no_browser and any(os.environ.get(name) for name in SCREENS):
                threading.Thread(target=_open, args=(url,), daemon=True).start()

        view = ReportView(GrowingReport(run, tasks=tasks, per_task=per_task))
        serve_interruptibly(view.serve(listener, ready))


def _open(url: str) -> None:
    """Open the browser; one that stays in the foreground ends with its thread."""
    with contextlib.suppress(webbrowser.Error, OSError):
        webbrowser.open(url)
