"""Config files read as Gym's parser reads them. Integration compares every packaged config with Gym itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from gymgate.gym.catalog.parse import MISSING, ConfigProblem, ConfigReader, copied, inherit, merge


def write(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else yaml.safe_dump(value))
    return path


def read(path: Path, *roots: Path) -> dict[str, Any]:
    node = ConfigReader(roots or (path.parent,)).read(path)
    node.pop("policy_model")
    return node


def test_the_includer_overrides_and_a_later_sibling_overrides_an_earlier(tmp_path: Path) -> None:
    """top -> (a -> inner, b); inner < a < b < top."""
    write(tmp_path / "inner.yaml", {"x": {"from": "inner", "inner": 1}})
    write(tmp_path / "a.yaml", {"config_paths": ["inner.yaml"], "x": {"from": "a", "a": 1}})
    write(tmp_path / "b.yaml", {"x": {"from": "b"}, "y": "b"})
    top = write(tmp_path / "top.yaml", {"config_paths": ["a.yaml", "b.yaml"], "y": "top"})
    assert read(top) == {"x": {"from": "b", "inner": 1, "a": 1}, "y": "top"}


def test_an_include_is_found_below_the_first_root_that_has_it(tmp_path: Path) -> None:
    own, site = tmp_path / "own", tmp_path / "site"
    write(site / "d/a.yaml", {"x": "site"})
    write(own / "d/a.yaml", {"x": "own"})
    top = write(tmp_path / "top.yaml", {"config_paths": ["d/a.yaml"]})
    assert read(top, own, site) == {"x": "own"}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(
            {"a": {"k": 1, "l": 2}, "b": {"_inherit_from": "a", "l": 3}}, {"b": {"k": 1, "l": 3}}, id="moves"
        ),
        pytest.param({"a": {"k": 1}, "b": {"_copy": "a"}}, {"a": {"k": 1}, "b": {"k": 1}}, id="copies"),
        pytest.param({"a": {"k": {"z": 1}}, "b": "${inherit_from:a.k}"}, {"a": {}, "b": {"z": 1}}, id="path"),
        pytest.param({"a": {"k": 1}, "b": "${copy:a.k}"}, {"a": {"k": 1}, "b": 1}, id="copied-value"),
        pytest.param(
            {"a": {"k": 1, "l": 2}, "b": {"_copy": "a", "_delete_key": "k, m", "m": 5}},
            {"a": {"k": 1, "l": 2}, "b": {"l": 2}},
            id="deletes-own-and-inherited",
        ),
        pytest.param({"a": MISSING, "b": {"_copy": "a"}}, {"a": MISSING, "b": MISSING}, id="missing-source"),
        pytest.param(
            {"a": {"k": 1}, "list": [{"x": "${copy:a.k}"}]}, {"a": {"k": 1}, "list": [{"x": 1}]}, id="lists"
        ),
        pytest.param({"x": "${inherit_from}", "y": "${other}"}, None, id="other-interpolations-stay"),
    ],
)
def test_directives(before: dict[str, Any], after: dict[str, Any] | None) -> None:
    expected = copied(before) if after is None else after
    inherit(before)
    assert before == expected


def test_an_inherited_path_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigProblem, match=r"a\.nope"):
        inherit({"a": {"k": 1}, "b": {"_copy": "a.nope"}})


def test_missing_leaves_what_is_there_and_lists_replace() -> None:
    target: dict[str, Any] = {"a": 1, "l": [1, 2], "n": {"x": 1}}
    merge(target, {"a": MISSING, "l": [3], "n": {"y": 2}, "new": MISSING})
    assert target == {"a": 1, "l": [3], "n": {"x": 1, "y": 2}, "new": MISSING}


def agent(implementation: str, resources: str | None, **settings: Any) -> dict[str, Any]:
    server = {"type": "resources_servers", "name": resources}
    return {"responses_api_agents": {implementation: {"resources_server": server, **settings}}}


def test_an_unbound_agent_takes_the_place_of_the_others(tmp_path: Path) -> None:
    write(tmp_path / "agent.yaml", {"my_agent": agent("cli_agent", MISSING, turns=3)})
    config = {
        "config_paths": ["agent.yaml"],
        "math_simple_agent": agent("simple_agent", "math", datasets=[1]),
    }
    node = read(write(tmp_path / "top.yaml", config))
    assert node == {"math_cli_agent": agent("cli_agent", "math", turns=3, datasets=[1])}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: [1\n", "top.yaml"),
        ("a: !nope 1\n", "top.yaml"),
        ("config_paths: [gone.yaml]\n", "gone.yaml"),
    ],
)
def test_a_broken_file_is_a_problem_in_one_line(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigProblem, match=reason) as caught:
        read(write(tmp_path / "top.yaml", text))
    assert "\n" not in str(caught.value)


def test_includes_in_a_circle_end(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", {"config_paths": ["b.yaml"], "x": 1})
    write(tmp_path / "b.yaml", {"config_paths": ["a.yaml"], "y": 2})
    assert read(tmp_path / "a.yaml") == {"x": 1, "y": 2}
