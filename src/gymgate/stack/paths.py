"""Directories of stacks: for sockets, locks, logs and Ray's files."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gymgate.core.config import cache_dir
from gymgate.core.errors import SetupError
from gymgate.gym.runtime.locks import locked
from gymgate.gym.runtime.owners import has_ended, owner

MAX_SOCKET_PATH = 107
"""Bytes that Linux takes for a socket's path, without the final zero."""
_OWN, _SHARED, _RAY = "p-", "shared", "gym-ray-"
"""Beginnings of names. Ray's is short because the sockets in its directory have long names."""
_RAY_BASE = Path("/tmp")


def base_directory() -> Path:
    """Return a directory of this user alone whose path is short enough for sockets: runtime, temporary or cache directory.

    The cache comes last, because other machines may share it.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    candidates = [Path(runtime) / "gymgate"] if runtime else []
    candidates += [Path(tempfile.gettempdir()) / f"gymgate-{os.getuid()}", cache_dir() / "run"]
    longest = MAX_SOCKET_PATH - len(f"/{_OWN}01234567-{2**22}-01234567/0123456789abcdef.sock")
    reasons: list[str] = []
    for path in candidates:
        if len(os.fsencode(path)) > longest:
            reasons.append(f"{path}: too long for a socket's path")
            continue
        try:
            is_users = runtime and path.parent == Path(runtime) and path.parent.exists()
            # Not another user's than this one's and root's, as after `su`: whoever owns it can exchange what is in it.
            if is_users and (owner_uid := path.parent.stat().st_uid) not in (os.getuid(), 0):
                raise PermissionError(1, f"belongs to user {owner_uid}")
            make_private(path)
            return path
        except OSError as error:
            reasons.append(f"{path}: {error.strerror or error}")
    raise SetupError(f"no directory for the stack's socket; set XDG_RUNTIME_DIR ({'; '.join(reasons)})")


def make_private(path: Path) -> None:
    """Make a directory that only this user can enter. Raises `OSError` if it belongs to another user."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat(follow_symlinks=False)
    if status.st_uid != os.getuid():
        raise PermissionError(1, f"belongs to user {status.st_uid}")
    if status.st_mode & 0o077:
        path.chmod(0o700)


def process_directory() -> Path:
    """Make a new directory for the stacks of this process, and remove those of dead processes."""
    base = base_directory()
    _remove_of_dead(base, _OWN)
    path = base / f"{_OWN}{owner()}-{os.urandom(4).hex()}"
    try:
        make_private(path)
    except OSError as error:
        raise SetupError(f"cannot make {path}: {error.strerror or error}") from error
    return path


def ray_directory() -> Path:
    """Make a new private directory with a short path for a Ray that this process starts, and remove those of dead processes.

    Give Ray a directory inside it, because Ray makes its own directory readable for everybody.
    """
    _remove_of_dead(_RAY_BASE, _RAY)
    return Path(tempfile.mkdtemp(prefix=f"{_RAY}{owner()}-", dir=_RAY_BASE))


def remove_ray_directories() -> None:
    """Remove what `ray_directory` made in this process, once no Ray of it runs."""
    for directory in _RAY_BASE.glob(f"{_RAY}{owner()}-*"):
        shutil.rmtree(directory, ignore_errors=True)


def unjudged_directories() -> list[Path]:
    """Return this user's directories whose process cannot be seen from here: it may still run. Blocks."""
    entries = [*_of_this_user(base_directory(), _OWN), *_of_this_user(_RAY_BASE, _RAY)]
    return [path for path, process in entries if has_ended(process) is None]


def unjudged_stacks() -> set[Path]:
    """Return the directories of stacks of this user whose processes cannot be seen from here. Blocks."""
    return {path for path in unjudged_directories() if any(path.glob("*.sock"))}


def remove_of_dead() -> None:
    """Remove what processes of this user have left that are dead. Blocks."""
    _remove_of_dead(base_directory(), _OWN)
    _remove_of_dead(_RAY_BASE, _RAY)


def is_shared(socket_path: Path) -> bool:
    """Whether a stack is one that every process of this user may use."""
    return socket_path.parent.name == _SHARED


def shared_directory() -> Path:
    """Return the directory for stacks that every process of this user may use."""
    path = base_directory() / _SHARED
    make_private(path)
    return path


def salt() -> bytes:
    """Return this user's secret for names of stacks. It is made once and readable by this user alone. Blocks."""
    path = base_directory() / "salt"
    try:
        with socket_lock(path):
            path.touch(mode=0o600)
            if not path.stat().st_size:
                path.write_bytes(os.urandom(32))
            return path.read_bytes()
    except OSError as error:
        raise SetupError(f"cannot write {path}: {error.strerror or error}") from error


def remove_traces(socket_path: Path, directory: Path) -> None:
    """Remove what a daemon leaves as it exits, and the directory of its process if that is dead.

    Logs stay if `state_dir` asked for them elsewhere, or if another daemon has taken over the socket.
    """
    if directory == socket_path.with_suffix(""):
        with contextlib.suppress(FileNotFoundError), socket_lock(socket_path):
            if not socket_path.exists():
                shutil.rmtree(directory, ignore_errors=True)
    if has_ended(_owner_of(socket_path.parent, _OWN)):
        shutil.rmtree(socket_path.parent, ignore_errors=True)


def socket_lock(socket_path: Path) -> contextlib.AbstractContextManager[int]:
    """Return the lock under which a stack's socket comes and goes. Blocks for milliseconds."""
    return locked(socket_path.with_suffix(".lock"))


def _remove_of_dead(base: Path, prefix: str) -> None:
    for path, process in _of_this_user(base, prefix):
        if has_ended(process):
            shutil.rmtree(path, ignore_errors=True)


def _of_this_user(base: Path, prefix: str) -> Iterator[tuple[Path, str]]:
    """Yield this user's directories and their owners. Other users may have theirs in `base`."""
    for path in sorted(base.glob(f"{prefix}*-*")):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.getuid():
                yield path, _owner_of(path, prefix)


def _owner_of(path: Path, prefix: str) -> str:
    """Return the owner in a name `<prefix><owner>-<random>`; another name has none that `has_ended` judges."""
    return path.name.removeprefix(prefix).rpartition("-")[0]
