"""`gymgate setup`: make NeMo Gym's environment ahead of time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from gymgate.config import DEFAULT_NEMO_GYM, RuntimeConfig

if TYPE_CHECKING:
    from gymgate.catalog import Need
    from gymgate.runtime import Runtime

Progress = Callable[[str], None]

_INSTALLED = "package"
"""The kind of need that a package index meets; every other is the user's to see to."""


@click.command(name="setup")
@click.argument("environments", nargs=-1, metavar="[ENV]...")
@click.option(
    "--gym",
    "version",
    default=DEFAULT_NEMO_GYM,
    show_default=True,
    metavar="VERSION",
    help="nemo-gym release.",
)
@click.option(
    "--python",
    metavar="PYTHON",
    help="Interpreter to build with: a path, a command or a version. Found if not named.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(environments: Sequence[str], version: str, python: str | None, as_json: bool) -> None:
    """Make the environment that NeMo Gym runs in, and install what ENVs require beside it.

    What is made here works without a network afterwards. Without ENV: the release alone, which is all that most
    environments need.
    """
    config = RuntimeConfig(version=version, python=python)
    with _progress() as say:
        made = [_made(config, (), None, say)]
        needs = list(_set_up(config, environments, made, say)) if environments else []
    if as_json:
        import orjson

        report = {"runtimes": made, "needs": needs}
        click.echo(orjson.dumps(report, option=orjson.OPT_INDENT_2))
        return
    for runtime in made:
        beside = f" with {', '.join(runtime['requirements'])}" if runtime["requirements"] else ""
        user = f"{runtime['environment']}: " if runtime["environment"] else ""
        click.echo(f"{user}nemo-gym {runtime['nemo_gym']}{beside} at {runtime['python']}")
    for need in needs:
        click.echo(
            f"{need['environment']} also needs, by its files: {need['kind']}: {need['detail']}", err=True
        )


def _set_up(
    config: RuntimeConfig, environments: Sequence[str], made: list[dict[str, Any]], say: Progress
) -> Iterator[dict[str, str]]:
    """Make each environment's runtime, and yield what it needs that this cannot install."""
    from gymgate.catalog import Catalog
    from gymgate.runtime import ensure_runtime

    base = ensure_runtime(config, progress=say)
    catalog = Catalog(base.site, base.version)
    for name in environments:
        environment = catalog.find(name)
        chosen = environment.config(None)
        if requirements := catalog.requirements(environment, chosen):
            made.append(_made(config, requirements, name, say))
        for need in _left(chosen.needs):
            yield {"environment": name, "kind": need.kind, "detail": need.detail}


def _left(needs: Sequence[Need]) -> list[Need]:
    return [need for need in needs if need.kind != _INSTALLED]


def _made(
    config: RuntimeConfig, requirements: Sequence[str], environment: str | None, say: Progress
) -> dict[str, Any]:
    from gymgate.runtime import ensure_runtime

    started = time.monotonic()
    runtime: Runtime = ensure_runtime(config, requirements, progress=say)
    return {
        "environment": environment,
        "nemo_gym": runtime.version,
        "python": str(runtime.python),
        "site": str(runtime.site),
        "requirements": list(runtime.requirements),
        "seconds": round(time.monotonic() - started, 1),
    }


@contextmanager
def _progress() -> Iterator[Progress]:
    """On a terminal one moving line, warnings kept above it; else a line per step. All of it on stderr."""
    if not sys.stderr.isatty():
        yield lambda line: click.echo(line, err=True)
        return
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True)
    with console.status("looking for NeMo Gym") as status:

        def say(line: str) -> None:
            if line.startswith("warning: "):
                console.print(line, markup=False, highlight=False)
            else:
                status.update(escape(line))

        yield say
