"""The package as a whole: what it exports, what importing it costs, which way imports point, that docs are current."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import gymgate

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "gymgate"
TEMPLATE = SOURCE / "template"
"""The environment that `gymgate init` writes. Its code is NeMo Gym's and imports that."""
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


def test_the_version_is_the_same_everywhere() -> None:
    package, environment = (
        tomllib.loads((ROOT / path / "pyproject.toml").read_text())["project"]
        for path in (".", "environments/nemo_gym_env")
    )
    newest = re.search(r"^## (\S+) \(", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert {package["version"], environment["version"], newest[1]} == {gymgate.__version__}
    assert environment["dependencies"] == [f"gymgate[nemogym]>={gymgate.__version__}"]


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


NAMES_NEMO_GYM = {
    "gym/inside/names.py": "all that our code imports of it",
    "gym/inside/lean.py": "which of its files have the code that lean servers stand for",
    "gym/catalog/sandboxes.py": "where a release keeps its providers' settings",
}


def test_modules_of_nemo_gym_are_named_in_one_place() -> None:
    """Imports by name are text, which no graph of imports shows."""
    named = re.compile(r"""^\s*(?:import|from) nemo_gym\b|["']nemo_gym(?:\.|/sandbox)""", re.MULTILINE)
    users = {path.relative_to(SOURCE).as_posix() for path in modules() if named.search(path.read_text())}
    assert users == set(NAMES_NEMO_GYM)


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


def test_no_two_files_of_tests_have_one_name() -> None:
    """Pytest imports them by it, and collects one of them alone."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted({*names})


def test_no_file_holds_a_conflict_that_git_marked() -> None:
    marked = [name for name in tracked() if re.search(rb"(?m)^(<{7}|>{7})( |$)", (ROOT / name).read_bytes())]
    assert marked == []


def test_the_workflow_for_github_runs_what_ci_runs() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    steps = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert steps == ["./dev test", "./dev test all"]
    assert "exec ./dev test all" in (ROOT / ".ci" / "run").read_text()
