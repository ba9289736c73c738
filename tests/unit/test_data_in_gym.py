"""The parts of the program in NeMo Gym's interpreter that need nothing of NeMo Gym."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gymgate.gym.inside.preparation.directories import KINDS, LARGE, Directories, sha256_of
from gymgate.gym.inside.preparation.events import EndedError, Events, chain
from gymgate.gym.inside.preparation.fetching import Fetcher, FetchNote
from gymgate.gym.inside.preparation.row_writer import RowWriter, _fill, _lines, ready_row
from gymgate.gym.inside.preparation.scripts import run_script
from gymgate.gym.inside.preparation.sources import RawSource

WRITES = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--output", required=True)
parser.add_argument("--size", type=int, required=True)
given = parser.parse_args()
with open(given.output, "w") as file:
    file.write("{}\\n" * given.size)
"""
PREPARES = """
from pathlib import Path
def prepare():
    Path(__file__).parent.joinpath("data/train.jsonl").write_text("{text}")
    return Path(__file__).parent / "data/train.jsonl"
if __name__ == "__main__":
    prepare()
"""


@pytest.fixture
def order(tmp_path: Path) -> dict[str, Any]:
    """A release of one server with one script, and an empty workspace."""
    site, workspace, mine = tmp_path / "site", tmp_path / "workspace", tmp_path / "mine"
    for kind in KINDS:
        (site / kind).mkdir(parents=True)
    server = site / "resources_servers" / "maths"
    (server / "data").mkdir(parents=True)
    (server / "prepare.py").write_text(WRITES)
    (server / "data" / "example.jsonl").write_text("{}\n")
    (server / "data" / "media.bin").write_bytes(b"x" * LARGE)
    (server / ".made_venv" / "bin").mkdir(parents=True)
    (server / ".made_venv" / "bin" / "python").symlink_to("/gone")
    (server / "gone").symlink_to("/gone")
    for path in (workspace / "stage", mine / "configs"):
        path.mkdir(parents=True)
    (mine / "own.py").touch()
    return {
        "workspace": str(workspace), "stage": str(workspace / "stage"), "site": str(site), "roots": [str(mine)],
        "directory": str(server), "script": None, "script_arguments": ["--size", "3"], "type": "train", "prompt": None,
        "editable": False,
    }  # fmt: skip


def test_scripts_run_in_a_copy_of_the_release_or_where_the_user_has_them(order: dict[str, Any]) -> None:
    directories = Directories(order)
    server = Path("resources_servers/maths")
    assert directories.script_root(str(server / "prepare.py")) == directories.workspace
    assert (directories.workspace / server / "data" / "media.bin").is_symlink(), "large files are not copied"
    assert not (directories.workspace / server / "prepare.py").is_symlink()
    assert {path.name for path in (directories.workspace / server).iterdir()} == {"data", "prepare.py"}
    assert directories.script_root("own.py") == directories.roots[0]
    assert directories.find(str(server / "prepare.py")) == directories.workspace / server / "prepare.py"
    assert (
        directories.find(str(server / "prepare.py"), in_workspace=False)
        == directories.site / server / "prepare.py"
    )
    with pytest.raises(EndedError, match=r"nowhere\.py"):
        directories.script_root("nowhere.py")


def test_a_script_gets_its_output_and_leaves_no_trace(order: dict[str, Any]) -> None:
    before = list(sys.path), list(sys.argv), Path.cwd()
    (source,) = run_script(order, Directories(order))
    assert (list(sys.path), list(sys.argv), Path.cwd()) == before
    assert Path(source.dataset["jsonl_fpath"]).read_text() == "{}\n" * 3
    assert (source.type, (source.origin or {})["arguments"]) == ("train", ["--size", "3"])
    assert not [*Path(order["site"]).rglob("*.pyc")]


def test_an_edited_release_is_copied_again_where_it_changed(order: dict[str, Any]) -> None:
    """A release of the user's own, such as a checkout. What scripts made beside it stays."""
    order["editable"] = True
    server, workspace = Path(order["directory"]), Path(order["workspace"])
    copy = workspace / server.relative_to(order["site"])
    (server / "helper.py").write_text("SIZE = 1")
    (server / "data" / "grows.bin").write_bytes(b"x")
    (server / "data" / "shrinks.bin").write_bytes(b"x" * LARGE)
    assert len(list(run_script(order, Directories(order)))) == 1
    (copy / "data" / "made.jsonl").write_text("{}")
    (copy / "data" / "example.jsonl").write_text("made over")
    (server / "prepare.py").write_text(WRITES.replace("{}", "[]"))
    (server / "helper.py").unlink()
    (server / "new.py").touch()
    (server / "data" / "grows.bin").write_bytes(b"y" * LARGE)
    (server / "data" / "shrinks.bin").write_bytes(b"y")
    (source,) = run_script(order, Directories(order))
    assert Path(source.dataset["jsonl_fpath"]).read_text() == "[]\n" * 3
    assert {path.name for path in copy.glob("*.py")} == {"prepare.py", "new.py"}
    assert [(copy / "data" / name).read_text() for name in ("made.jsonl", "example.jsonl")] == [
        "{}",
        "made over",
    ]
    assert (copy / "data" / "grows.bin").samefile(server / "data" / "grows.bin")
    assert (copy / "data" / "shrinks.bin").read_bytes() == b"y"
    assert not (copy / "data" / "shrinks.bin").is_symlink()


