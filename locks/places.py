"""List the places of a release's servers and agents that run code, with what was read of each: `./dev python locks/places.py`.

`--check` prints only places that nobody has read, and read ones that are gone, and exits with 1 if there are any. The readings
are in `src/gymgate/gym/catalog/code_places.toml`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from gymgate.core.config import RuntimeConfig
from gymgate.gym.catalog.needs import code_places
from gymgate.gym.inside.resolve import AGENTS, RESOURCES
from gymgate.gym.runtime import open_catalog

RELEASE = "0.7.0"
CALLS = frozenset({
    "exec", "eval", "compile", "__import__", "runcode", "exec_module", "check_correctness", "untrusted_check",
    "create_subprocess_exec", "create_subprocess_shell", "Popen", "system", "popen", "check_output", "check_call",
})  # fmt: skip
"""Names of functions that run code or programs, or are known to. As a method, `exec` and `eval` are something else."""
MODULES = ("subprocess.", "pickle.", "dill.", "cloudpickle.", "marshal.", "os.exec", "os.spawn", "runpy.")
HARMLESS = frozenset({
    "subprocess.list2cmdline", "pickle.dumps", "pickle.dump", "dill.dumps", "dill.copy", "marshal.dumps", "platform.system",
})  # fmt: skip


def dotted(node: ast.expr) -> str:
    """Return a function's name as it is called: `subprocess.run`."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def is_place(name: str) -> bool:
    """Whether a call of this function runs code or a program."""
    if name in HARMLESS:
        return False
    last = name.rpartition(".")[2]
    is_method = "." in name and last in ("exec", "eval", "compile")
    return name.startswith(MODULES) or (last in CALLS and not is_method)


def places(site: Path) -> Iterator[tuple[str, str, int, str]]:
    """Yield server, file, line and call of each place, tests left out."""
    for kind in (RESOURCES, AGENTS):
        for path in sorted((site / kind).rglob("*.py")):
            server, *parts = path.relative_to(site / kind).parts
            if "tests" in parts or path.name.startswith("test_") or not parts:
                continue
            nodes = [*ast.walk(ast.parse(path.read_text()))]
            imported = {
                alias.asname or alias.name: f"{node.module}.{alias.name}"
                for node in nodes
                if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(MODULES)
                for alias in node.names
            }
            for call in (node for node in nodes if isinstance(node, ast.Call)):
                name = dotted(call.func)
                if is_place(name := imported.get(name, name)):
                    yield f"{kind}/{server}", "/".join(parts), call.lineno, name


def main() -> int:
    found = set(places(open_catalog(RuntimeConfig(version=RELEASE), progress=print).site))
    known = code_places()
    wrong = 0
    for server, file, line, call in sorted(found):
        read = known.get(server, {}).get(file, {})
        is_read = line in read.get("lines", ())
        wrong += not is_read
        if not is_read or "--check" not in sys.argv:
            told = f"{', '.join(read['reached']) or 'no text'}: {read['why']}" if is_read else "not read"
            print(f"{server}/{file}:{line}: {call}: {told}")
    lines = {(server, file, line) for server, file, line, _ in found}
    for server, files in known.items():
        for file, read in files.items():
            for line in read.get("lines", ()):
                if (server, file, line) not in lines:
                    wrong += 1
                    print(f"{server}/{file}:{line}: read, but gone")
    print(f"{len(found)} places in {len({server for server, *_ in found})} servers and agents")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
