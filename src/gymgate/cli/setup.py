"""`gymgate setup`: make NeMo Gym's environment ahead of time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from gymgate.config import DEFAULT_NEMO_GYM, RuntimeConfig

if TYPE_CHECKING:
    from pathlib import Path

    from gymgate.catalog import Need
    from gymgate.catalog.model import AgentInstance
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
    environments need. An ENV that cannot be set up is named; the others are, and the exit code is 1.
    """
    config = RuntimeConfig(version=version, python=python)
    report = _Report()
    with _progress() as say:
        report.runtimes.append(_made(config, (), None, say))
        if environments:
            _set_up(config, environments, report, say)
    if as_json:
        import orjson

        click.echo(orjson.dumps(report, option=orjson.OPT_INDENT_2))
    else:
        _print(report)
    if report.failed:
        click.get_current_context().exit(1)


@dataclass
class _Report:
    """What came of it; each entry but the first runtime names its environment."""

    runtimes: list[dict[str, Any]] = field(default_factory=list)
    commands: list[dict[str, str]] = field(default_factory=list)
    needs: list[dict[str, str]] = field(default_factory=list)
    """What no package index can give."""
    failed: list[dict[str, str]] = field(default_factory=list)
    """What one should have given, and the reason."""


def _print(report: _Report) -> None:
    for runtime in report.runtimes:
        beside = f" with {', '.join(runtime['requirements'])}" if runtime["requirements"] else ""
        user = f"{runtime['environment']}: " if runtime["environment"] else ""
        click.echo(f"{user}nemo-gym {runtime['nemo_gym']}{beside} at {runtime['python']}")
    for each in report.commands:
        click.echo(f"{each['environment']}: {each['agent']} runs {each['command']}")
    for need in report.needs:
        click.echo(
            f"{need['environment']} also needs, by its files: {need['kind']}: {need['detail']}", err=True
        )
    for each in report.failed:
        click.echo(f"gymgate: {each['environment']} is not set up: {each['detail']}", err=True)


def _set_up(config: RuntimeConfig, environments: Sequence[str], report: _Report, say: Progress) -> None:
    """Make each environment's runtime and its agents' commands; one that cannot be made costs the others nothing."""
    from gymgate.catalog import Catalog
    from gymgate.errors import NeedMissingError, SetupError
    from gymgate.runtime import ensure_runtime
    from gymgate.runtime.npm import PROGRAMS, ensure_program

    base = ensure_runtime(config, progress=say)
    catalog = Catalog(base.site, base.version)
    for name, environment in [(name, catalog.find(name)) for name in environments]:
        chosen = environment.config(None)
        for need in _left(chosen.needs, {agent.type for agent in chosen.agents} & {*PROGRAMS}):
            report.needs.append({"environment": name, "kind": need.kind, "detail": need.detail})
        try:
            if requirements := catalog.requirements(environment, chosen):
                report.runtimes.append(_made(config, requirements, name, say))
        except SetupError as error:
            report.failed.append({"environment": name, "detail": str(error)})
        for agent in chosen.agents:
            try:
                command = ensure_program(agent.type, _settings(chosen.path, agent), say)
            except NeedMissingError as error:
                report.needs.append({"environment": name, "kind": "binary", "detail": str(error)})
            except SetupError as error:
                report.failed.append({"environment": name, "detail": str(error)})
            else:
                if command is not None:
                    report.commands.append(
                        {"environment": name, "agent": agent.name, "command": str(command)}
                    )


def _settings(path: Path, agent: AgentInstance) -> dict[str, Any]:
    """The agent's settings as its config file has them, what it includes or interpolates left out."""
    import yaml

    block = (yaml.safe_load(path.read_text(encoding="utf-8")) or {}).get(agent.name)
    kinds = block.get("responses_api_agents") if isinstance(block, dict) else None
    settings = kinds.get(agent.type) if isinstance(kinds, dict) else None
    return settings if isinstance(settings, dict) else {}


def _left(needs: Sequence[Need], from_npm: Collection[str]) -> list[Need]:
    """What neither an index nor, for agents whose commands npm has, npm meets."""
    installers = tuple(f"({agent_type}/setup_" for agent_type in from_npm)
    return [
        need
        for need in needs
        if need.kind != _INSTALLED and not any(installer in need.detail for installer in installers)
    ]


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
