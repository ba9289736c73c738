"""Runs tests in a copy of the working tree, one mutation at a time."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TEST_LIMIT_S = 60
"""Time limit of one test."""
NOTHING_RAN = (4, 5)
"""What pytest exits with where the tests named are not there: no evidence."""


@dataclass(frozen=True)
class Outcome:
    """What the tests said."""

    code: int | None
    """Pytest's exit status; `None`: it was ended at its time limit."""
    seconds: float
    reason: str
    """The test that failed, or what else ended the run."""
    output: str

    @property
    def noticed(self) -> bool:
        """Whether a test failed; tests that are not there are no evidence."""
        return self.code not in (0, *NOTHING_RAN)


class Copy:
    """A copy of the working tree with a virtual environment that imports gymgate from it.

    Third-party packages are those of the interpreter that runs this. Temporary files and sockets lie beside the copy, so a stack
    of a mutant shares nothing with others on this machine but the cache of runtimes.
    """

    def __init__(self, root: Path, home: Path) -> None:
        self.home = home
        self.root = home / "tree"
        self.root.mkdir(parents=True)
        self._python = self.root / ".venv/bin/python"
        self._writes = int(time.time())
        self._running: subprocess.Popen[bytes] | None = None
        listed = subprocess.run(
            ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=root, check=True, capture_output=True
        )
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (root / name).is_file():  # deleted in the working tree otherwise
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, self.root / name, follow_symlinks=False)
        venv.create(self.root / ".venv", symlinks=True, with_pip=False)
        [site] = self.root.glob(".venv/lib/python*/site-packages")
        theirs = [path for path in sys.path if path.endswith("site-packages")]
        own = [str(self.root / "src"), str(self.root / "environments/nemo_gym_env")]
        (site / "gymgate.pth").write_text("\n".join([*own, *theirs, ""]))
        for name in ("run", "tmp"):
            (home / name).mkdir(mode=0o700)

    def try_mutation(self, path: Path, text: str, tests: Sequence[str], limit_s: float) -> Outcome:
        """Run the tests with `text` in the copy's file `path`, which is put back afterwards."""
        original = path.read_text()
        self._write(path, text)
        try:
            return self.run(["-x", *tests], limit_s)
        finally:
            self._write(path, original)

    def run(self, arguments: Sequence[str], limit_s: float) -> Outcome:
        """Run pytest; what it leaves running is ended."""
        command = [str(self._python), "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider"]
        command += [f"--timeout={TEST_LIMIT_S}", "--hypothesis-seed=0", *arguments]
        environment = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
            "XDG_RUNTIME_DIR": str(self.home / "run"),
            "TMPDIR": str(self.home / "tmp"),
        }
        log, began = self.home / "log", time.monotonic()
        with log.open("wb") as output:
            self._running = process = subprocess.Popen(
                command,
                cwd=self.root,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                self._end_all(process)
        text = log.read_text(errors="replace")
        return Outcome(code, time.monotonic() - began, _reason(code, text, limit_s), text)

    def stop(self) -> None:
        """End the run under way, from another thread."""
        if self._running is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._running.pid, signal.SIGKILL)

    def _write(self, path: Path, text: str) -> None:
        """Each time with another modification time: compiled code of an earlier mutation never fits."""
        path.write_text(text)
        self._writes += 1
        os.utime(path, (self._writes, self._writes))

    def _end_all(self, process: subprocess.Popen[bytes]) -> None:
        """End pytest and every process that runs in the copy: a mutant's daemon may wait for ever."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        marks = (os.fsencode(self.home) + b"/", os.fsencode(self.home) + b"\0")
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    known = os.fsencode((entry / "cwd").readlink()) + b"\0" + (entry / "environ").read_bytes()
                    if any(mark in known for mark in marks):
                        os.kill(int(entry.name), signal.SIGKILL)


def _reason(code: int | None, output: str, limit_s: float) -> str:
    if code is None:
        return f"hung: not through after {limit_s:g} s"
    if "+++ Timeout +++" in output or re.search(r"Failed: Timeout", output):
        return f"hung: a test took more than {TEST_LIMIT_S} s"
    if failed := re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE):
        return failed[1]
    return "" if code == 0 else f"pytest exited with {code}"
