"""`./dev newest`: the fast lanes with the newest verifiers, TRL and nemo-gym of the package index, pre-releases included.

Of a nemo-gym that gymgate does not support yet it prints the names that our code uses and the release lacks.

Runs in .venv-newest, where pyproject.toml's upper bounds for these packages are lifted. A lane that fails does not stop
the others; the exit code is 1 if any did.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from gymgate.core.config import DEFAULT_NEMO_GYM, RuntimeConfig
from gymgate.core.errors import GymgateError
from gymgate.gym.inside import names
from gymgate.gym.runtime import ensure_runtime
from gymgate.gym.runtime.uv import run_uv

ROOT = Path(__file__).parents[1]
INSIDE = Path(names.__file__).parents[1]
FAST = ("-m", "not gym and not heavy", "-q", "--tb=line", "-p", "no:cacheprovider")
LANES = {
    "tests": ("--ignore", "tests/training", "-n", "2", "--dist", "loadfile"),
    "tests/training": ("tests/training",),
}
GYM = (
    ("setup",),
    ("list", "--json"),
    ("run", "mcqa", "-r", "2"),
    ("run", "example_session_state_mgmt", "-r", "2"),
)
"""Commands that are run with a nemo-gym that gymgate does not support yet."""


def locked(package: str) -> str:
    lines = (ROOT / "locks" / "train.txt").read_text()
    found = re.search(rf"^{package}==(\S+)", lines, re.MULTILINE)
    return found[1] if found else "(none)"


def newest_nemo_gym() -> str:
    wanted = ROOT / ".venv-newest" / "nemo-gym.in"
    wanted.write_text("nemo-gym\n")
    quiet = ("-q", "--prerelease", "allow", "--no-deps", "--no-header", "--no-annotate")
    pinned = run_uv("pip", "compile", *quiet, "--python-version", "3.14", wanted)
    return pinned.strip().removeprefix("nemo-gym==")


def has_names(release: str) -> bool:
    """Whether a release has every name of `nemo_gym` that our code uses; those that it lacks are printed."""
    try:
        python = ensure_runtime(RuntimeConfig(version=release)).python
    except GymgateError as error:
        print(error)
        return False
    return passes(str(python), "-I", names.__file__)


def servers_of(release: str) -> str:
    """Return whether a release's servers are lean, or what of its code was not checked."""
    program = (
        f"import sys; sys.path.insert(0, {str(INSIDE)!r}); from inside import lean; "
        "print(lean.unchecked(lean.CHECKED) or 'lean')"
    )
    try:
        python = ensure_runtime(RuntimeConfig(version=release)).python
    except GymgateError as error:
        return str(error)
    return subprocess.run(
        (python, "-I", "-c", program), check=True, capture_output=True, text=True
    ).stdout.strip()


def passes(*command: str) -> bool:
    print("$", *command[1:], flush=True)
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def main() -> int:
    report = [
        f"{name}: locked {locked(name)}, newest {metadata.version(name)}" for name in ("verifiers", "trl")
    ]
    failed = [
        f"{lane} with these versions"
        for lane, arguments in LANES.items()
        if not passes(sys.executable, "-m", "pytest", *FAST, *arguments)
    ]
    release = newest_nemo_gym()
    report.append(f"nemo-gym: default {DEFAULT_NEMO_GYM}, newest {release}")
    if release != DEFAULT_NEMO_GYM:
        report.append(f"servers of nemo-gym {release}: {servers_of(release)}")
        failed += [] if has_names(release) else [f"names of nemo-gym {release}"]
        failed += [
            f"gymgate {' '.join(command)} with nemo-gym {release}"
            for command in GYM
            if not passes(sys.executable, "-m", "gymgate", *command, "--gym", release)
        ]
    print("", *report, *(f"FAILED: {each}" for each in failed), sep="\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
