"""What can change a reward, by its content: code and configs of a user's own environments, replayed files, functions, variables.

A run stores these digests, and a resume must have the same. They do not depend on paths, times of change, the machine or
gymgate's own version.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import inspect
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from gymgate.core import codec
from gymgate.gym.catalog.entries import EnvConfig
from gymgate.gym.inside.resolve import SERVER_KINDS
from gymgate.gym.server_code import component_roots, own_files

CODE = (".py", ".yaml", ".yml", ".toml", ".txt", ".j2", ".jinja")
"""Suffixes of files that decide what an environment does. Data and files that servers write do not count."""
_OTHER_SERVER = re.compile(rf"^\s*(?:from|import)\s+({'|'.join(SERVER_KINDS)})\.(\w+)", re.MULTILINE)
_PLAIN = (str, bytes, int, float, bool, type(None))


def digest_of(value: bytes) -> str:
    """Return 16 hex digits."""
    return hashlib.blake2b(value, digest_size=8).hexdigest()


def file_digest(path: Path) -> str:
    """Return the digest of a file. One that has not changed is read once."""
    status = path.stat()
    return _file_digest(path, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=4096)
def _file_digest(path: Path, size: int, changed: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8)).hexdigest()


def environment_content(config: EnvConfig, named_roots: Sequence[str], site: Path) -> dict[str, str]:
    """Return the digest of each file of an environment's own code by its name below its root, and that of its config.

    Empty if all of it is NeMo Gym's. Own code is that of its servers and of the servers that they import; code that they
    import from elsewhere is not read.
    """
    roots = [root for root in component_roots(config.all_files, named_roots, site) if root != site]
    content = {}
    if any(not path.is_relative_to(site) for path in config.all_files):
        settings = [[server.key, _without_datasets(server.block)] for server in config.instances]
        content["config"] = digest_of(codec.dumps(settings))
    left, seen = [(server.kind, server.type) for server in config.servers], set[tuple[str, str]]()
    while left:
        kind, name = server = left.pop()
        directory = next((root / kind / name for root in roots if (root / kind / name).is_dir()), None)
        if server in seen or directory is None:
            continue
        seen.add(server)
        for path in sorted(own_files(directory, CODE)):
            if path.relative_to(directory).parts[0] == "configs":
                continue  # the chosen one counts as it is read, and the others do not count
            content[f"{kind}/{name}/{path.relative_to(directory)}"] = file_digest(path)
            if path.suffix == ".py":
                left += _OTHER_SERVER.findall(path.read_text(errors="replace"))
    return content


def _without_datasets(block: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a dataset is identified by itself."""
    return {name: value for name, value in block.items() if name != "datasets"}


def source_digest(function: Any) -> str | None:
    """Return the digest of a callable's source and of what it names in its module; `None` if the source cannot be read.

    That is its functions, classes and constants, and theirs; a constant has a name in capitals, since other values may
    change as it runs. The rest of the module may change, for example the call that says how many rollouts there are.
    """
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(getattr(function, "__func__", function))
    start = function if isinstance(function, FunctionType | type) else type(function)
    texts: dict[str, str] = {}
    left: list[Any] = [start]
    try:
        while left:
            item = left.pop()
            if item.__qualname__ in texts:
                continue
            texts[item.__qualname__] = inspect.getsource(item)
            names = {name for code in _codes(item) for name in code.co_names}
            module = inspect.getmodule(item)
            for name, value in ((name, vars(module).get(name)) for name in sorted(names) if module):
                if isinstance(value, FunctionType | type) and value.__module__ == start.__module__:
                    left.append(value)
                elif name.isupper() and isinstance(value, _PLAIN):
                    texts[name] = repr(value)
    except (OSError, TypeError):
        return None
    return digest_of(codec.dumps(sorted(texts.items())))


def _codes(item: FunctionType | type) -> Iterator[CodeType]:
    """Yield the code of a function, or of a class's functions, and that of the functions within."""
    functions = [item] if isinstance(item, FunctionType) else vars(item).values()
    left = [code for value in functions if (code := getattr(inspect.unwrap(value), "__code__", None))]
    while left:
        code = left.pop()
        yield code
        left += [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def variable_digests(names: Iterable[str], salt: str) -> dict[str, str | None]:
    """Return a digest of each environment variable's value, which the salt keeps from being looked up; `None`: not set."""
    values = {name: os.environ.get(name) for name in names}
    return {
        name: None if value is None else hmac.digest(salt.encode(), os.fsencode(value), "sha256").hex()[:16]
        for name, value in values.items()
    }
