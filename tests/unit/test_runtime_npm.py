"""Commands that agents run, with an npm of our own that installs or fails."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from gymgate.core.errors import NeedMissingError, SetupError
from gymgate.gym.runtime.npm import ensure_agent_command

NPM = """#!/bin/sh
echo "$@" >> {log}
while [ "$1" != --prefix ]; do shift; done
[ -e {fails} ] && {{ echo "npm error code E404" >&2; echo "npm error 404 no such package" >&2; exit 1; }}
mkdir -p "$2/bin" "$2/lib/node_modules/@openai/codex"
echo "#!/bin/sh" > "$2/bin/codex" && chmod +x "$2/bin/codex"
"""


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its log; a file `fails` beside it makes it fail."""
    programs, log = tmp_path / "programs", tmp_path / "npm.log"
    programs.mkdir()
    (programs / "npm").write_text(NPM.format(log=log, fails=tmp_path / "fails"))
    (programs / "npm").chmod(0o755)
    for name in ("mkdir", "chmod"):
        (programs / name).symlink_to(shutil.which(name) or name)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("GYMGATE_CACHE", str(tmp_path / "cache"))
    return log


def test_a_command_is_installed_once_in_the_version_of_the_config(npm: Path) -> None:
    found: list[Path | None] = []

    def install() -> None:
        found.append(ensure_agent_command("codex_agent", {"codex_version": "0.1.2"}, lambda line: None))

    threads = [threading.Thread(target=install) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({*found}) == 1
    assert found[0] is not None
    assert found[0].is_file()
    assert "@openai/codex@0.1.2" in npm.read_text()
    assert len(npm.read_text().splitlines()) == 1
    other = ensure_agent_command("codex_agent", {"codex_version": None}, lambda line: None)
    assert other != found[0]
    assert "@openai/codex@latest" in npm.read_text()


@pytest.mark.parametrize(
    ("wanted", "installed"), [(None, False), ("1.2.3", False), ("1.2.4", True), ("2.3", True)]
)
def test_a_command_on_path_is_used_unless_another_version_is_asked_for(
    npm: Path, tmp_path: Path, wanted: str | None, installed: bool
) -> None:
    (tmp_path / "programs" / "codex").write_text("#!/bin/sh\necho codex-cli 1.2.3\n")
    (tmp_path / "programs" / "codex").chmod(0o755)
    found = ensure_agent_command("codex_agent", {"codex_version": wanted}, lambda line: None)
    assert (found is not None) == installed
    assert ensure_agent_command("simple_agent", {}, lambda line: None) is None
    assert npm.exists() == installed


def test_without_npm_the_need_is_named(npm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(NeedMissingError, match=r"'codex'.*@openai/codex") as caught:
        ensure_agent_command("codex_agent", {}, lambda line: None)
    assert caught.value.need == "codex (npm: @openai/codex)"


def test_npms_reason_is_told_and_nothing_is_left(npm: Path, tmp_path: Path) -> None:
    (tmp_path / "fails").touch()
    with pytest.raises(SetupError, match="@openai/codex@latest: code E404 404 no such package"):
        ensure_agent_command("codex_agent", {}, lambda line: None)
    assert [path.name for path in (tmp_path / "cache" / "npm").iterdir()] == [".lock"]
