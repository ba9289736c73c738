"""Directories of stacks: for sockets, locks, logs and Ray's files."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gymgate.config import cache_dir
from gymgate.errors import SetupError

MAX_SOCKET_PATH = 107
_OWN, _SHARED, _RAY = "p", "shared", "gymgate-ray-"


def base_directory() -> Path:
    """Return a directory of this user alone whose path is short enough for sockets: runtime, cache or temporary directory."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    candidates = [Path(runtime) / "gymgate"] if runtime else []
    candidates += [cache_dir() / "run", Path(tempfile.gettempdir()) / f"gymgate-{os.getuid()}"]
    longest = MAX_SOCKET_PATH - len(f"/{_OWN}{2**22}-01234567/0123456789abcdef.sock")
    reasons = []
    for path in candidates:
        if len(os.fsencode(path)) > longest:
            reasons.append(f"{path}: too long for a socket's path")
            continue
        try:
            make_private(path)
            return path
        except OSError as error:
            reasons.append(f"{path}: {error.strerror or error}")
    raise SetupError(f"no directory for the stack's socket; set XDG_RUNTIME_DIR ({'; '.join(reasons)})")


def make_private(path: Path) -> None:
    """Make a directory that only this user can enter. Raises `OSError` if it belongs to another user."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat(follow_symlinks=False)
    if found.st_uid != os.getuid():
        raise PermissionError(1, f"belongs to user {found.st_uid}")
    if found.st_mode & 0o077:
        path.chmod(0o700)


def process_directory() -> Path:
    """Make a new directory for the stacks of this process, and remove those of dead processes."""
    base = base_directory()
    _remove_of_dead(base, _OWN)
    path = base / f"{_OWN}{os.getpid()}-{os.urandom(4).hex()}"
    make_private(path)
    return path


def ray_directory() -> Path:
    """Make a new private directory with a short path for a Ray that this process starts, and remove those of dead processes.

    Give Ray a directory inside it, because Ray makes its own directory readable for everybody.
    """
    base = Path("/tmp")
    _remove_of_dead(base, _RAY)
    return Path(tempfile.mkdtemp(prefix=f"{_RAY}{os.getpid()}-", dir=base))


def remove_ray_directories() -> None:
    """Remove what `ray_directory` made in this process, once no Ray of it runs."""
    for directory in Path("/tmp").glob(f"{_RAY}{os.getpid()}-*"):
        shutil.rmtree(directory, ignore_errors=True)


def shared_directory() -> Path:
    """Return the directory for stacks that every process of this user may use."""
    path = base_directory() / _SHARED
    make_private(path)
    return path


def salt() -> bytes:
    """Return this user's secret for names of stacks. It is made once and readable by this user alone. Blocks."""
    path = base_directory() / "salt"
    try:
        with locked(path):
            if not path.exists():
                new = path.with_suffix(".new")
                new.touch(mode=0o600)
                new.write_bytes(os.urandom(32))
                new.rename(path)
            return path.read_bytes()
    except OSError as error:
        raise SetupError(f"cannot write {path}: {error.strerror or error}") from error


def remove_traces(socket_path: Path, directory: Path) -> None:
    """Remove what a daemon leaves as it exits, and the directory of its process if that is dead.

    Logs stay if `state_dir` asked for them elsewhere, or if another daemon has taken over the socket.
    """
    if directory == socket_path.with_suffix(""):
        with contextlib.suppress(FileNotFoundError), locked(socket_path):
            if not socket_path.exists():
                shutil.rmtree(directory, ignore_errors=True)
    if _is_of_dead(socket_path.parent, _OWN):
        shutil.rmtree(socket_path.parent, ignore_errors=True)


@contextlib.contextmanager
def locked(socket_path: Path) -> Iterator[None]:
    """Hold the lock under which a stack's socket comes and goes. Blocks for milliseconds."""
    path = socket_path.with_suffix(".lock")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _remove_of_dead(base: Path, prefix: str) -> None:
    """Remove this user's directories of dead processes. Other users may have theirs in `base`."""
    for entry in base.glob(f"{prefix}*-*"):
        with contextlib.suppress(OSError):
            if entry.lstat().st_uid == os.getuid() and _is_of_dead(entry, prefix):
                shutil.rmtree(entry, ignore_errors=True)


def _is_of_dead(directory: Path, prefix: str) -> bool:
    """Whether a directory is called `<prefix><pid>-...` and that process is gone, or a zombie."""
    owner = directory.name.removeprefix(prefix).partition("-")[0]
    if not directory.name.startswith(prefix) or not owner.isdigit():
        return False
    try:
        return Path(f"/proc/{owner}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
