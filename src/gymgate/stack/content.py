"""What can change a reward, by its content: code and configs of a user's own environments, replayed files, functions, variables.

A run stores these digests, and a resume must have the same. They do not depend on paths, times of change, the machine or
gymgate's own version.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import hashlib
import hmac
import inspect
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType, MemberDescriptorType, MethodType
from typing import Any

from gymgate.core import codec
from gymgate.gym.catalog.entries import EnvConfig
from gymgate.gym.inside.resolve import SERVER_KINDS
from gymgate.gym.server_code import component_roots, own_files

CODE = (".py", ".yaml", ".yml", ".toml", ".txt", ".j2", ".jinja")
"""Suffixes of files that decide what an environment does. Data and files that servers write do not count."""
_OTHER_SERVER = re.compile(
    rf"^\s*(?:from|import)\s+({'|'.join(SERVER_KINDS)})(?:\.|\s+import\s+)(\w+)", re.MULTILINE
)
_SECRET = re.compile(
    r"(key|token|secret|passwo?r?d|auth|authorization|bearer|credential|cookie)s?[\d_-]*$|(?<![a-z])pwd?\d*$|header",
    re.IGNORECASE,
)
"""What may be a secret, by its name."""
_ADDRESS = re.compile(r"https?://[^/]")
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
            below = path.relative_to(directory)
            if below.parts[0] == "configs":
                continue  # the chosen one counts as it is read, and the others do not count
            content[f"{kind}/{name}/{below}"] = file_digest(path)
            if path.suffix == ".py":
                left += _OTHER_SERVER.findall(path.read_text(errors="replace"))
    return content


def _without_datasets(block: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a dataset is identified by itself."""
    return {name: value for name, value in block.items() if name != "datasets"}


def is_secret(name: str) -> bool:
    """Whether a setting or variable of this name may hold a secret."""
    return _SECRET.search(name) is not None


def source_digest(function: Any) -> str | None:
    """Return the digest of a callable's source and of what it names in its module; `None` if the source cannot be read.

    That is its functions, classes and constants, and theirs, and what makes two callables of one source differ: arguments of
    `functools.partial`, defaults, variables of an enclosing function, and attributes of an object. A constant has a name in
    capitals. Other values may change as it runs: of what its code sets nothing counts, and lists and dicts only in constants
    and in a `partial`. So may keys and addresses.
    The rest of the module may change, for example the call that says how many rollouts there are.
    """
    try:
        reader = _SourceReader(function)
        reader.read("", function, mutable=True)
    except Exception:  # an object may answer for its attributes as it likes
        return None
    return digest_of(codec.dumps(sorted(reader.texts)))


