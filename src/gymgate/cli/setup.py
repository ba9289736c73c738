"""`gymgate setup`: make NeMo Gym's environment ahead of time."""

from __future__ import annotations

import time

import click

from gymgate.catalog import Catalog, Need
from gymgate.config import DEFAULT_NEMO_GYM, RuntimeConfig
from gymgate.runtime import Runtime, ensure_runtime

INSTALLED = ("package",)
"""Kinds of needs that a package index meets."""


@click.command(name="setup")
@click.argument("environments", nargs=-1, metavar="[ENV]...")
@click.option("--gym", "version", default=DEFAULT_NEMO_GYM, show_default=True, help="nemo-gym release.")
@click.option(
    "--python", help="Interpreter to build with: a path, a command or a version. Found if not named."
)
def command(environments: tuple[str, ...], version: str, python: str | None) -> None:
    """Make the environment that NeMo Gym runs in, and install what ENVs need beside it.

    Everything is offline afterwards. Without ENV: what every environment needs.
    """
    config = RuntimeConfig(version=version, python=python)
    base = make(config, ())
    catalog = Catalog(base.site, base.version)
    for name in environments:
        environment = catalog.find(name)
        chosen = environment.config(None)
        if requirements := catalog.requirements(environment, chosen):
            make(config, requirements)
        for need in chosen.needs:
            report_need(name, need)


def make(config: RuntimeConfig, requirements: tuple[str, ...]) -> Runtime:
    """The runtime, with one line per step and one at the end."""
    started = time.monotonic()
    runtime = ensure_runtime(config, requirements, progress=lambda line: click.echo(line, err=True))
    with_what = f" with {', '.join(requirements)}" if requirements else ""
    click.echo(
        f"nemo-gym {runtime.version}{with_what}: {runtime.python} ({time.monotonic() - started:.1f} s)"
    )
    return runtime


def report_need(environment: str, need: Need) -> None:
    if need.kind not in INSTALLED:
        click.echo(f"{environment} also needs, by its files: {need.kind}: {need.detail}", err=True)
