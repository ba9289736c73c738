"""npm packages that ask for another Node.js, or ship a lock file, with an npm of our own; and one real one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from gymgate.core.errors import SetupError
from gymgate.gym.runtime.npm import install_package

NPM = """#!/usr/bin/env python3
import json, pathlib, sys
words = sys.argv[1:]
with open({log!r}, "a") as log:
    print(*words, file=log)
if "--prefix" not in words:  # in the package's directory, by its lock
    pathlib.Path("node_modules/ai/package.json").write_text('{{"version": "0.1.0"}}')
    sys.exit()
prefix = pathlib.Path(words[words.index("--prefix") + 1])
if any(word.startswith("node-") for word in words):
    (prefix / "bin/node").write_text("")
    (prefix / "bin/node").chmod(0o755)
    sys.exit()
if {engines!r}:
    print("npm warn EBADENGINE Unsupported engine {{", file=sys.stderr)
module = prefix / "lib/node_modules/@some/agent"
(module / "node_modules/ai").mkdir(parents=True)
(module / "package.json").write_text(json.dumps({{"engines": {engines!r}}}))
(module / "node_modules/ai/package.json").write_text('{{"version": "0.1.9"}}')
if {locked!r}:
    (module / "npm-shrinkwrap.json").write_text("{{}}")
(module / "cli").write_text("")
(module / "cli").chmod(0o755)
(prefix / "bin").mkdir()
(prefix / "bin/agent").symlink_to("../lib/node_modules/@some/agent/cli")
"""


class Npm:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.place = directory / "place"

    def install(
        self, engines: dict[str, str] | None = None, locked: bool = False, command: str = "agent"
    ) -> list[str]:
        """What npm was called with, the prefix left out. npm warns of `engines`."""
        log, prefix = self.directory / "log", self.directory / "unfinished" / "made"
        prefix.parent.mkdir()
        program = self.directory / "npm"
        program.write_text(NPM.format(log=str(log), engines=engines or {}, locked=locked))
        program.chmod(0o755)
        install_package(str(program), "@some/agent", "1.2.3", command, prefix)
        prefix.rename(self.place)
        return log.read_text().replace(f" --prefix {prefix}", "").splitlines()


@pytest.fixture
def npm(tmp_path: Path) -> Npm:
    return Npm(tmp_path)


def test_a_package_that_asks_for_another_node_gets_one_of_its_own(npm: Npm) -> None:
    calls = npm.install(engines={"node": ">=22.19.0", "npm": ">=10"})
    assert "@some/agent@1.2.3" in calls[0]
    assert [call.split()[-1].split("@")[1:] for call in calls[1:]] == [[">=22.19.0"]]
    assert sorted(path.name for path in (npm.place / "bin").iterdir()) == ["agent", "node"]


def test_a_warning_about_a_dependency_alone_installs_no_node(npm: Npm) -> None:
    assert len(npm.install(engines={"npm": ">=10"})) == 1


@pytest.mark.parametrize(("locked", "version"), [(True, "0.1.0"), (False, "0.1.9")])
def test_a_package_gets_the_dependencies_of_its_own_lock_file(npm: Npm, locked: bool, version: str) -> None:
    npm.install(locked=locked)
    dependency = npm.place / "lib/node_modules/@some/agent/node_modules/ai/package.json"
    assert json.loads(dependency.read_text()) == {"version": version}


def test_a_package_without_the_command_is_an_error(npm: Npm) -> None:
    with pytest.raises(SetupError, match="'other'"):
        npm.install(command="other")


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_pi_starts_with_the_node_it_needs(tmp_path: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("there is no npm")
    made = tmp_path / "unfinished" / "made"
    made.parent.mkdir()
    install_package(npm, "@earendil-works/pi-coding-agent", "0.80.2", "pi", made)
    made.rename(tmp_path / "place")
    programs = tmp_path / "place" / "bin"
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["pi", "--version"], check=True, capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.stdout.strip() == "0.80.2"
