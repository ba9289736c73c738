"""The package as a whole: what it exports, what importing it costs, which way imports point, that docs are current."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import gymgate

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "gymgate"
ROOMS = {
    "errors": 0,
    "codec": 0,
    "extras": 0,
    "http_client": 0,
    "files": 1,
    "starting": 0,
    "task_groups": 0,
    "config": 1,
    "retrying": 1,
    "json_server": 1,
    "rollout": 2,
    "catalog": 3,
    "dataset": 4,
    "runtime": 3,
    "tokens": 3,
    "gateway": 5,
    "stack": 6,
    "api": 7,
    "check": 8,
    "preparation": 7,
    "serving": 7,
    "collection": 8,
    "doctor": 8,
    "integrations": 8,
    "cli": 9,
}
"""Room -> height; a room may import itself, and rooms of the same height or below."""
TEMPLATE = SOURCE / "template"
"""The environment that `gymgate init` writes. Its code is NeMo Gym's and imports that."""
ROOFS = ("__init__", "__main__", "_entry", "inspect", "openenv", "skyrl", "trl", "verl")
"""Modules above every room."""
HEAVY = (
    "nemo_gym",
    "verifiers",
    "inspect_ai",
    "openenv",
    "torch",
    "ray",
    "openai",
    "datasets",
    "transformers",
    "opentelemetry",
)


def test_every_export_is_there_and_typed() -> None:
    tree = ast.parse((SOURCE / "__init__.pyi").read_text())
    typed = {
        alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert typed - {"annotations", "TYPE_CHECKING", "Any"} == set(gymgate.__all__) - {"__version__"}
    for name in gymgate.__all__:
        assert getattr(gymgate, name) is not None


def test_an_unknown_attribute_is_named() -> None:
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = gymgate.nothing_of_the_kind


def test_benchmarks_use_what_the_stack_exports() -> None:
    """One starts its servers as a stack does, to compare with; see `benchmarks/contenders.py`."""
    inner = re.compile(r"^\s*(?:from|import) gymgate\.stack\.", re.MULTILINE)
    found = [path.name for path in (ROOT / "benchmarks").rglob("*.py") if inner.search(path.read_text())]
    assert found == ["contenders.py"]


def test_import_and_the_core_stay_cheap() -> None:
    code = (
        "import sys, gymgate; [getattr(gymgate, name) for name in gymgate.__all__];"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def modules() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py") if not path.is_relative_to(TEMPLATE))


def room_of(module: str) -> str | None:
    """The longest room name that `module` (dotted, below gymgate) starts with."""
    fitting = [room for room in ROOMS if module == room or module.startswith(room + ".")]
    return max(fitting, key=len, default=None)


def imports_of(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("gymgate."):
            names.append(node.module.removeprefix("gymgate."))
        elif isinstance(node, ast.ImportFrom) and node.module == "gymgate":
            names += [alias.name for alias in node.names if not alias.name.startswith("__")]
        elif isinstance(node, ast.Import):
            names += [a.name.removeprefix("gymgate.") for a in node.names if a.name.startswith("gymgate.")]
    return names


def test_imports_point_down() -> None:
    wrong = []
    for path in modules():
        own = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        if own in ROOFS:
            continue
        if (room := room_of(own)) is None:
            wrong.append(f"{own} is in no room")
            continue
        for name in imports_of(path):
            other = room_of(name)
            if other is None:
                wrong.append(f"{own} imports {name}, which is in no room")
            elif ROOMS[other] > ROOMS[room]:
                wrong.append(f"{own} imports {name}, which stands above it")
    assert wrong == []


def test_only_the_fork_server_imports_nemo_gym() -> None:
    users = [
        path.relative_to(SOURCE).as_posix()
        for path in modules()
        if any(
            (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "nemo_gym")
            or (isinstance(node, ast.Import) and any(a.name.split(".")[0] == "nemo_gym" for a in node.names))
            for node in ast.walk(ast.parse(path.read_text()))
        )
    ]
    assert all(user.startswith("stack/forkserver/") for user in users), users


def test_generated_docs_are_current() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}run ./dev python docs/generate.py"


def tracked() -> list[str]:
    """Names of the files that git tracks."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
    )
    if listed.returncode != 0:
        pytest.skip(f"not a clone: {listed.stderr.strip()}")
    return [name for name in listed.stdout.split("\0") if (ROOT / name).is_file()]


def test_nothing_names_a_home_directory_or_an_index() -> None:
    """Locks and sources must work on any machine."""
    for name in [path for path in tracked() if path.startswith(("locks/", "src/"))]:
        text = (ROOT / name).read_text(errors="replace")
        assert "/simple/" not in text, name
        assert "--index-url" not in text, name


def test_no_file_holds_a_conflict_that_git_marked() -> None:
    marked = [name for name in tracked() if re.search(rb"(?m)^(<{7}|>{7})( |$)", (ROOT / name).read_bytes())]
    assert marked == []


def test_the_workflow_for_github_runs_what_ci_runs() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    steps = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert steps == ["./dev test", "./dev test all"]
    assert "exec ./dev test all" in (ROOT / ".ci" / "run").read_text()
