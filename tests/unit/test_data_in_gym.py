"""The parts of the program in NeMo Gym's interpreter that need nothing of NeMo Gym."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gymgate.preparation.in_gym import places as places_module
from gymgate.preparation.in_gym.places import Places
from gymgate.preparation.in_gym.scripts import scripted
from gymgate.preparation.in_gym.stamps import Stamp, digest_of
from gymgate.preparation.in_gym.told import HelpError, RefusedError, Told, chain

WRITES = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--output", required=True)
parser.add_argument("--size", type=int, required=True)
given = parser.parse_args()
with open(given.output, "w") as file:
    file.write("{}\\n" * given.size)
"""


@pytest.fixture
def order(tmp_path: Path) -> dict[str, Any]:
    """A release of one server with one script, and an empty workspace."""
    site, workspace, mine = tmp_path / "site", tmp_path / "workspace", tmp_path / "mine"
    for kind in places_module.KINDS:
        (site / kind).mkdir(parents=True)
    server = site / "resources_servers" / "maths"
    (server / "data").mkdir(parents=True)
    (server / "prepare.py").write_text(WRITES)
    (server / "data" / "example.jsonl").write_text("{}\n")
    (server / "data" / "media.bin").write_bytes(b"x" * places_module.LARGE)
    (server / ".made_venv" / "bin").mkdir(parents=True)
    (server / ".made_venv" / "bin" / "python").symlink_to("/gone")
    (server / "gone").symlink_to("/gone")
    for path in (workspace / "stage", mine / "configs"):
        path.mkdir(parents=True)
    (mine / "own.py").touch()
    return {
        "workspace": str(workspace), "stage": str(workspace / "stage"), "site": str(site), "roots": [str(mine)],
        "directory": str(server), "script": None, "script_arguments": ["--size", "3"], "type": "train", "prompt": None,
    }  # fmt: skip


def test_scripts_run_in_a_copy_of_the_release_or_where_the_user_has_them(order: dict[str, Any]) -> None:
    places = Places(order)
    server = Path("resources_servers/maths")
    assert places.script_root(str(server / "prepare.py")) == places.workspace
    assert (places.workspace / server / "data" / "media.bin").is_symlink(), "large files are not copied"
    assert not (places.workspace / server / "prepare.py").is_symlink()
    assert {path.name for path in (places.workspace / server).iterdir()} == {"data", "prepare.py"}
    assert places.script_root("own.py") == places.roots[0]
    assert places.located(str(server / "prepare.py")) == places.workspace / server / "prepare.py"
    assert places.located(str(server / "prepare.py"), made=False) == places.site / server / "prepare.py"
    with pytest.raises(RefusedError, match=r"there is no script nowhere\.py"):
        places.script_root("nowhere.py")


def test_a_script_gets_its_output_and_leaves_no_trace(order: dict[str, Any]) -> None:
    before = list(sys.path), list(sys.argv), Path.cwd()
    (source,) = scripted(order, Places(order))
    assert (list(sys.path), list(sys.argv), Path.cwd()) == before
    assert Path(source.dataset["jsonl_fpath"]).read_text() == "{}\n" * 3
    assert (source.type, (source.made or {})["arguments"]) == ("train", ["--size", "3"])
    assert not [*Path(order["site"]).rglob("*.pyc")]


def test_a_script_that_fails_says_why(order: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "workspace" / "log.txt").write_text("usage\nprepare.py: error: no size\n\n")
    with pytest.raises(
        RefusedError, match=r"status 2: prepare\.py: error: no size; its arguments come after --"
    ):
        list(scripted({**order, "script_arguments": []}, Places(order)))
    with pytest.raises(
        RefusedError, match=r"maths has no script 'other\.py'; name one with --script: prepare\.py"
    ):
        list(scripted({**order, "script": "other.py"}, Places(order)))
    (Path(order["directory"]) / "generate_more.py").touch()
    with pytest.raises(
        RefusedError, match=r"several scripts to make data; .*: generate_more\.py, prepare\.py"
    ):
        list(scripted(order, Places(order)))


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_a_script_that_is_asked_for_its_help_gives_it(order: dict[str, Any], option: str) -> None:
    order["script_arguments"] = [option]
    with pytest.raises(HelpError, match=r"usage: prepare\.py.*--size SIZE"):
        list(scripted(order, Places(order)))


def test_a_stamp_holds_while_recipe_and_file_are_the_same(tmp_path: Path) -> None:
    file, stamp, recipe = tmp_path / "rows.jsonl", Stamp(tmp_path, "data/rows.jsonl"), {"script": "abc"}
    file.write_text("{}\n")
    assert stamp.valid(recipe) is None
    stamp.write(file, recipe, {"kind": "script", "sha256": digest_of(file)})
    assert stamp.valid({"script": "def"}) is None
    assert (stamp.valid(recipe) or {})["origin"]["kind"] == "script"
    file.write_text("changed")
    assert stamp.valid(recipe) is None


def test_a_chain_of_exceptions_is_told_outermost_first() -> None:
    try:
        try:
            raise ModuleNotFoundError("No module named 'a.b'", name="a.b")
        except ImportError as error:
            raise ValueError("outer") from error
    except ValueError as error:
        links = chain(error)
    assert [(link["type"], link["name"]) for link in links] == [
        ("ValueError", None),
        ("ModuleNotFoundError", "a.b"),
    ]
    events = io.StringIO()
    Told(events).tell("failed", chain=links)
    assert json.loads(events.getvalue())["chain"] == links
