"""The documentation: its links, commands and programs are real, and its site builds without a warning."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urlsplit

import click
import pytest
import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

from gymgate.cli import cli
from gymgate.cli.init import NAME, TEMPLATE, write_environment
from gymgate.core.errors import MissingExtraError
from support.pages import command_lines

ROOT = Path(__file__).parents[2]
GENERATOR = ROOT / ".venv-docs" / "bin" / "zensical"
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "examples/**/README.md", "environments/**/README.md")
    for path in ROOT.glob(pattern)
)
NAMES = [path.relative_to(ROOT).as_posix() for path in PAGES]
LOADED = {
    ("script", "src"),
    ("link", "href"),
    ("img", "src"),
    ("iframe", "src"),
    ("source", "src"),
    ("object", "data"),
}
"""Tags whose attribute a browser fetches by itself."""


@cache
def tokens(path: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(path.read_text())


@cache
def anchors(path: Path) -> set[str]:
    """Ids of a page's headings, as GitHub and the site's generator make them."""
    found = set()
    parsed = tokens(path)
    for opening, content in pairwise(parsed):
        if opening.type == "heading_open":
            text = re.sub(r"[^\w\s-]", "", content.content.replace("`", "")).strip().lower()
            found.add(re.sub(r"[\s]", "-", text))
    return found


def links(path: Path) -> Iterator[str]:
    for token in tokens(path):
        for child in token.children or []:
            target = child.attrs.get("href") or child.attrs.get("src")
            if target:
                yield str(target)


def blocks(path: Path, language: str) -> Iterator[str]:
    for token in tokens(path):
        if token.type == "fence" and token.info.strip() == language:
            yield token.content


def commands() -> Iterator[tuple[str, list[str]]]:
    """Each `gymgate` command line, with the page that has it."""
    for name, path in zip(NAMES, PAGES, strict=True):
        for line in command_lines(path):
            words = shlex.split(line, comments=True)
            if words[:1] == ["./dev"] and words[1:2] in (["eval"], ["run"], ["setup"], ["doctor"]):
                words[0] = "gymgate"
            if words[:1] == ["gymgate"]:
                yield name, words[1:]


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    wrong = []
    for link in links(page):
        parts = urlsplit(link)
        if parts.scheme:
            continue
        target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
        if not target.exists():
            wrong.append(f"{link}: no such file")
        elif parts.fragment and target.suffix == ".md" and parts.fragment not in anchors(target):
            wrong.append(f"{link}: no such heading")
    assert wrong == []


def test_every_page_is_in_the_navigation() -> None:
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(), yaml.BaseLoader)["nav"]  # which ignores the tag !ENV
    listed = re.findall(r"[\w-]+\.md", str(nav))
    assert sorted(listed) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_commands_are_real() -> None:
    """Names of commands and options, and the form of their values, are those of the command line."""
    wrong, seen = [], 0
    for name, words in commands():
        context = click.Context(cli, info_name="gymgate")
        group: click.Command = cli
        arguments = words
        while isinstance(group, click.Group) and arguments and not arguments[0].startswith("-"):
            command = group.get_command(context, arguments[0])
            if command is None:
                break
            group, arguments = command, arguments[1:]
        seen += 1
        try:
            group.make_context(words[0] if words else "gymgate", [*arguments], parent=context)
        except (click.exceptions.Exit, MissingExtraError):
            pass  # --help, --version; the form of the line is right
        except click.ClickException as error:
            wrong.append(f"{name}: gymgate {shlex.join(words)}: {error.format_message()}")
    assert wrong == []
    assert seen > 40


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_tables_belong_to_a_table(name: str) -> None:
    """A row behind an empty line is a paragraph of bars."""
    rows = [token.content for token in tokens(ROOT / name) if token.type == "inline" and token.level == 1]
    assert [row for row in rows if row.startswith("| ")] == []


@pytest.mark.parametrize("name", NAMES)
def test_programs_are_python(name: str) -> None:
    for block in blocks(ROOT / name, "python"):
        whole = block.replace(", ...)", ")")  # what a program leaves out
        compile(whole, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("name", NAMES)
def test_files_that_are_named_exist(name: str) -> None:
    """Tests by name, below `tests` or with a directory before it; programs and configs of the examples by path."""
    text = (ROOT / name).read_text()
    tests = re.findall(r"(?:[\w-]+/)*test_\w+\.py", text)
    known = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py")}
    known |= {
        f"tests/{path.name}".replace(NAME, "warehouse") for path in Path(str(TEMPLATE)).rglob("test_*.py")
    }
    wrong = [each for each in tests if not any(f"/{path}".endswith(f"/{each}") for path in known)]
    examples = re.findall(r"(?<![\w/])examples/[\w./-]*\w", text)
    wrong += [each for each in examples if not (ROOT / each).exists()]
    assert wrong == []


def test_the_tutorial_shows_the_files_of_the_template(tmp_path: Path) -> None:
    page = ROOT / "docs" / "own-environment.md"
    write_environment("warehouse", tmp_path / "warehouse")
    written = tmp_path / "warehouse" / "resources_servers" / "warehouse"
    app = (written / "app.py").read_text()
    shown = [*blocks(page, "python")]
    assert [block for block in shown if textwrap.indent(block, "    ") not in app] == []
    assert len(shown) == 3
    [tree] = [
        block
        for block in blocks(page, "text")
        if block.startswith("warehouse/resources_servers/warehouse/\n")
    ]
    paths = {path.relative_to(written).as_posix() for path in written.rglob("*") if path.is_file()}
    assert {line.split()[0] for line in tree.splitlines()[1:]} == paths


class Page(HTMLParser):
    """Ids, links and fetched addresses of one built page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if key in ("id", "name") and value:
                self.ids.add(value)
            if tag == "a" and key == "href" and value:
                self.links.append(value)
            if (tag, key) in LOADED and value:
                self.fetched.append(value)


