"""The needs of each of NeMo Gym's sandbox providers, and the providers that can be used on this machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from gymgate.gym.runtime.command import CommandError, run_command
from gymgate.gym.runtime.variables import clean_env

_TIMEOUT_S = 10.0
START_TIMEOUT_S = 60.0
"""For the daemon of a provider to answer before it is refused; that of a busy machine may take long."""


@dataclass(frozen=True)
class ProviderNeeds:
    """The needs of a provider beside NeMo Gym."""

    program: str | None = None
    """On `PATH`."""
    requirements: tuple[str, ...] = ()
    """PyPI requirements, which gymgate installs on first use; those of nemo-gym 0.7.0's extras `sandbox` and `openshell`."""
    variables: tuple[str, ...] = ()
    """Environment variables that must be set, and that servers see if they are named (`--env-var`)."""
    note: str = ""


PROVIDERS: Mapping[str, ProviderNeeds] = MappingProxyType(
    {
        "apptainer": ProviderNeeds(program="apptainer"),
        "daytona": ProviderNeeds(
            requirements=("daytona>=0.179.0", "tenacity>=9.1.4"), variables=("DAYTONA_API_KEY",)
        ),
        "docker": ProviderNeeds(program="docker"),
        "e2b": ProviderNeeds(requirements=("e2b>=2.36.0,<3.0.0",), variables=("E2B_API_KEY",)),
        "ecs_fargate": ProviderNeeds(requirements=("boto3>=1.34",), variables=("AWS_REGION",)),
        "enroot": ProviderNeeds(program="enroot"),
        "local": ProviderNeeds(note="runs commands on this machine as this user, without a boundary"),
        "opensandbox": ProviderNeeds(
            requirements=("opensandbox>=0.1.15", "tenacity>=9.1.4"), variables=("OPENSANDBOX_API_KEY",)
        ),
        "openshell": ProviderNeeds(
            requirements=("openshell>=0.0.92,<0.1",), variables=("OPENSHELL_GATEWAY_ENDPOINT",)
        ),
    }
)
"""By NeMo Gym's name."""


class ProviderCheck(NamedTuple):
    """Whether a provider can be used on this machine."""

    provider: str
    usable: bool
    detail: str
    """Why not, or what is worth knowing."""


def check_provider(name: str, timeout_s: float = _TIMEOUT_S) -> ProviderCheck:
    """Return whether a provider has its program, its daemon and its variables here. Blocks, for `timeout_s` at most.

    No account is tried: a key that is set may be wrong.
    """
    needs = PROVIDERS.get(name, ProviderNeeds())
    path = shutil.which(needs.program) if needs.program else None
    if needs.program and path is None:
        return ProviderCheck(name, False, f"{needs.program} is not on PATH")
    if missing := [variable for variable in needs.variables if not os.environ.get(variable)]:
        return ProviderCheck(name, False, f"{' and '.join(missing)} is not set")
    if path is not None:
        return _docker(path, timeout_s) if name == "docker" else ProviderCheck(name, True, path)
    return ProviderCheck(name, True, needs.note or f"with --env-var {' --env-var '.join(needs.variables)}")


def _docker(path: str, timeout_s: float) -> ProviderCheck:
    command = [path, "version", "--format", "{{.Server.Version}}"]
    try:
        version = run_command(command, env=clean_env(), timeout_s=timeout_s).strip()
    except CommandError as error:
        lines = (error.errors or str(error)).strip().splitlines()
        return ProviderCheck(
            "docker", False, f"{path} reaches no daemon ({lines[-1] if lines else 'no answer'})"
        )
    return ProviderCheck("docker", True, f"{path}, daemon {version}")


def why_unusable(name: str, settings: Mapping[str, Any], choices: Iterable[str]) -> str | None:
    """Return a sentence on a provider whose program or daemon is not here, with those of `choices` that can be used.

    `None` if it can be used, or cannot be judged. Blocks.
    """
    if name not in PROVIDERS or not PROVIDERS[name].program or "bin_path" in settings:
        return None  # a setting names the program
    check = check_provider(name, START_TIMEOUT_S)
    if check.usable:
        return None
    others = usable_choices(choice for choice in choices if choice != name)
    return f"sandbox provider {name!r} cannot be used: {check.detail}; {others}"


def usable_choices(names: Iterable[str]) -> str:
    """Return a sentence with the providers that can be used here, or with what the others lack. Blocks, as `check_provider`."""
    checks = [check_provider(name) for name in names]
    usable = [check.provider for check in checks if check.usable]
    notes = {"local": "local (without a boundary)"}
    if usable:
        return f"here it can be {', '.join(notes.get(name, name) for name in usable)}"
    return "none can be used here: " + "; ".join(f"{check.provider}: {check.detail}" for check in checks)


def provider_requirements(name: str) -> tuple[str, ...]:
    """Return the PyPI requirements of a provider; none for one that is not NeMo Gym's own."""
    return PROVIDERS.get(name, ProviderNeeds()).requirements


def undeclared_variables(name: str, env_vars: Iterable[str]) -> list[str]:
    """Return the variables that a provider reads and that servers do not see, because `env_vars` leaves them out."""
    return [
        variable for variable in PROVIDERS.get(name, ProviderNeeds()).variables if variable not in {*env_vars}
    ]
