"""Digests of what can change a reward: they follow content, and nothing else."""

from __future__ import annotations

import functools
import importlib.util
import linecache
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from gymgate.core.config import EnvironmentConfig, ReplayEndpoint, RolloutLimits
from gymgate.core.errors import ConfigError
from gymgate.gym.catalog import Catalog
from gymgate.runs.described.settings import differences, settings_of
from gymgate.stack.content import environment_content, file_digest, source_digest, variable_digests
from gymgate.stack.description import endpoint_settings

CONFIG = """\
graded:
  resources_servers:
    graded:
      entrypoint: app.py
      domain: other
      level: {level}
graded_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: app.py
      resources_server: {{type: resources_servers, name: graded}}
      datasets:
      - {{name: example, type: example, jsonl_fpath: {rows}}}
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "mine"
    server = root / "resources_servers/graded"
    for directory in (server / "configs", server / "tests", server / "data", root / "resources_servers/base"):
        directory.mkdir(parents=True)
    (server / "configs/graded.yaml").write_text(CONFIG.format(level=1, rows="data/a.jsonl"))
    (server / "app.py").write_text("from resources_servers.base.app import Base\nREWARD = 1.0\n")
    (server / "prompt.j2").write_text("Say it.\n")
    (server / "tests/test_app.py").write_text("")
    (server / "data/a.jsonl").write_text("{}\n")
    (root / "resources_servers/base/app.py").write_text("class Base: ...\n")
    return root


def content(root: Path) -> dict[str, str]:
    catalog = Catalog(root.parent / "site", "0.7.0")
    environment = catalog.find(str(root / "resources_servers/graded/configs/graded.yaml"))
    return environment_content(environment.config(), (), catalog.site)


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


SERVER = "resources_servers/graded"


@pytest.mark.parametrize(
    ("file", "text", "names"),
    [
        ("app.py", "REWARD = 0.0\n", {f"{SERVER}/app.py", "resources_servers/base/app.py"}),
        ("prompt.j2", "Sing it.\n", {f"{SERVER}/prompt.j2"}),
        ("helper.py", "X = 1\n", {f"{SERVER}/helper.py"}),
        ("../base/app.py", "class Base: reward = 0\n", {"resources_servers/base/app.py"}),
        (
            "configs/graded.yaml",
            CONFIG.format(level=2, rows="data/a.jsonl"),
            {"config"},
        ),
        ("configs/graded.yaml", "# a comment\n" + CONFIG.format(level=1, rows="data/b.jsonl"), set()),
        ("configs/other.yaml", "a: 1\n", set()),
        ("tests/test_app.py", "assert True\n", set()),
        ("data/a.jsonl", "{}\n{}\n", set()),
        ("data/notes.md", "x", set()),
    ],
)
def test_an_environments_content_is_its_code_and_config(
    repository: Path, file: str, text: str, names: set[str]
) -> None:
    before = content(repository)
    (repository / SERVER / file).write_text(text)
    assert changed(before, content(repository)) == names


@pytest.mark.parametrize("words", ["from resources_servers import base", "import resources_servers.base"])
def test_a_server_that_is_imported_counts_however_it_is(repository: Path, words: str) -> None:
    (repository / SERVER / "app.py").write_text(f"{words}\n")
    assert "resources_servers/base/app.py" in content(repository)


def test_content_does_not_depend_on_place_and_times(repository: Path, tmp_path: Path) -> None:
    before = content(repository)
    elsewhere = tmp_path / "other" / "checkout"
    shutil.copytree(repository, elsewhere)
    for path in elsewhere.rglob("*.py"):
        os.utime(path, (1, 1))
    assert content(elsewhere) == before


def test_an_own_config_of_packaged_servers_has_its_config(repository: Path) -> None:
    """Nothing else of it is the user's."""
    shutil.rmtree(repository.parent / "site", ignore_errors=True)
    site = repository.parent / "site"
    shutil.move(repository / "resources_servers", site / "resources_servers")
    own = repository / "own.yaml"
    own.write_text(CONFIG.format(level=3, rows="data/a.jsonl"))
    catalog = Catalog(site, "0.7.0")
    assert {*environment_content(catalog.find(str(own)).config(), (), site)} == {"config"}
    assert environment_content(catalog.find("graded").config(), (), site) == {}
    beside = catalog.find("graded", [str(own), "graded"]).config([str(own), "graded"])
    assert {*environment_content(beside, (), site)} == {"config"}


