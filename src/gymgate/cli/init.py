"""`gymgate init`: an environment of the user's own, from the template that ships with gymgate."""

from __future__ import annotations

import keyword
import re
import shlex
from importlib import resources
from pathlib import Path

import click
import yaml
from pydantic import BaseModel

from gymgate.cli.environments import writable_path
from gymgate.cli.options import DIRECTORY
from gymgate.cli.output import echo
from gymgate.core.config import POLICY
from gymgate.core.errors import ConfigError, DataError, OptionError
from gymgate.gym.catalog import Catalog
from gymgate.gym.inside.resolve import RESOURCES
from gymgate.gym.runtime import open_catalog
from gymgate.runs.counted.counts import OVERALL

TEMPLATE = resources.files("gymgate") / "template"
"""Laid out as a user's own repository: `gymgate check` runs it as it is."""
NAME, CLASS = "my_environment", "MyEnvironment"
"""What the template is called; the user's name takes their place in its files and their paths."""


@click.command("init")
@click.argument("name")
@click.option(
    "-o",
    "--output",
    "directory",
    type=DIRECTORY,
    metavar="DIR",
    help="Repository to write resources_servers/NAME into; made if it is not there. [./NAME]",
)
def command(name: str, directory: Path | None) -> None:
    """Write a new environment, for you to change.

    It has a resources server with a tool and a reward, rows, recorded rollouts and tests, and passes gymgate check. Nothing is
    installed.

    \b
    gymgate init warehouse
    gymgate check warehouse
    """
    refuse_name(name, open_catalog())
    root = directory or Path(name)
    target = root / RESOURCES / name
    if directory is None and root.exists():
        raise ConfigError(f"{name!r} exists already; add the environment to a repository with -o DIR")
    if target.exists():
        raise ConfigError(f"{str(target)!r} exists already; choose another name")
    write_environment(name, root)
    only = len([*(root / RESOURCES).iterdir()]) == 1
    argument = shlex.quote(str(root if only else target))
    echo(f"{target}: app.py has the tool and the reward, README.md says what to change")
    echo(f"next: gymgate check {argument}  |  gymgate run {argument} -b URL -m MODEL")


def refuse_name(name: str, catalog: Catalog) -> None:
    """Raise `OptionError` for a name that cannot be one of Python and YAML, `ConfigError` for one that is taken."""
    # It becomes the name of a directory and of files, which file systems bound.
    is_word = re.fullmatch(r"[a-z][a-z0-9_]{0,99}", name) and not keyword.iskeyword(name)
    # NeMo Gym makes it a field of a model, and the model's own methods (json, copy) would hide it; tables call the sum of all so.
    is_other = hasattr(BaseModel, name) or name == OVERALL
    if not is_word or is_other or yaml.safe_load(name) != name:
        raise OptionError(
            f"{name!r} cannot be an environment's name; write a word like warehouse or tool_use_2"
        )
    if name in (POLICY, *(entry.name for entry in catalog.environments())):
        raise ConfigError(f"{name!r} is taken in nemo-gym {catalog.version}; choose another name")


def write_environment(name: str, root: Path) -> None:
    """Write the template under a name. Raises `DataError` if that cannot be done."""
    writable_path(root / RESOURCES)
    capitalized = "".join(word.capitalize() for word in name.split("_"))

    def write(source: resources.abc.Traversable, target: Path) -> None:
        for entry in source.iterdir():
            path = target / entry.name.replace(NAME, name)
            if entry.is_file():
                target.mkdir(parents=True, exist_ok=True)
                path.write_text(entry.read_text().replace(NAME, name).replace(CLASS, capitalized))
            elif entry.name != "__pycache__":  # installers compile the template's files
                write(entry, path)

    try:
        write(TEMPLATE, root)
    except OSError as error:
        raise DataError(f"cannot write {root}: {error.strerror}", path=str(root)) from None