@pytest.mark.parametrize("script", [None, "resources_servers/maths/prepare.py"])
def test_rows_are_made_again_when_their_script_has_changed(order: dict[str, Any], script: str | None) -> None:
    """A script that the config names, or the `prepare.py` beside the data."""
    order |= {"editable": True, "refresh": False, "arguments": {}}
    server, rows = Path(order["directory"]), "resources_servers/maths/data/train.jsonl"
    dataset = {"jsonl_fpath": rows, "prepare_script": script}
    made, changed = [], []
    for text in ("one", "one", "three", "three"):
        order["refresh"] = len(made) == 3
        (server / "prepare.py").write_text(PREPARES.format(text=text))
        source = RawSource("maths", "train", dataset)
        path, origin = Fetcher(order, Directories(order), Events(io.StringIO())).fetch(source)
        sys.modules.pop("resources_servers.maths.prepare", None)
        made.append(path.read_text())
        changed.append(origin.get("changed"))
    assert made == ["one", "one", "three", "three"]
    assert changed == [False, None, True, False]  # the second time there is nothing to do


def test_a_script_that_fails_says_why(order: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "workspace" / "log.txt").write_text("usage\nprepare.py: error: no size\n\n")
    with pytest.raises(EndedError, match=r"status 2: prepare\.py: error: no size.*--"):
        list(run_script({**order, "script_arguments": []}, Directories(order)))
    with pytest.raises(EndedError, match=r"maths .*'other\.py'.*--script: prepare\.py"):
        list(run_script({**order, "script": "other.py"}, Directories(order)))
    (Path(order["directory"]) / "generate_more.py").touch()
    with pytest.raises(EndedError, match=r"generate_more\.py, prepare\.py"):
        list(run_script(order, Directories(order)))


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_a_script_that_is_asked_for_its_help_gives_it(order: dict[str, Any], option: str) -> None:
    order["script_arguments"] = [option]
    with pytest.raises(EndedError, match=r"usage: prepare\.py.*--size SIZE"):
        list(run_script(order, Directories(order)))


def test_a_note_holds_while_recipe_and_file_are_the_same(tmp_path: Path) -> None:
    file, note, recipe = tmp_path / "rows.jsonl", FetchNote(tmp_path, "data/rows.jsonl"), {"script": "abc"}
    file.write_text("{}\n")
    assert not note.holds(recipe)
    note.write(file, recipe, {"kind": "script", "sha256": sha256_of(file)})
    assert not note.holds({"script": "def"})
    assert note.holds(recipe)
    assert (note.read() or {})["origin"]["kind"] == "script"
    file.write_text("changed")
    assert not note.holds(recipe)


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
    Events(events).send("failed", chain=links)
    assert json.loads(events.getvalue())["chain"] == links


def test_a_row_has_an_agent_of_the_config_and_one_prompt() -> None:
    writer = RowWriter.__new__(RowWriter)
    writer._agents, writer._default = {"first", "second"}, "first"
    for row, agent in (({"name": "second"}, "second"), ({"name": "of_long_ago"}, "first"), (None, "first")):
        assert writer._agent_in({"agent_ref": row}) == agent
    with pytest.raises(ValueError, match="remove one"):
        _fill(None, {"responses_create_params": {"input": "hi"}})


def test_bad_rows_are_counted_and_those_of_one_reason_are_one_message(tmp_path: Path) -> None:
    (path := tmp_path / "rows.jsonl").write_text("{\n[1]\n[2]\n")
    writer, told, written = RowWriter.__new__(RowWriter), io.StringIO(), io.StringIO()
    writer.events, writer._agents, writer._default = Events(told), set(), "first"
    writer._agent_prompts, writer._renamed = False, {}
    checks: Any = (None, (lambda number, row: None, None))
    writer._prompt, writer._check = (lambda _: checks[0]), (lambda _: checks[1])  # type: ignore[method-assign]
    source: Any = SimpleNamespace(name="own", type="train", agent=None, dataset={})
    writer.write(source, path, {}, written)
    *bad, file = map(json.loads, told.getvalue().splitlines()[1:])
    assert [(each["line"], each["rows"]) for each in bad] == [(1, 1), (2, 2)]
    assert (file["rows"], file["bad"], written.getvalue()) == (0, 3, "")


def test_a_csv_file_holds_long_texts_and_one_in_another_encoding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "q.csv"
    path.write_text(f"question\n{'x' * 200_000}\n")
    assert [number for number, _ in _lines(path)] == [2]
    path.write_text("\ufeffquestion\n1 + 1?\n")  # as a spreadsheet marks its encoding
    assert [json.loads(row) for _, row in _lines(path)] == [{"question": "1 + 1?"}]
    path.write_bytes("question\nDéjà vu?\n".encode("latin-1"))
    with pytest.raises(EndedError) as ended:
        list(_lines(path))
    assert ended.value.values["error"] == "DataError"
    assert str(path) in ended.value.values["message"]


def test_a_row_that_is_nested_too_deeply_is_a_bad_row() -> None:
    with pytest.raises(ValueError, match="not JSON"):
        ready_row(b"[" * 200_000, None, agent_prompts=False)


def test_lines_of_empty_cells_are_blank_in_a_csv_file(tmp_path: Path) -> None:
    """Spreadsheets write them for rows that were cleared; as rows they would be tasks without a prompt and an answer."""
    (tmp_path / "q.csv").write_text("question,expected_answer\n1 + 1?,2\n,\n , ,,\n\n2 + 2?,\n")
    rows = [(number, json.loads(line)) for number, line in _lines(tmp_path / "q.csv")]
    assert [(number, row["question"], row["expected_answer"]) for number, row in rows] == [
        (2, "1 + 1?", "2"),
        (6, "2 + 2?", ""),
    ]
