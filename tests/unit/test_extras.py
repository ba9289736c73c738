"""The command that a message names for a missing extra."""

from __future__ import annotations

import json
import shlex
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from gymgate.core.extras import install_command

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_every_extra_works_by_itself() -> None:
    """Each needs uv, which installs NeMo Gym."""
    dependencies = map(Requirement, tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"])
    assert [each.name for each in dependencies if each.name == "uv" and each.marker is None] == ["uv"]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ({"url": "file://{tmp}/a%20clone", "dir_info": {"editable": True}}, ["-e", "{tmp}/a clone[trl]"]),
        ({"url": "file://{tmp}/a%20clone", "dir_info": {}}, ["{tmp}/a clone[trl]"]),
        ({"url": "file://{tmp}/gymgate.whl", "archive_info": {}}, ["{tmp}/gymgate.whl[trl]"]),
        ({"url": "file://{tmp}/removed", "dir_info": {}}, ["gymgate[trl]"]),
        ({"url": "https://index.example/gymgate.whl", "archive_info": {}}, ["gymgate[trl]"]),
        (None, ["gymgate[trl]"]),
    ],
)
def test_the_extra_comes_from_where_gymgate_came_from(
    source: dict[str, object] | None, target: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a clone").mkdir()
    (tmp_path / "gymgate.whl").touch()
    text = None if source is None else json.dumps(source).replace("{tmp}", str(tmp_path))
    monkeypatch.setattr(metadata, "distribution", lambda name: SimpleNamespace(read_text=lambda file: text))
    expected = [word.replace("{tmp}", str(tmp_path)) for word in target]
    assert shlex.split(install_command("trl", "torch")) == ["pip", "install", "torch", *expected]


def test_without_an_installation_it_is_the_package_index(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    assert install_command("trl") == "pip install 'gymgate[trl]'"
