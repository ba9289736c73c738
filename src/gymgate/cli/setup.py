"""`gymgate setup`: install NeMo Gym ahead of time."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gymgate.cli.options import gym_option, json_option
from gymgate.cli.output import echo, log, print_json
from gymgate.core.config import RuntimeConfig
from gymgate.core.errors import printable

if TYPE_CHECKING:
    from gymgate.gym.runtime.command import Progress


@click.command(name="setup")
@click.argument("environments", nargs=-1, metavar="[ENV]...")
@gym_option
@click.option(
    "--python", metavar="PYTHON", help="Interpreter to use: a path, a command or a version. [found]"
)
@json_option
def command(environments: Sequence[str], gym: RuntimeConfig, python: str | None, as_json: bool) -> None:
    """Install NeMo Gym, and what environments need, ahead of time.

    NeMo Gym gets its own virtual environment. Runs work without a network afterwards. Without ENV, only the
    release is installed, which is all that most environments need. If an ENV cannot be set up, the command says why,
    sets up the others, and exits with 1.
    """
    config = gym.model_copy(update={"python": python})
    report = SetupReport()
    with _progress() as progress:
        if environments:
            from gymgate.gym.runtime import open_catalog

            catalog = open_catalog(config, progress=progress)
            for name in environments:
                catalog.refuse_unknown(name)
        report.add_runtime(config, progress)
        if environments:
            report.add_environments(config, environments, progress)
    if as_json:
        print_json(report)
    else:
        report.print()
    if report.failed:
        click.get_current_context().exit(1)


@dataclass(frozen=True)
class InstalledRuntime:
    """A runtime that is there now."""

    environment: str | None
    """Whose requirements it has; `None`: the release alone."""
    nemo_gym: str
    python: Path
    site: Path
    """The directory of its packages."""
    requirements: Sequence[str]
    seconds: float


@dataclass(frozen=True)
class InstalledCommand:
    """A command that an agent runs."""

    environment: str
    agent: str
    command: str


@dataclass(frozen=True)
class OpenNeed:
    """A need that the user has to meet: no package index does."""

    environment: str
    kind: str
    detail: str


@dataclass(frozen=True)
class FailedSetup:
    """Packages or a command that could not be installed."""

    environment: str
    detail: str


@dataclass(frozen=True)
class SetupReport:
    """What `gymgate setup --json` prints."""

    runtimes: list[InstalledRuntime] = field(default_factory=list)
    commands: list[InstalledCommand] = field(default_factory=list)
    needs: list[OpenNeed] = field(default_factory=list)
    failed: list[FailedSetup] = field(default_factory=list)

    def add_runtime(
        self,
        config: RuntimeConfig,
        progress: Progress,
        requirements: Sequence[str] = (),
        environment: str | None = None,
    ) -> None:
        from gymgate.gym.runtime import ensure_runtime

        started = time.monotonic()
        runtime = ensure_runtime(config, requirements, progress=progress)
        self.runtimes.append(
            InstalledRuntime(
                environment,
                nemo_gym=runtime.version,
                python=runtime.python,
                site=runtime.site,
                requirements=runtime.requirements,
                seconds=round(time.monotonic() - started, 1),
            )
        )

    def add_environments(self, config: RuntimeConfig, names: Sequence[str], progress: Progress) -> None:
        """Install each environment's requirements and its agents' commands; a failure does not affect the others."""
        from gymgate.core.errors import NeedMissingError, SetupError
        from gymgate.gym.runtime import open_catalog
        from gymgate.gym.runtime.npm import AGENT_COMMANDS, ensure_agent_command

        catalog = open_catalog(config, progress=progress)
        for name, env_config in [(name, catalog.find(name).config(None)) for name in names]:
            # npm installs these agents' commands, so their own installation scripts are no need of the user's.
            scripts = [f"({agent.type}/setup_" for agent in env_config.agents if agent.type in AGENT_COMMANDS]
            for need in env_config.needs:
                if need.kind != "package" and not any(script in need.detail for script in scripts):
                    self.needs.append(OpenNeed(name, need.kind, need.detail))
            try:
                if env_config.requirements:
                    self.add_runtime(config, progress, env_config.requirements, name)
            except SetupError as error:
                self.failed.append(FailedSetup(name, str(error)))
            for agent in env_config.agents:
                try:
                    if command := ensure_agent_command(agent.type, agent.block, progress):
                        self.commands.append(InstalledCommand(name, agent.name, str(command)))
                except NeedMissingError as error:
                    self.needs.append(OpenNeed(name, "binary", str(error)))
                except SetupError as error:
                    self.failed.append(FailedSetup(name, str(error)))

    def print(self) -> None:
        for runtime in self.runtimes:
            beside = f" with {', '.join(runtime.requirements)}" if runtime.requirements else ""
            user = f"{runtime.environment}: " if runtime.environment else ""
            echo(f"{user}nemo-gym {runtime.nemo_gym}{beside} at {runtime.python}")
        for installed in self.commands:
            echo(f"{installed.environment}: {installed.agent} runs {installed.command}")
        for need in self.needs:
            log(f"{need.environment} also needs {need.kind}: {need.detail}")
        for failure in self.failed:
            log(f"gymgate: {failure.environment} is not set up: {failure.detail}")


@contextmanager
def _progress() -> Iterator[Progress]:
    """Report progress on stderr: on a terminal in one changing line with the warnings above it, else line by line."""
    if not sys.stderr.isatty():
        yield log
        return
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True)
    with console.status("looking for NeMo Gym") as status:

        def progress(line: str) -> None:
            if line.startswith("warning: "):
                console.print(printable(line), markup=False, highlight=False)
            else:
                status.update(escape(printable(line)))

        yield progress