FUNCTION = """\
import math
LIMIT = {limit}
def helper(text): return text{suffix}
def policy(body):
    def inner(): return helper("a") + str(LIMIT) + str(math.pi)
    return inner()
def unrelated(): return {unrelated}
class Object:
    def __call__(self, body): return helper("b")
{last}
"""


@pytest.fixture
def module(tmp_path: Path) -> Iterator[Callable[..., ModuleType]]:
    made: list[str] = []

    def make(limit: int = 1, suffix: str = "", unrelated: int = 0, last: str = "") -> ModuleType:
        name = f"policies_{len(made)}"
        path = tmp_path / name / "policies.py"
        path.parent.mkdir()
        path.write_text(FUNCTION.format(limit=limit, suffix=suffix, unrelated=unrelated, last=last))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        value = importlib.util.module_from_spec(spec)
        sys.modules[name] = value
        made.append(name)
        spec.loader.exec_module(value)
        return value

    yield make
    for name in made:
        del sys.modules[name]


@pytest.mark.parametrize(
    "of", [lambda m: m.policy, lambda m: functools.partial(m.policy), lambda m: m.Object()]
)
def test_a_functions_source_and_what_it_names_count(
    module: Callable[..., ModuleType], of: Callable[[ModuleType], object]
) -> None:
    before = source_digest(of(module()))
    assert before is not None
    assert source_digest(of(module(unrelated=2, last="print('evaluate(repeats=2)', end='')"))) == before
    assert source_digest(of(module(suffix=" + '!'"))) != before


def test_a_constant_that_a_function_names_counts(module: Callable[..., ModuleType]) -> None:
    assert source_digest(module().policy) != source_digest(module(limit=2).policy)


TWINS = """\
import functools
MODEL = {model!r}
KINDS = ({model!r}, 1)
PROMPTS = {{"system": [{model!r}]}}
class Base:
    def said(self): return {model!r}
class Plain(Base):
    def __call__(self, body): return self.said()
class Object:
    def __init__(self, model):
        self.model, self.calls = model, 0
    def __call__(self, body):
        self.calls += 1
        return self.model
    def method(self, body): return self.model
def answer(body, model): return model
def enclosing(model):
    count, log = 0, []
    def policy(body):
        nonlocal count
        count += 1
        log.append(body)
        return model
    return policy
def wrapping(function):
    @functools.wraps(function)
    def wrapper(body): return function(body) + {model!r}
    return wrapper
@wrapping
def wrapped(body): return "x"
@functools.lru_cache
def cached(): return {model!r}
def default(body, model=MODEL): return model
def by_keyword(body, *, model=MODEL): return model
def of_tuple(body): return KINDS[0]
def of_dict(body): return PROMPTS
def of_cached(body): return cached()
object_ = Object({model!r})
def of_object(body): return object_(body)
"""


@pytest.mark.parametrize(
    "of",
    [
        lambda m, model: functools.partial(m.answer, model=model),
        lambda m, model: functools.partial(m.answer, {"sampling": model}),
        lambda m, model: m.enclosing(model),
        lambda m, model: m.Object(model),
        lambda m, model: m.Object(model).method,
        lambda m, model: m.wrapped,
        lambda m, model: m.default,
        lambda m, model: m.by_keyword,
        lambda m, model: m.of_tuple,
        lambda m, model: m.of_dict,
        lambda m, model: m.of_cached,
        lambda m, model: m.of_object,
        lambda m, model: m.Plain(),
    ],
)
def test_callables_of_one_source_that_do_different_things_differ(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    of: Callable[[ModuleType, str], Callable[[object], object]],
) -> None:
    def policy(number: int, model: str) -> Callable[[object], object]:
        path = tmp_path / f"twins_{number}.py"
        path.write_text(TWINS.format(model=model))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        value = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, path.stem, value)
        spec.loader.exec_module(value)
        return of(value, model)

    small, again, large = policy(1, "small"), policy(2, "small"), policy(3, "large")
    before = source_digest(small)
    assert before is not None
    if not isinstance(small, functools.partial):
        small({})  # what it counts is not what it is
    assert source_digest(small) == source_digest(again) == before
    assert source_digest(large) != before


def test_keys_and_addresses_that_a_function_is_given_may_change() -> None:
    def answer(body: object, *, api_key: str, url: str, model: str) -> str:
        return f"{api_key}{url}{model}"

    one = functools.partial(answer, api_key="a", url="http://h:1/v1", model="m")
    other = functools.partial(answer, api_key="b", url="http://h:2/v1", model="m")
    assert source_digest(one) == source_digest(other)
    assert source_digest(one) != source_digest(functools.partial(one, model="n"))


