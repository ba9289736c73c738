"""Finds a mutant's place in the source by symbol and syntax, and writes the mutation there.

A place is `MODULE:QUALNAME` and a piece of Python that occurs in that function, class or constant. The piece is compared as
syntax, so line numbers, line breaks, quotes and comments do not matter. `...` in it stands for any expression.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path


class NotLocatedError(Exception):
    """The mutant's place is not in the source, or is there more than once."""


def source_of(root: Path, at: str) -> Path:
    """Return the file of `MODULE:QUALNAME`."""
    path = root / "src" / Path(*at.partition(":")[0].split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    raise NotLocatedError(f"there is no module {at.partition(':')[0]}")


def mutated(source: str, at: str, find: str, put: str, match: int | None = None) -> str:
    """Return `source` with `find`, within the symbol of `at`, replaced by `put`.

    `match` chooses one of several occurrences, from 1. Raises `NotLocatedError` if there is none, or several without `match`.
    """
    wanted, replacement = _parsed(find, put)
    scopes = list(_scopes(_tree(source), at.partition(":")[2].split(".")))
    if not scopes:
        raise NotLocatedError(f"{at} does not exist")
    nodes = (node for scope in scopes for node in ast.walk(scope))
    found = [node for node in nodes if isinstance(node, ast.expr | ast.stmt) and _equal(wanted, node)]
    if not found:
        raise NotLocatedError(f"{at} does not contain {find!r}")
    if match is None and len(found) > 1:
        raise NotLocatedError(f"{at} contains {find!r} {len(found)} times; choose one with match = N")
    if match is not None and not 1 <= match <= len(found):
        raise NotLocatedError(f"{at} contains {find!r} {len(found)} times; match = {match} is none of them")
    node = sorted(found, key=lambda each: (each.lineno, each.col_offset))[(match or 1) - 1]
    return _replaced(source, node, replacement)


@functools.lru_cache
def _tree(source: str) -> ast.Module:
    return ast.parse(source)


def _parsed(find: str, put: str) -> tuple[ast.AST, ast.AST]:
    """Both as expressions, or both as statements."""
    try:
        wanted, replacement = ast.parse(find).body, ast.parse(put).body
    except SyntaxError as error:
        raise NotLocatedError(f"{error.text!r} is no Python: {error.msg}") from error
    if len(wanted) != 1:
        raise NotLocatedError(f"{find!r} is not one expression or statement")
    if isinstance(wanted[0], ast.Expr) and len(replacement) == 1 and isinstance(replacement[0], ast.Expr):
        return wanted[0].value, replacement[0].value
    return wanted[0], ast.Module(body=replacement, type_ignores=[])


def _scopes(node: ast.AST, names: list[str]) -> Iterator[ast.AST]:
    """The functions, classes and assignments of that qualified name; a property's accessors share one."""
    if not names:
        yield node
        return
    for child in getattr(node, "body", ()):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if child.name == names[0]:
                yield from _scopes(child, names[1:])
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            if len(names) == 1 and any(
                isinstance(each, ast.Name) and each.id == names[0] for each in targets
            ):
                yield child


def _equal(wanted: object, found: object) -> bool:
    if isinstance(wanted, ast.Constant) and wanted.value is ...:
        return isinstance(found, ast.expr)
    if type(wanted) is not type(found):
        return False
    if isinstance(wanted, ast.AST):
        return all(
            _equal(getattr(wanted, name), getattr(found, name)) for name in wanted._fields if name != "ctx"
        )
    if isinstance(wanted, list) and isinstance(found, list):
        return len(wanted) == len(found) and all(map(_equal, wanted, found))
    return wanted == found


def _replaced(source: str, node: ast.expr | ast.stmt, replacement: ast.AST) -> str:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    lines = source.encode().splitlines(keepends=True)
    before = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
    after = lines[node.end_lineno - 1][node.end_col_offset :] + b"".join(lines[node.end_lineno :])
    text = ast.unparse(replacement)
    text = f"({text})" if isinstance(node, ast.expr) else text.replace("\n", "\n" + " " * node.col_offset)
    result = (before + text.encode() + after).decode()
    try:
        ast.parse(result)
    except SyntaxError as error:
        raise NotLocatedError(f"the mutation is no Python: {error}") from error
    if ast.unparse(node) == ast.unparse(replacement):
        raise NotLocatedError("the mutation changes nothing")
    return result
