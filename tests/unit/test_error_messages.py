"""Every message of an error is one line: what failed, the value seen, what to do."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import gymgate
from gymgate.core import errors

SOURCE = Path(gymgate.__file__).parent
CLASSES = {
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.GymgateError)
} | {"ClickException", "UsageError", "BadParameter"}


def messages() -> Iterator[tuple[str, ast.expr]]:
    """Where an error is made, and its message."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args:
                called = (
                    node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                )
                if called in CLASSES:
                    yield f"{path.relative_to(SOURCE)}:{node.lineno}", node.args[0]


def test_every_message_is_one_line() -> None:
    """As it is written; what is put into it is quoted or cut where it comes from."""
    found = list(messages())
    assert len(found) > 200
    broken = [
        place
        for place, message in found
        if any(isinstance(node, ast.Constant) and "\n" in str(node.value) for node in ast.walk(message))
    ]
    assert not broken