class _SourceReader:
    """Reads what a callable consists of, as far as it belongs to the callable's own module."""

    def __init__(self, function: Any) -> None:
        self.texts: list[tuple[str, str]] = []
        """Names, and what they stand for."""
        while isinstance(function, functools.partial):
            function = function.func
        self._start = inspect.unwrap(getattr(function, "__func__", function))
        self._module = _module_of(self._start)
        is_function = isinstance(self._start, FunctionType)
        self._set = _stored(self._start.__code__, "STORE_ATTR") if is_function else set[str]()
        """Attributes that the callable sets as it runs."""
        self._seen: set[int] = set()

    def read(self, name: str, value: Any, *, mutable: bool) -> None:
        """Read what a name stands for; a list, dict or set only if such `mutable` values are constants there."""
        if isinstance(value, _PLAIN):
            self.texts.append((name, repr(value)))
        elif isinstance(value, tuple):
            self._read_all(name, enumerate(value), mutable=mutable)
        elif isinstance(value, frozenset) or (mutable and isinstance(value, set)):
            self.texts.append((name, repr(sorted(map(repr, value)))))
        elif id(value) not in self._seen:
            self._seen.add(id(value))
            if mutable and isinstance(value, list | dict):
                items = value.items() if isinstance(value, dict) else enumerate(value)
                self._read_all(name, items, mutable=True)
            elif isinstance(value, functools.partial):
                self.read(name, value.func, mutable=mutable)
                self._read_all(name, (*enumerate(value.args), *value.keywords.items()), mutable=True)
            elif isinstance(value, MethodType):
                self.read(name, value.__func__, mutable=mutable)
                self.read(f"{name}.self", value.__self__, mutable=mutable)
            elif value is self._start or _module_of(value) == self._module:
                self._read_own(name, value)
            elif (wrapped := getattr(value, "__wrapped__", None)) is not None:
                self.read(name, wrapped, mutable=mutable)

    def _read_own(self, name: str, value: Any) -> None:
        if isinstance(value, FunctionType):
            self.texts.append((name, inspect.getsource(value.__code__)))
            self._read_function(name, value)
        elif isinstance(value, type):
            changing = self._set | _set_later(value)
            self._read_source(name, value)
            for member, item in vars(value).items():
                if isinstance(function := inspect.unwrap(getattr(item, "__func__", item)), FunctionType):
                    self._read_source(f"{name}.{member}", function.__code__)
                    self._read_function(f"{name}.{member}", function)
                elif not member.startswith("__") and member not in changing:
                    self.read(f"{name}.{member}", item, mutable=False)
            self._read_all(name, enumerate(value.__bases__), mutable=False)
        else:
            self.read(name, type(value), mutable=False)
            classes = [base for base in type(value).__mro__ if _module_of(base) == self._module]
            changing = self._set.union(*map(_set_later, classes))
            slots = {
                slot
                for base in classes
                for slot, item in vars(base).items()
                if isinstance(item, MemberDescriptorType)
            }
            attributes = {slot: getattr(value, slot) for slot in sorted(slots) if hasattr(value, slot)}
            attributes |= getattr(value, "__dict__", {})
            self._read_all(
                name, (item for item in attributes.items() if item[0] not in changing), mutable=False
            )

    def _read_source(self, name: str, value: Any) -> None:
        """Read a class or a part of it. Notebooks have the source of its functions alone, generated functions have none."""
        with contextlib.suppress(OSError):
            self.texts.append((name, inspect.getsource(value)))

    def _read_function(self, name: str, function: FunctionType) -> None:
        """Read what a function names, its defaults, and the variables of functions around it that it does not set."""
        code = function.__code__
        names = {global_name for inner in _codes(code) for global_name in inner.co_names}
        for global_name in sorted(names & function.__globals__.keys()):
            value = function.__globals__[global_name]
            if global_name.isupper() or not isinstance(value, (*_PLAIN, tuple, frozenset)):
                self.read(global_name, value, mutable=global_name.isupper())
        defaults = (*enumerate(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items())
        self._read_all(name, defaults, mutable=False)
        changing = _stored(code, "STORE_DEREF")
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # it has no value yet
                if variable not in changing:
                    self._read_all(name, [(variable, cell.cell_contents)], mutable=False)

    def _read_all(self, name: str, items: Iterable[tuple[Any, Any]], *, mutable: bool) -> None:
        """Read values by their keys. Secrets and addresses, which may change, are left out."""
        for key, value in items:
            if not (isinstance(value, str) and (is_secret(str(key)) or _ADDRESS.match(value))):
                self.read(f"{name}[{key!r}]", value, mutable=mutable)


def _module_of(value: Any) -> str | None:
    """Return the module that holds the code of a function or class, or of an object's class."""
    if isinstance(value, FunctionType):  # what wraps another function has that one's `__module__`
        return value.__globals__.get("__name__")
    return (value if isinstance(value, type) else type(value)).__module__


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function, and that of the functions within."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _stored(code: CodeType, operation: str) -> set[str]:
    """Return the names that code stores values under by an operation."""
    instructions = (instruction for inner in _codes(code) for instruction in dis.get_instructions(inner))
    return {str(instruction.argval) for instruction in instructions if instruction.opname == operation}


def _set_later(of: type) -> set[str]:
    """Return the names of attributes that methods other than those that make an object set."""
    methods = {name: inspect.unwrap(getattr(item, "__func__", item)) for name, item in vars(of).items()}
    return {
        attribute
        for name, method in methods.items()
        if isinstance(method, FunctionType) and name not in ("__init__", "__post_init__", "__new__")
        for attribute in _stored(method.__code__, "STORE_ATTR")
    }


def variable_digests(names: Iterable[str], salt: str) -> dict[str, str | None]:
    """Return a digest of each environment variable's value, which the salt keeps from being looked up; `None`: not set."""
    values = {name: os.environ.get(name) for name in names}
    return {
        name: None if value is None else hmac.digest(salt.encode(), os.fsencode(value), "sha256").hex()[:16]
        for name, value in values.items()
    }
