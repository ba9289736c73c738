"""Where a stack's socket, lock and logs are."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gymgate.config import StackConfig, cache_dir
from gymgate.errors import SetupError

MAX_SOCKET_PATH = 107
_OWN = "p"
_SHARED = "shared"
_RAY = "gymgate-ray-"


def base_directory() -> Path:
    """A directory of this user's alone, short enough to hold sockets: runtime, cache or temporary directory."""
    candidates = (
        [Path(os.environ["XDG_RUNTIME_DIR"]) / "gymgate"] if os.environ.get("XDG_RUNTIME_DIR") else []
    )
    candidates += [cache_dir() / "run", Path(tempfile.gettempdir()) / f"gymgate-{os.getuid()}"]
    room = MAX_SOCKET_PATH - len(f"/{_OWN}{2**22}-01234567/0123456789abcdef.sock")
    reasons = []
    for path in candidates:
        if len(os.fsencode(path)) > room:
            reasons.append(f"{path}: too long for a socket's path")
            continue
        try:
            make_private(path)
            return path
        except OSError as error:
            reasons.append(f"{path}: {error.strerror or error}")
    raise SetupError(f"no directory for the stack's socket; set XDG_RUNTIME_DIR ({'; '.join(reasons)})")


def make_private(path: Path) -> None:
    """Make the directory, or check that it is ours alone; `OSError` if it is not."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat(follow_symlinks=False)
    if found.st_uid != os.getuid():
        raise PermissionError(1, f"belongs to user {found.st_uid}")
    if found.st_mode & 0o077:
        path.chmod(0o700)


def process_directory() -> Path:
    """A new directory for the stacks of this process; those of dead processes are removed on the way."""
    base = base_directory()
    _remove_left(base, _OWN)
    path = base / f"{_OWN}{os.getpid()}-{os.urandom(4).hex()}"
    make_private(path)
    return path


def ray_directory() -> Path:
    """A new directory, ours alone, for the files and sockets of a Ray that this process starts; its path is short.

    Those of dead processes are removed on the way. Ray opens the directory that it is given to everybody: give it one in this.
    """
    base = Path("/tmp")
    _remove_left(base, _RAY)
    return Path(tempfile.mkdtemp(prefix=f"{_RAY}{os.getpid()}-", dir=base))


def shared_directory() -> Path:
    """For stacks that every process of this user may use."""
    path = base_directory() / _SHARED
    make_private(path)
    return path


def salt() -> bytes:
    """Return the secret that hides what stacks are named for: made once, readable by this user alone. Blocks."""
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
    """What a daemon removes as it exits: its logs, unless they were wanted elsewhere or another daemon has taken its
    place, and what a dead process left."""
    if directory == socket_path.with_suffix(""):
        with contextlib.suppress(FileNotFoundError), locked(socket_path):
            if not socket_path.exists():
                shutil.rmtree(directory, ignore_errors=True)
    if _is_left(socket_path.parent, _OWN):
        shutil.rmtree(socket_path.parent, ignore_errors=True)


def _remove_left(base: Path, prefix: str) -> None:
    """Remove our directories of dead processes; `base` may be everybody's."""
    for entry in base.glob(f"{prefix}*-*"):
        with contextlib.suppress(OSError):
            if entry.lstat().st_uid == os.getuid() and _is_left(entry, prefix):
                shutil.rmtree(entry, ignore_errors=True)


def _is_left(directory: Path, prefix: str) -> bool:
    """Whether it is a directory `<prefix><pid>-...` of a dead process."""
    owner = directory.name.removeprefix(prefix).partition("-")[0]
    return directory.name.startswith(prefix) and owner.isdigit() and _has_ended(owner)


def _has_ended(pid: str) -> bool:
    """Whether there is no such process any more, or one whose parent has yet to hear of its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def log_directory(config: StackConfig, socket_path: Path) -> Path:
    """For a stack's logs: in `state_dir` if it is given, where it stays; else beside the socket."""
    if config.state_dir is None:
        path = socket_path.with_suffix("")
    else:
        state = Path(config.state_dir).expanduser().absolute()
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = state / socket_path.stem
    return path


@contextlib.contextmanager
def locked(socket_path: Path) -> Iterator[None]:
    """Hold the lock under which a stack's socket comes and goes. Blocks, for milliseconds."""
    path = socket_path.with_suffix(".lock")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