def python(program: Path, *arguments: Path) -> None:
    subprocess.run([sys.executable, program, *arguments], check=True, capture_output=True, timeout=60)


@pytest.mark.skipif(not GENERATOR.exists(), reason="needs the site's generator: `./dev docs` installs it")
def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("environments"))
    python(tmp_path / "docs" / "environment_pages.py")
    for name in ("mkdocs.yml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    repository = "https://example.org/x/y"
    done = subprocess.run(
        [GENERATOR, "build", "--clean", "--strict"],
        cwd=tmp_path,
        env={**os.environ, "GYMGATE_REPOSITORY": repository},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "site"
    python(tmp_path / "docs" / "index.py", site)
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html")}
    wrong = []
    for path, page in pages.items():
        for link in page.links + page.fetched:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https", "mailto") or link.startswith("//"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.is_relative_to(site.resolve()) and path.name == "404.html":
                continue
            if not target.exists():
                wrong.append(f"{path.name}: {link}: no such file")
            elif parts.fragment and target in pages and parts.fragment not in pages[target].ids:
                wrong.append(f"{path.name}: {link}: no such heading")
        wrong += [f"{path.name} loads {link}" for link in page.fetched if urlsplit(link).netloc]
    for style in [*site.rglob("*.css"), *site.rglob("*.svg")]:
        wrong += [
            f"{style.name} loads {found}"
            for found in re.findall(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//[^)'\"]+", style.read_text())
        ]
    assert wrong == []
    assert [path.name for path, page in pages.items() if repository not in page.links] == []
    assert not (site / "__pycache__").exists()
    assert {f"{path.stem}.html" for path in (ROOT / "docs").glob("*.md")} <= {path.name for path in pages}
    found = [each["location"] for each in json.loads((site / "search.json").read_text())["items"]]
    assert [
        each for each in found if re.match(r"(environments/|findings).*#", each)
    ] == []  # pages come first
    assert "faq.html" in found
    environments = {path.name for path in (site / "environments").iterdir()}
    assert len(environments) > 100
    linked = {
        name: {link for link in pages[site / name].links if link.startswith("environments/")}
        for name in ("findings.html", "environments-status.html")
    }
    assert linked["environments-status.html"] == {f"environments/{name}" for name in environments}
    assert len(linked["findings.html"]) > 20
