"""The pages about environments, the index for programs and the badges, as docs/generate.py and docs/index.py make them."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from gymgate.cli import cli
from gymgate.quality import CheckResult
from gymgate.quality.record.findings import findings
from gymgate.quality.record.storage import shipped_records

ROOT = Path(__file__).parents[2]
MEASURED = [record for record in shipped_records() if record.measured]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The text of each environment's page, by name."""
    directory = tmp_path_factory.mktemp("pages")
    program = "import environment_pages, pathlib, sys; environment_pages.write_environments(pathlib.Path(sys.argv[1]))"
    command = [sys.executable, "-c", program, str(directory)]
    subprocess.run(command, cwd=ROOT / "docs", check=True, timeout=60, capture_output=True)
    return {path.stem: path.read_text() for path in directory.iterdir()}


def known_as(record: CheckResult) -> str:
    return record.environment if record.kind == "resources_servers" else f"{record.kind}/{record.environment}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, str(ROOT / "docs" / "index.py"), str(directory)]
    subprocess.run(command, check=True, timeout=60, capture_output=True)
    return directory


def holds(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """Whether a value has the form of a schema, as far as this one needs: objects, lists, enumerations, types."""
    if "$ref" in schema:
        return holds(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema:
        return any(holds(value, each, root) for each in schema["anyOf"])
    if "const" in schema or "enum" in schema:
        return value in schema.get("enum", [schema.get("const")])
    kinds: dict[str, Any] = {
        "string": str, "integer": int, "number": (int, float), "null": type(None), "array": list, "object": dict,
        "boolean": bool,
    }  # fmt: skip
    if not isinstance(value, kinds[schema["type"]]):
        return False
    if schema["type"] == "array":
        return all(holds(each, schema["items"], root) for each in value)
    if schema.get("additionalProperties") is True:
        return True
    properties = schema.get("properties", {})
    return schema["type"] != "object" or (
        value.keys() >= {*schema.get("required", ())}
        and all(key in properties and holds(each, properties[key], root) for key, each in value.items())
    )


def test_the_index_has_every_record_and_the_form_of_its_schema(site: Path) -> None:
    index = json.loads((site / "index.json").read_text())
    schema = json.loads((ROOT / "docs" / "index.schema.json").read_text())
    assert holds(index, schema, schema)
    assert not holds({**index, "environments": [{}]}, schema, schema)
    assert index["schema_version"] == 1
    records = {(record.kind, record.environment): record for record in shipped_records()}
    entries = {(entry["kind"], entry["name"]): entry for entry in index["environments"]}
    assert entries.keys() == records.keys()
    for name, record in records.items():
        entry = entries[name]
        assert [each["text"] for each in entry["findings"]] == [str(each) for each in findings(record)]
        assert entry["verdict"] == record.verdict
        assert (entry["page"] is not None) == record.measured
        assert record.data is None or entry["duplicates"] == record.data.duplicates
    dismissed = entries["benchmarks", "litmus-bench"]["oracle"]
    assert (dismissed["solvable"], dismissed["accepts"], dismissed["asked_for"]) == (None, None, None)


def test_every_environment_has_a_badge(site: Path) -> None:
    entries = json.loads((site / "index.json").read_text())["environments"]
    badges = {entry["badge"]: json.loads((site / entry["badge"]).read_text()) for entry in entries}
    for entry in entries:
        badge = badges[entry["badge"]]
        assert badge.keys() == {"schemaVersion", "label", "message", "color"}
        decided = [each for each in entry["findings"] if "undecided: " not in each["text"]]
        assert (badge["color"] == "yellow") == bool(decided)
        assert badge["color"] != "brightgreen" or entry["verdict"] == "match"
    assert badges["badges/resources_servers/moldetox.json"]["color"] == "brightgreen"
    unprobed = badges["badges/resources_servers/calendar.json"]
    assert (unprobed["color"], "not probed" in unprobed["message"]) == ("lightgrey", True)
    assert badges["badges/resources_servers/multichallenge.json"]["message"].endswith("1 finding")


def commands(text: str) -> Iterator[list[str]]:
    text = re.sub(r"^````text\n.*?^````", "", text, flags=re.DOTALL | re.MULTILINE)
    for block in re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield from (shlex.split(line) for line in block.splitlines())


def test_the_commands_on_the_pages_and_in_the_index_are_real(site: Path, pages: dict[str, str]) -> None:
    findings_page = (ROOT / "docs" / "findings.md").read_text()
    found = [each for page in (*pages.values(), findings_page) for each in commands(page)]
    entries = json.loads((site / "index.json").read_text())["environments"]
    found += [shlex.split(each["command"]) for entry in entries for each in entry["findings"]]
    assert len(pages) == len(MEASURED) > 100
    assert len(found) > 3 * len(pages)
    for program, name, *arguments in found:
        assert program == "gymgate"
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        command.make_context(name, arguments)


def test_findings_stand_once_by_kind_with_a_command(site: Path) -> None:
    text, _, counts = (ROOT / "docs" / "findings.md").read_text().partition('<h2 id="suspicions"')
    assert not re.search(r"resources_servers/|environments/", counts), (
        "suspicions are not published by environment"
    )
    found = [(record, each) for record in shipped_records() for each in findings(record)]
    proven = [(record, each.proof, each.probe) for record, each in found if each.proof is not None]
    graders = {(proof.file, proof.line, probe) for _, proof, probe in proven}
    lines = [line for line in text.splitlines() if re.match(r"\| (?!environment \||---)", line)]
    assert len(lines) == len(found) - len(proven) + len(graders)
    for record, proof, _ in proven:
        assert any(f"`{known_as(record)}`" in line and f"{proof.file}:{proof.line}" in line for line in lines)
    for section in text.split("<h2 ")[1:]:
        assert len(list(commands(section))) >= 1, section.splitlines()[0]


def test_names_on_the_pages_about_all_environments_lead_to_pages(tmp_path: Path) -> None:
    """In the site only; what has no page and other code stay as they are."""
    page = tmp_path / "findings.html"
    page.write_text(
        "<code>mcqa</code>, <code>environments/calendar</code>, <code>aviary</code> <code>--probe</code>"
    )
    subprocess.run(
        [sys.executable, str(ROOT / "docs" / "index.py"), str(tmp_path)],
        check=True,
        timeout=60,
        capture_output=True,
    )
    assert "aviary" not in {record.environment for record in MEASURED}
    assert page.read_text() == (
        '<a href="environments/mcqa.html"><code>mcqa</code></a>, '
        '<a href="environments/environments-calendar.html"><code>environments/calendar</code></a>, '
        "<code>aviary</code> <code>--probe</code>"
    )


@pytest.mark.parametrize("record", MEASURED, ids=known_as)
def test_a_page_says_first_what_the_environment_is(record: CheckResult, pages: dict[str, str]) -> None:
    """Then commands, an example, sizes, quality, and last the folded figures."""
    page = pages[known_as(record).replace("/", "-")]
    text = re.sub(r"(^````text\n).*?(^````)", r"\1\2", page, flags=re.DOTALL | re.MULTILINE)
    parts = [
        "| domain |",
        "| licence of its data |",
        "| needs |",
        "Source: ",
        "```bash",
        '<h2 id="rows"',
        '<h2 id="quality"',
        "\n- ",
    ]
    places = [text.find(part) for part in [*parts, "<summary>Figures</summary>"]]
    assert -1 not in places
    assert places == sorted(places)
    assert text.count("<details") == text.count("</details>") <= 2
    if "<summary>Example prompt</summary>" in text:
        assert places[4] < text.index("<summary>Example prompt</summary>") < places[5]
    quality = text[places[6] : places[-1]]
    assert re.findall(r"^- ", quality, re.MULTILINE) == ["- "] * len(
        re.findall(r"^- [✓⚠–] \S", quality, re.MULTILINE)
    )
    assert [words[:3] for words in commands(text)] == [
        ["gymgate", name, known_as(record)] for name in ("info", "run", "check")
    ]


def test_the_table_shows_first_what_a_reader_looks_for() -> None:
    text = (ROOT / "docs" / "environments-status.md").read_text()
    (head,) = [line for line in text.splitlines() if line.startswith("| environment |")]
    names = [cell.strip() for cell in head.strip("|").split("|")]
    assert names == ["environment", "domain", "what it is", "needs", "verdict", "solvable", "difficulty"]
    lines = [line for line in text.splitlines() if line.count(" | ") == len(names) - 1]
    assert len(lines) == len(shipped_records()) + 2
    needs = [line.strip("| ").split(" | ")[names.index("needs")] for line in lines[2:]]
    at_once = needs.count("none")
    assert at_once > 20
    assert needs[:at_once] == ["none"] * at_once, "first what runs at once"


def test_coding_agents_find_every_page(site: Path) -> None:
    listed = re.findall(r"^- \[.+?\]\(([\w-]+)\.html\): ", (site / "llms.txt").read_text(), re.MULTILINE)
    pages = re.findall(r"([\w-]+)\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert listed == pages
    assert len(pages) > 40


def test_search_lowers_headings_on_what_was_measured() -> None:
    items = [
        {"location": location, "title": title, "path": ["Part", "Benchmarks"]}
        for location, title in (
            ("benchmarks.html", "Benchmarks"),
            ("benchmarks.html#trainings", "Trainings"),
            ("train-trl.html#trainings", "Trainings"),
        )
    ]
    program = "import index, json, sys; print(json.dumps(index.lower(index.lower(json.load(sys.stdin)))))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT / "docs",
        input=json.dumps(items),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert [(item["location"], item["title"]) for item in json.loads(done.stdout)] == [
        ("benchmarks.html", "Benchmarks"),
        ("train-trl.html#trainings", "Trainings"),
        ("benchmarks.html#trainings", "Benchmarks: Trainings"),
    ]


def test_an_answer_that_ships_is_the_one_that_was_given() -> None:
    program = "import json, records, sys; print(json.dumps(records.portable(json.loads(sys.argv[1]))))"
    given = {"answer": "a:\n    b  c", "said": "a\n b", "flagged": [{"answer": "/tmp/x/y.py\n\n"}]}
    command = [sys.executable, "-c", program, json.dumps(given)]
    result = subprocess.run(command, cwd=ROOT / "docs", check=True, timeout=60, capture_output=True)
    shipped = {"answer": "a:\n    b  c", "said": "a b", "flagged": [{"answer": ".../y.py\n\n"}]}
    assert json.loads(result.stdout) == shipped
