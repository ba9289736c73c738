"""Python processes that gymgate starts: none imports a module from the directory in which it was called."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gymgate

SOURCE = Path(gymgate.__file__).parent
STARTERS = {"-c", "-m"}
SAFE = {"-I", "-P"}


def words_of(node: ast.AST) -> list[str]:
    """The constants among the elements of a list or tuple, or the arguments of a call."""
    elements = node.args if isinstance(node, ast.Call) else getattr(node, "elts", [])
    return [item.value for item in elements if isinstance(item, ast.Constant) and isinstance(item.value, str)]


def starts_interpreter(node: ast.AST) -> bool:
    elements = node.args if isinstance(node, ast.Call) else getattr(node, "elts", [])
    names = [ast.unparse(item) for item in elements[:1]]
    return any(name.endswith(("executable", "python")) for name in names)


def test_each_interpreter_is_started_without_the_current_directory() -> None:
    commands = [
        (path, words)
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.List | ast.Tuple | ast.Call) and starts_interpreter(node)
        if STARTERS & {*(words := words_of(node))}
    ]
    assert len(commands) >= 2, "the search finds nothing any more"
    assert [(path, words) for path, words in commands if not SAFE & {*words}] == []


def test_only_one_module_says_how_gymgates_own_are_started() -> None:
    """Docs and examples aside."""
    users = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if any(ast.unparse(node) == "sys.executable" for node in ast.walk(ast.parse(path.read_text())))
    }
    assert users == {"core/interpreter.py"}


@pytest.mark.gym
def test_a_check_runs_no_module_of_the_directory(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    for name in ("gymgate", "json", "asyncio", "yaml", "nemo_gym", "omegaconf"):
        (tmp_path / f"{name}.py").write_text(f"open({str(marker)!r}, 'a').write({name!r} + chr(10))\n")
    command = [str(Path(sys.executable).parent / "gymgate"), "check", "example_single_tool_call"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not marker.exists(), marker.read_text()
