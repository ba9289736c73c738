"""What `num_workers` of an environment's servers comes to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gymgate.core.errors import ConfigError
from gymgate.gym.inside.resolve import servers_of
from gymgate.gym.server_code import read_code
from gymgate.stack.workers import Workers, count_workers
from support.plans import plan_of

REFERENCE = {"type": "resources_servers", "name": "maths"}


def workers(
    root: Path,
    maths: dict[str, Any],
    solver: dict[str, Any] | None = None,
    *,
    code: str = "",
    in_processes: tuple[str, ...] = (),
    **others: Any,
) -> Workers:
    """The workers of a resources server and an agent with these settings; `code` is the agent's."""
    solver = {"resources_server": REFERENCE, **(solver or {})}
    config: dict[str, Any] = {
        "maths": {"resources_servers": {"maths": {"entrypoint": "app.py", **maths}}},
        "solver": {"responses_api_agents": {"own": {"entrypoint": "app.py", **solver}}},
        **others,
    }
    for directory, text in (("resources_servers/maths", ""), ("responses_api_agents/own", code)):
        (root / directory).mkdir(parents=True, exist_ok=True)
        (root / directory / "app.py").write_text(text)
    servers = [each for each in servers_of(config) if each.name in ("maths", "solver", "episodes")]
    return count_workers(config, {server.name: read_code(server, [root]) for server in servers}, in_processes)


@pytest.mark.parametrize("nothing", [{}, {"num_workers": None}, {"num_workers": 1}, {"num_workers": 0}])
def test_one_unless_the_config_says_more(tmp_path: Path, nothing: dict[str, Any]) -> None:
    assert workers(tmp_path, nothing) == Workers({"maths": 1, "solver": 1}, ())


def test_an_agent_has_as_many_as_the_resources_server_that_it_names(tmp_path: Path) -> None:
    assert workers(tmp_path, {}, {"num_workers": 4}).counts == {"maths": 1, "solver": 4}
    assert workers(tmp_path, {"num_workers": "4"}).counts == {"maths": 4, "solver": 4}
    assert workers(tmp_path, {"num_workers": 2}, {"num_workers": 4}).counts == {"maths": 2, "solver": 4}


@pytest.mark.parametrize(
    "code",
    [
        "if self.config.num_workers not in (None, 1):\n    raise ValueError",
        "if (self.num_workers or 1) > 1:\n    raise ValueError",
        "class Config(Base):\n    num_workers: Literal[1] = 1",
    ],
)
def test_a_server_whose_code_limits_its_workers(tmp_path: Path, code: str) -> None:
    found = workers(tmp_path, {}, {"num_workers": 4}, code=code)
    assert found.counts == {"maths": 1, "solver": 1}
    (warning,) = found.warnings
    assert warning.startswith("solver.responses_api_agents.own.num_workers=4 ")
    assert "own/app.py" in warning


def test_a_setting_of_its_own_with_that_name_is_no_limit(tmp_path: Path) -> None:
    code = "class Config(Base):\n    num_workers: int | None\nPool(max_workers=num_workers)"
    assert workers(tmp_path, {}, {"num_workers": 4}, code=code).counts["solver"] == 4


def test_an_agent_with_a_process_per_rollout(tmp_path: Path) -> None:
    """Each of its processes calls a worker of the resources server."""
    found = workers(tmp_path, {"num_workers": 4}, {"num_workers": 2}, in_processes=("solver",))
    assert found.counts == {"maths": 4, "solver": 1}
    (warning,) = found.warnings
    assert warning.endswith("(--agent-processes)")


@pytest.mark.parametrize(
    ("kind", "type_"), [("responses_api_models", "some"), ("environment_servers", "legacy_agent")]
)
def test_servers_that_gymgate_stands_in_for(tmp_path: Path, kind: str, type_: str) -> None:
    found = workers(tmp_path, {}, other={kind: {type_: {"entrypoint": "app.py", "num_workers": 16}}})
    assert found.counts == {"maths": 1, "solver": 1}
    (warning,) = found.warnings
    assert warning.startswith(f"other.{kind}.{type_}.num_workers=16 ")


def test_an_environment_server_has_as_many_as_the_servers_that_it_calls(tmp_path: Path) -> None:
    """Each of its workers calls one worker of its agent, which keeps the session."""
    reference = {"type": "responses_api_agents", "name": "solver"}
    block = {"entrypoint": "app.py", "agent_server": reference}
    (tmp_path / "environment_servers" / "turn").mkdir(parents=True)
    (tmp_path / "environment_servers" / "turn" / "app.py").touch()
    config = {"episodes": {"environment_servers": {"turn": block}}}
    for settings, count in (({}, 3), ({"num_workers": 2}, 3), ({"num_workers": 4}, 4)):
        started = {"episodes": {"environment_servers": {"turn": {**block, **settings}}}}
        assert workers(tmp_path, {}, {"num_workers": 3}, **started).counts == {
            "maths": 1,
            "solver": 3,
            "episodes": count,
        }
    assert workers(tmp_path, {"num_workers": 3}, **config).counts["episodes"] == 3


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    """A mistake in the name of a `--set`."""
    found = workers(tmp_path, {}, mathe={"resources_servers": {"maths": {"num_workers": 4}}})
    assert found.counts == {"maths": 1, "solver": 1}
    (warning,) = found.warnings
    assert warning.startswith("mathe.resources_servers.maths.num_workers=4 ")


@pytest.mark.parametrize("value", ["many", [4]])
def test_no_number(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"solver.*num_workers"):
        workers(tmp_path, {}, {"num_workers": value})


def test_servers_are_told_of_one_worker_each() -> None:
    """NeMo Gym's own way to several fails for agents that are not made for it, and each process is one of ours."""
    config = {"maths": {"resources_servers": {"maths": {"entrypoint": "app.py", "num_workers": 4}}}}
    placed = plan_of(config).server_config({"maths": 7}, {})
    assert placed["maths"]["resources_servers"]["maths"]["num_workers"] == 1
