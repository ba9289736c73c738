"""npm packages that ask for another Node.js, or ship a lock file, with an npm of our own; and one real one."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from gymgate.errors import SetupError
from gymgate.runtime.npm import install_package

NPM = """#!/usr/bin/env python3
import json, pathlib, sys
words = sys.argv[1:]
with open({log!r}, "a") as log:
    print(*words, file=log)
if "--engine-strict" in words and {refuses!r}:
    print("npm error code EBADENGINE", file=sys.stderr)
    print("npm error notsup Not compatible with your version of node/npm: " + {refuses!r}, file=sys.stderr)
    print('npm error notsup Required: {{"node":">=22.19.0"}}', file=sys.stderr)
    sys.exit(1)
if "--prefix" not in words:  # in the package's directory, by its lock
    pathlib.Path("node_modules/ai/package.json").write_text('{{"version": "0.1.0"}}')
    sys.exit()
prefix = pathlib.Path(words[words.index("--prefix") + 1])
module = prefix / "lib/node_modules/@some/agent"
(module / "node_modules/ai").mkdir(parents=True)
(module / "node_modules/ai/package.json").write_text('{{"version": "0.1.9"}}')
if {locked!r}:
    (module / "npm-shrinkwrap.json").write_text({locked!r})
(module / "cli").write_text("#!/bin/sh\\necho ran with $1 by $(command -v node)\\n")
(module / "cli").chmod(0o755)
(prefix / "bin").mkdir()
(prefix / "bin/agent").symlink_to("../lib/node_modules/@some/agent/cli")
if any(word.startswith("node-") for word in words):
    (prefix / "bin/node").write_text("")
    (prefix / "bin/node").chmod(0o755)
"""
LOCKED = json.dumps(
    {"packages": {"": {"version": "1.2.3"}, "node_modules/ai": {"version": "0.1.0"}, "node_modules/gone": {}}}
)


class Npm:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.place = directory / "place"

    def install(self, refuses: str = "", locked: str = "", command: str = "agent") -> list[str]:
        """What npm was called with, the prefix left out."""
        log, prefix = self.directory / "log", self.directory / "unfinished" / "made"
        prefix.parent.mkdir()
        program = self.directory / "npm"
        program.write_text(NPM.format(log=str(log), refuses=refuses, locked=locked))
        program.chmod(0o755)
        install_package(str(program), "@some/agent", "1.2.3", command, prefix, self.place)
        prefix.rename(self.place)
        return log.read_text().replace(f" --prefix {prefix}", "").splitlines()


@pytest.fixture
def npm(tmp_path: Path) -> Npm:
    return Npm(tmp_path)


def test_a_package_that_asks_for_another_node_gets_one_of_its_own(npm: Npm) -> None:
    calls = npm.install(refuses="@some/agent@1.2.3")
    assert len(calls) == 2
    assert "--engine-strict" not in calls[1]
    assert "@some/agent@1.2.3 node-" in calls[1]
    assert calls[1].endswith("@>=22.19.0")
    done = subprocess.run(
        [npm.place / "bin/agent", "words"], check=True, capture_output=True, text=True, timeout=10
    )
    assert done.stdout.strip() == f"ran with words by {npm.place / 'bin/node'}"


def test_a_dependency_that_asks_for_another_node_is_left_to_npm(npm: Npm) -> None:
    calls = npm.install(refuses="some-dependency@4.5.6")
    assert calls[1].endswith("@some/agent@1.2.3")
    assert (npm.place / "bin/agent").is_symlink()


@pytest.mark.parametrize(("locked", "calls"), [(LOCKED, 2), ("", 1), ("{}", 1), ("not JSON", 1)])
def test_a_package_gets_the_dependencies_of_its_own_lock_file(npm: Npm, locked: str, calls: int) -> None:
    made = npm.install(locked=locked)
    assert len(made) == calls
    assert ("--omit=dev --ignore-scripts" in made[-1]) == (calls == 2)
    version = json.loads(
        (npm.place / "lib/node_modules/@some/agent/node_modules/ai/package.json").read_text()
    )
    assert version == {"version": "0.1.0" if calls == 2 else "0.1.9"}


def test_a_package_without_the_command_is_an_error(npm: Npm) -> None:
    with pytest.raises(
        SetupError, match=r"cannot install @some/agent@1\.2\.3: the package has no command 'other'"
    ):
        npm.install(command="other")


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_pi_starts_with_the_node_it_needs(tmp_path: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("there is no npm")
    made = tmp_path / "unfinished" / "made"
    made.parent.mkdir()
    install_package(npm, "@earendil-works/pi-coding-agent", "0.80.2", "pi", made, tmp_path / "place")
    made.rename(tmp_path / "place")
    done = subprocess.run(
        [tmp_path / "place/bin/pi", "--version"], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "0.80.2"
