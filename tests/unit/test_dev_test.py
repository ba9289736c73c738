"""What `./dev test` selects, what its last line says, and which virtual environments `./dev` leaves alone."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support import accounting, smoke, summary

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("name", sorted(smoke.TESTS))
def test_a_smoke_test_is_there_and_is_not_heavy(name: str) -> None:
    file, _, test = name.partition("::")
    found = [
        node
        for node in ast.walk(ast.parse((TESTS / file).read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == test.partition("[")[0]
    ]
    assert len(found) == 1
    assert "heavy" not in " ".join(map(ast.unparse, found[0].decorator_list))


def test_the_last_line_counts_all_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A part that failed without a failed test counts as one."""
    parts = ["1\t1\t61\tlint", "2\t0\t5\truntime", "3\t0\t9\tfast", "4\t1\t9\tengine", "5\t2\t1\tdied"]
    (tmp_path / "parts").write_text("\n".join(parts) + "\n")
    for number, counts in ((3, {"passed": 7, "skipped": 2}), (4, {"passed": 1, "failed": 3})):
        files = {f"tests/{number}.py": {"cpu": 10.5 * number, "seconds": 1.0}}
        report = {"counts": counts, "files": files, "deselected": 11}
        (tmp_path / f"{number}.json").write_text(json.dumps(report))
    summary.main(tmp_path, "Not run: {}.")
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "8 passed, 5 failed, 2 skipped"
    assert lines[-2] == "Not run: 22."
    assert lines[-3].endswith(": tests/4.py, tests/3.py")


@pytest.mark.parametrize("workers", [[], ["-n", "2"]])
def test_a_session_is_accounted_for(tmp_path: Path, workers: list[str]) -> None:
    (tmp_path / "conftest.py").write_text("from support.accounting import register as pytest_configure\n")
    (tmp_path / "test_some.py").write_text(
        "import pytest, time\n"
        "def test_computes():\n    end = time.process_time() + 0.2\n    while time.process_time() < end: pass\n"
        "def test_fails(): assert 0\n"
        "@pytest.fixture\ndef broken(): raise ValueError\n"
        "def test_has_no_fixture(broken): pass\n"
        "def test_is_skipped(): pytest.skip('so')\n"
        "def test_other(): pass\n"
    )
    report = tmp_path / "report.json"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "not other",
        *workers,
        ".",
    ]
    variables = {"PYTHONPATH": str(TESTS), accounting.REPORT: str(report)}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, timeout=100, check=False)
    found = json.loads(report.read_text())
    assert (done.returncode, found["counts"]) == (1, {"passed": 1, "failed": 2, "skipped": 1})
    assert found["deselected"] == 1
    assert 0.2 <= found["files"]["test_some.py"]["cpu"] < 2


def test_an_environment_that_it_did_not_make_stays(tmp_path: Path) -> None:
    """Neither README's `.venv` nor a directory that has the name of its own."""
    for name in ("dev", "pyproject.toml"):
        shutil.copy(TESTS.parent / name, tmp_path / name)
    shutil.copytree(TESTS.parent / "locks", tmp_path / "locks")
    for name in (".venv", ".venv-dev"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("")
    done = subprocess.run(
        [tmp_path / "dev", "--help"], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "dev: .venv-dev is not an environment that ./dev made" in done.stderr
    assert all((tmp_path / name / "mine").exists() for name in (".venv", ".venv-dev"))
