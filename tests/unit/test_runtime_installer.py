"""uv's failures on one line, with real uv where it can be made to fail without a network."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from gymgate.core.config import SUPPORTED_NEMO_GYM
from gymgate.core.errors import SetupError
from gymgate.gym.runtime import uv
from gymgate.gym.runtime.ensure import explain_failure
from gymgate.gym.runtime.lockfile import LOCKS, package_of, pins, read_lock, split_lock
from gymgate.gym.runtime.uv import UvFailedError, condense, find_uv, kind_of, run_uv

NEW_WORDS = """\
Using Python 3.13.0 environment at: v
error: Failed to install: wandb-0.30.0.whl (wandb==0.30.0)
  cause: failed to copy file from `/c/a` to `/v/b`
  cause: No space left on device (os error 28)
"""
OLD_WORDS = """\
warning: something else
  × No solution found when resolving dependencies:
  ╰─▶ Because there is no version of six==9 and
      you require six==9, we can conclude that your
      requirements are unsatisfiable.

      hint: try something
"""


def test_condensed() -> None:
    assert kind_of(NEW_WORDS) == "disk"
    assert condense(NEW_WORDS, "disk") == "No space left on device (os error 28)"
    assert kind_of(OLD_WORDS) == "conflict"
    assert condense(OLD_WORDS) == (
        "No solution found when resolving dependencies: Because there is no version of six==9 and you require six==9, "
        "we can conclude that your requirements are unsatisfiable."
    )
    assert (
        condense("error: got 401 from https://user:secret@host/simple") == "got 401 from https://host/simple"
    )
    assert condense("\n").startswith("uv ")


GIT_WORDS = """\
   Updating https://github.com/a/b.git (HEAD)
error: Git operation failed
  cause: failed to clone into: /c/git-v1/db/297d2e6bd8ddcf52
  cause: process didn't exit successfully: `/usr/bin/git fetch --force 'https://github.com/a/b.git' '+HEAD'` (exit status: 128)
         --- stderr
         fatal: unable to access 'https://github.com/a/b.git/': Could not resolve host: github.com
"""
WHEEL_WORDS = """\
error: Failed to download `x @ https://h.example/x-1.0-py3-none-any.whl`
  cause: Request failed after 3 retries in 4.5s
  cause: Failed to fetch: https://h.example/x-1.0-py3-none-any.whl
  cause: dns error
  cause: failed to lookup address information: Name or service not known
"""


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            GIT_WORDS,
            (
                "b @ git+https://github.com/a/b.git@v1",
                "fatal: unable to access 'https://github.com/a/b.git/': Could not resolve host: github.com",
            ),
        ),
        (
            WHEEL_WORDS,
            (
                "x @ https://h.example/x-1.0-py3-none-any.whl",
                "failed to lookup address information: Name or service not known",
            ),
        ),
    ],
)
def test_a_requirement_that_is_elsewhere_is_not_the_indexs_fault(words: str, told: tuple[str, str]) -> None:
    wanted = ["a", "b @ git+https://github.com/a/b.git@v1", "x @ https://h.example/x-1.0-py3-none-any.whl"]
    error = UvFailedError(words)
    assert error.kind == "network"
    assert [part for part in told if part not in explain_failure(error, wanted)] == []
    assert "package index: " in explain_failure(error, wanted[:1])


def test_unreachable_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://user:secret@127.0.0.1:9/simple")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path))
    with pytest.raises(UvFailedError) as caught:
        run_uv("pip", "install", "--target", tmp_path / "t", "--python", sys.executable, "no-such-package")
    assert caught.value.kind == "network"
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_project_in_the_working_directory_plays_no_part(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "uv.toml").write_text("this is not toml")
    monkeypatch.chdir(tmp_path)
    run_uv("pip", "list", "--python", sys.executable)


def test_a_uv_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "uv"
    program.write_text("#!/bin/sh\nexec sleep 100\n")
    program.chmod(0o755)
    monkeypatch.setattr(uv, "find_uv", lambda: program)
    started = time.monotonic()
    with pytest.raises(UvFailedError, match=r"\b0\.2 s"):
        run_uv("pip", "list", timeout_s=0.2)
    assert time.monotonic() - started < 20


def test_no_uv(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "uv", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SetupError, match="pip install uv"):
        find_uv()


@pytest.mark.parametrize("release", SUPPORTED_NEMO_GYM)
def test_locks_that_ship(release: str) -> None:
    """Pinned and hashed throughout; no host, no path; both halves make the whole."""
    lock = read_lock(release)
    assert lock is not None
    own, others = split_lock(lock)
    assert "/" not in own + others
    assert "--index" not in lock
    assert own.startswith(f"nemo-gym=={release}")
    assert own.count("--hash=sha256:") == 2
    entries = [entry for entry in others.split("\n") if entry and not entry.startswith(" ")]
    assert len(entries) > 100
    assert all("==" in entry and entry.endswith("\\") for entry in entries)
    assert set(pins(lock)) == {package_of(entry) for entry in entries}
    assert pins(lock)["cffi"].startswith("cffi==")
    assert "--hash" not in "".join(pins(lock).values())


def test_releases() -> None:
    """Every supported release has a lock."""
    assert sorted(file.name for file in LOCKS.iterdir()) == sorted(
        f"nemo-gym-{release}.txt" for release in SUPPORTED_NEMO_GYM
    )
    assert read_lock("9.9.9") is None


def test_package_names() -> None:
    assert package_of("Typing_Extensions[x]>=4 ; python_version < '3'") == "typing-extensions"
    assert package_of("ruamel.yaml") == "ruamel-yaml"
