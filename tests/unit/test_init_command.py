"""`gymgate init`: what it writes, and what it refuses before it writes anything."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from gymgate.cli import cli, init
from gymgate.cli.init import CLASS, NAME, TEMPLATE, write_environment
from gymgate.core.errors import ConfigError, DataError, OptionError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GYMGATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("GYMGATE_OFFLINE", "1")  # it needs no installation
    return tmp_path


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["init", *arguments])


def files(directory: Path) -> dict[str, str]:
    paths = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_text() for path in paths}


def test_the_environment_has_its_name_everywhere(here: Path) -> None:
    done = invoke("tool_use_2")
    assert done.exit_code == 0, done.output
    written = files(here / "tool_use_2" / "resources_servers" / "tool_use_2")
    assert {*written} == {
        *("README.md", "app.py", "requirements.txt", "configs/tool_use_2.yaml"),
        *(
            "data/example.jsonl",
            "data/example_rollouts.jsonl",
            "tests/test_tool_use_2.py",
            "tests/test_app.py",
        ),
    }
    assert not [name for name, text in written.items() if NAME in text or CLASS in text]
    classes = [node.name for node in ast.parse(written["app.py"]).body if isinstance(node, ast.ClassDef)]
    assert "ToolUse2" in classes
    assert "tool_use_2" in yaml.safe_load(written["configs/tool_use_2.yaml"])
    assert "gymgate check tool_use_2" in done.output


def test_the_template_is_copied_without_what_an_installer_compiled(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(str(TEMPLATE), here / "template", ignore=shutil.ignore_patterns("__pycache__"))
    compiled = here / "template" / "resources_servers" / NAME / "__pycache__"
    compiled.mkdir()
    (compiled / "app.cpython-313.pyc").write_bytes(b"\xff")
    monkeypatch.setattr(init, "TEMPLATE", here / "template")
    write_environment("letters", here / "mine")
    assert not [*(here / "mine").rglob("__pycache__")]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "1st",
        "a-b",
        "a b",
        "../up",
        "Upper",
        "_hidden",
        "class",
        "null",
        "yes",
        "ümlaut",
        "a.b",
        "a" * 300,
        "json",
        "copy",
        "all",
    ],
)
def test_a_name_that_python_or_yaml_would_read_otherwise_is_refused(name: str, here: Path) -> None:
    done = invoke(name)
    assert isinstance(done.exception, OptionError)
    assert repr(name) in str(done.exception)
    assert not [*here.iterdir()]


@pytest.mark.parametrize("name", ["mcqa", "aime24", "policy_model"])
def test_a_name_of_the_release_is_refused(name: str, here: Path) -> None:
    done = invoke(name)
    assert isinstance(done.exception, ConfigError)
    assert repr(name) in str(done.exception)
    assert not [*here.iterdir()]


def test_what_exists_is_refused_and_left_as_it_is(here: Path) -> None:
    (here / "letters").mkdir()
    (here / "letters" / "mine.txt").write_text("mine")
    assert isinstance(invoke("letters").exception, ConfigError)
    assert files(here) == {"letters/mine.txt": "mine"}
    assert invoke("letters", "-o", "letters").exit_code == 0
    before = files(here)
    assert isinstance(invoke("letters", "-o", "letters").exception, ConfigError)
    assert files(here) == before


def test_a_repository_takes_several_environments(here: Path) -> None:
    assert invoke("letters", "-o", "my repository").exit_code == 0
    done = invoke("words", "-o", "my repository")
    assert "gymgate check 'my repository/resources_servers/words'" in done.output
    assert sorted(path.name for path in (here / "my repository" / "resources_servers").iterdir()) == [
        "letters",
        "words",
    ]


def test_a_directory_that_cannot_be_written_is_one_error(here: Path) -> None:
    (here / "file").write_text("")
    done = invoke("letters", "-o", "file/below")
    assert isinstance(done.exception, DataError)
    assert "file" in str(done.exception)