def test_an_object_whose_class_stands_in_a_notebook_has_the_source_of_its_functions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python finds a class by its module's file, which a notebook has not, and a function by its cell."""
    notebook = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", notebook)

    def digest(answer: str) -> str | None:
        source = f"class Policy:\n    def __call__(self, body): return {answer!r}\n"
        cell = f"<cell {answer}>"
        monkeypatch.setitem(linecache.cache, cell, (len(source), None, source.splitlines(True), cell))
        exec(compile(source, cell, "exec"), vars(notebook))
        return source_digest(notebook.Policy())

    assert digest("a") == digest("a") != digest("b")


class Counted:
    calls = 0

    def __call__(self, body: object) -> str:
        Counted.calls += 1
        return "a"


def test_what_a_callable_counts_on_its_class_is_not_what_it_is() -> None:
    before = source_digest(Counted())
    Counted()({})
    assert source_digest(Counted()) == before is not None


class Tally:
    def __init__(self) -> None:
        self.calls = 0


@dataclass(frozen=True, slots=True)
class Sampling:
    temperature: float


class Unreadable:
    def __getattr__(self, name: str) -> object:
        raise RuntimeError(name)


def test_what_a_callable_sets_on_an_object_is_not_what_it_is() -> None:
    tally = Tally()

    def policy(body: object) -> str:
        tally.calls += 1
        return "a"

    before = source_digest(policy)
    policy({})
    assert source_digest(policy) == before


def test_attributes_in_slots_count() -> None:
    def policy(sampling: Sampling) -> Callable[[object], str]:
        return lambda body: str(sampling.temperature)

    assert source_digest(policy(Sampling(0.0))) == source_digest(policy(Sampling(0.0)))
    assert source_digest(policy(Sampling(0.0))) != source_digest(policy(Sampling(1.0)))


def test_an_object_that_cannot_be_read_has_no_digest() -> None:
    assert source_digest(Unreadable()) is None


def test_a_function_without_source_has_no_digest() -> None:
    scope: dict[str, object] = {}
    exec("def policy(body): return 'a'", scope)
    assert source_digest(scope["policy"]) is None
    assert source_digest(len) is None


def test_variables_are_salted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODE", "easy")
    monkeypatch.delenv("ABSENT", raising=False)
    one, again, other = (variable_digests(["MODE", "ABSENT"], salt) for salt in ("a", "a", "b"))
    assert one == again
    assert one["MODE"] != other["MODE"]
    assert one["ABSENT"] is None
    monkeypatch.setenv("MODE", "hard")
    assert variable_digests(["MODE"], "a")["MODE"] != one["MODE"]


def test_a_key_may_be_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAVILY_API_KEY", "one")
    monkeypatch.setenv("MODE", "easy")
    settings = settings_of(lambda body: "", RolloutLimits(), [], ("TAVILY_API_KEY", "MODE"), "salt")
    assert {*settings["variables"]} == {"MODE"}


def test_replayed_files_count_by_content(tmp_path: Path) -> None:
    one, other = tmp_path / "a" / "r.jsonl", tmp_path / "b" / "r.jsonl"
    for path in (one, other):
        path.parent.mkdir()
        path.write_text("{}\n")
    settings = [endpoint_settings(ReplayEndpoint(rollouts=(str(path),))) for path in (one, other)]
    assert settings[0] == settings[1]
    other.write_text("{}\n{}\n")
    assert file_digest(one) != file_digest(other)
    assert endpoint_settings(ReplayEndpoint(rollouts=(str(other),))) != settings[0]


def test_where_files_lie_is_no_difference() -> None:
    before = {"sources": ["/a/rows.jsonl"], "interpreter": "/a/python", "salt": "x"}
    assert differences(before, {"sources": ["/b/rows.jsonl"], "interpreter": "/b/python", "salt": "y"}) == []
    assert differences(before, {"sources": ["/b/other.jsonl"]}) != []


def test_two_environments_of_one_name_are_refused(repository: Path, tmp_path: Path) -> None:
    shutil.copytree(repository, tmp_path / "second")
    catalog = Catalog(tmp_path / "site", "0.7.0")
    names = [str(root / "resources_servers/graded") for root in (repository, tmp_path / "second")]
    assert [*catalog.environments_of([EnvironmentConfig(name=names[0])])] == ["graded"]
    with pytest.raises(ConfigError) as raised:
        catalog.environments_of([EnvironmentConfig(name=name) for name in names])
    assert all(name in str(raised.value) for name in names)
