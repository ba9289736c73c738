"""What runs a row, by the config alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from gymgate.core.config import POLICY, EnvironmentConfig
from gymgate.core.errors import ConfigError
from gymgate.stack.daemon.plan import EnvironmentPlan
from support.stacks import stack_config

AGENTS, RESOURCES = "responses_api_agents", "resources_servers"


def agent(name: str, model: str = POLICY, type_: str = "simple_agent") -> dict[str, Any]:
    reference = {"type": "responses_api_models", "name": model}
    return {name: {AGENTS: {type_: {"entrypoint": "app.py", "model_server": reference}}}}


def owner(name: str, *agents: str, type_: str = "turn", **block: Any) -> dict[str, Any]:
    references = {f"agent_{each}": {"type": AGENTS, "name": each} for each in agents}
    return {name: {"environment_servers": {type_: {"entrypoint": "app.py", **references, **block}}}}


def relay(agent: str) -> dict[str, Any]:
    return owner(f"{agent}_relay", type_="legacy_agent", agent_server={"type": AGENTS, "name": agent})


MODEL = {POLICY: {"responses_api_models": {"openai_model": {"entrypoint": "app.py"}}}}
SERVER = {"maths": {RESOURCES: {"maths": {"entrypoint": "app.py"}}}}


def plan_of(root: Path, *parts: dict[str, Any], version: str = "0.7.0", **spec: Any) -> EnvironmentPlan:
    config: dict[str, Any] = {}
    for part in (MODEL, SERVER, *parts):
        config |= copy.deepcopy(part)
    for instance in config.values():
        for kind, types in instance.items() if isinstance(instance, dict) else ():
            for type_ in types if kind.endswith(("servers", "agents")) else ():
                (root / kind / type_).mkdir(parents=True, exist_ok=True)
                (root / kind / type_ / "app.py").touch()
    environment = EnvironmentConfig(name="e", **spec)
    return EnvironmentPlan.read(environment, stack_config(environment), version, config, [root])


def test_relays_are_no_servers_and_lead_to_their_agent(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, agent("a"), relay("a"))
    assert {*plan.servers} == {"maths", "a"}
    for name in (None, "a", "a_relay"):
        chosen = plan.destination(name)
        assert (chosen.server, chosen.agent, chosen.owns_episode) == ("a", "a", False)
    assert "a_relay" not in plan.server_config(
        dict.fromkeys(plan.servers, 1), dict.fromkeys(plan.model_servers, 2)
    )


def test_an_environment_server_is_started_and_runs_its_agents_rows(tmp_path: Path) -> None:
    plan = plan_of(
        tmp_path, agent("a"), owner("e", "a", resources_server={"type": RESOURCES, "name": "maths"})
    )
    assert {*plan.servers} == {"maths", "a", "e"}
    for name in (None, "a", "e"):
        chosen = plan.destination(name)
        assert (chosen.server, chosen.agent, chosen.owns_episode) == ("e", "a", True)
        assert (chosen.taskset, chosen.untrainable, chosen.stand_ins) == ("maths", None, frozenset())
    config = plan.server_config(dict.fromkeys(plan.servers, 1), dict.fromkeys(plan.model_servers, 2))
    assert config["e"]["environment_servers"]["turn"]["port"] == 1


@pytest.mark.parametrize("others", [(owner("second", "a"),), (relay("a"),)])
def test_an_agent_behind_several_is_refused_with_their_names(tmp_path: Path, others: Any) -> None:
    plan = plan_of(tmp_path, agent("a"), owner("first", "a"), *others)
    other = next(iter(others[0]))
    with pytest.raises(ConfigError) as error:
        plan.destination("a")
    assert all(name in str(error.value) for name in ("first", other, "_ng_environment_server"))
    assert plan.destination("first").server == "first"


def test_a_taskset_has_its_route_and_a_name_in_the_row_precedes_it(tmp_path: Path) -> None:
    routes = {"environment_server_routes": {"t:one": "one", "t:gone": "gone"}}
    plan = plan_of(tmp_path, agent("a"), owner("one", "a"), agent("b"), owner("two", "b"), routes)
    assert plan.destination(None, "t:one").server == "one"
    assert plan.destination("b", "t:one").server == "one"
    assert plan.destination("two", "t:one").server == "two"
    assert plan.destination("b", "t:other").server == "two"
    with pytest.raises(ConfigError, match="gone"):
        plan.destination("a", "t:gone")


def test_only_what_an_environment_needs_is_started(tmp_path: Path) -> None:
    parts = [agent("a"), agent("b"), owner("one", "a", "b"), agent("c"), owner("two", "c"), agent("d")]
    for name in ("a", "one"):
        assert {*plan_of(tmp_path, *parts, agent=name).servers} == {"maths", "a", "b", "one"}
    assert {*plan_of(tmp_path, *parts, agent="d").servers} == {"maths", "d"}


@pytest.mark.parametrize("type_", ["mini_swe_agent", "langgraph_agent", "harbor_agent", "remote_agent"])
def test_an_agent_that_drops_the_key_in_its_url_is_refused_in_one_line(tmp_path: Path, type_: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan_of(tmp_path, agent("a", type_=type_), owner("e", "a"))
    assert all(name in str(error.value) for name in ("'e'", "'a'", type_))
    assert "\n" not in str(error.value)


def test_several_agents_with_the_policys_model_server_get_one_each(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, agent("a"), agent("b"), agent("c", "other_model"), owner("e", "a", "b", "c"))
    assert plan.stand_ins == {"a": f"{POLICY}_as_a", "b": f"{POLICY}_as_b"}
    chosen = plan.destination()
    assert chosen.policy_servers == {POLICY, *plan.stand_ins.values()}
    assert chosen.callers == {f"{POLICY}_as_a": "a", f"{POLICY}_as_b": "b", "other_model": "c"}
    assert chosen.agent == "e"
    assert "e.environment_servers.turn.agent_server" in (chosen.untrainable or "")
    config = plan.server_config(dict.fromkeys(plan.servers, 1), dict.fromkeys(plan.model_servers, 2))
    assert config["a"][AGENTS]["simple_agent"]["model_server"]["name"] == f"{POLICY}_as_a"
    assert config["c"][AGENTS]["simple_agent"]["model_server"]["name"] == "other_model"
    assert {*plan.stand_ins.values()} <= {*config}


def test_an_agent_with_a_model_server_in_place_of_the_policys_is_the_policy_alone(tmp_path: Path) -> None:
    """A row that names its relay goes to the agent itself."""
    plan = plan_of(tmp_path, agent("a"), agent("b"), owner("e", "a", "b"), relay("a"))
    chosen = plan.destination("a_relay")
    assert (chosen.server, chosen.owns_episode) == ("a", False)
    assert chosen.policy_servers == {POLICY, f"{POLICY}_as_a"}
    assert chosen.stand_ins == {f"{POLICY}_as_a"}


def test_the_attributed_agent_is_the_policy(tmp_path: Path) -> None:
    server = {"type": AGENTS, "name": "b"}
    plan = plan_of(tmp_path, agent("a"), agent("b"), owner("e", "a", agent_server=server))
    chosen = plan.destination()
    assert (chosen.agent, chosen.untrainable) == ("b", None)
    assert chosen.policy_servers == {POLICY, f"{POLICY}_as_b"}
    assert chosen.stand_ins == {f"{POLICY}_as_a", f"{POLICY}_as_b"}


def test_an_agent_that_is_called_twice_is_one(tmp_path: Path) -> None:
    server = plan_of(tmp_path, agent("a"), owner("e", "a")).servers["e"]
    again = next(
        value for value in server.block.values() if isinstance(value, dict) and value.get("type") == AGENTS
    )
    twice = server._replace(block={**server.block, "again": again})
    assert (twice.called_agents, twice.attributed_agent) == (("a",), "a")


def test_the_only_agent_with_the_policys_model_server_is_the_policy(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, agent("a", "user_model"), agent("b"), owner("e", "a", "b"))
    chosen = plan.destination()
    assert (chosen.agent, chosen.untrainable, plan.stand_ins) == ("b", None, {})
    assert chosen.policy_servers == {POLICY}


def test_another_agent_with_the_policys_model_server_is_not_the_policy(tmp_path: Path) -> None:
    """The one that NeMo Gym attributes has a model server of its own."""
    server = {"type": AGENTS, "name": "b"}
    plan = plan_of(tmp_path, agent("a"), agent("b", "own_model"), owner("e", "a", agent_server=server))
    chosen = plan.destination()
    assert (chosen.agent, chosen.policy_servers) == ("b", {POLICY, "own_model"})
    assert chosen.stand_ins == {f"{POLICY}_as_a"}


def test_a_judge_that_is_the_policy_is_asked_apart_from_it(tmp_path: Path) -> None:
    judge = {"type": "responses_api_models", "name": POLICY}
    plan = plan_of(tmp_path, agent("a"), owner("e", "a", judge_model=judge))
    config = plan.server_config(dict.fromkeys(plan.servers, 1), dict.fromkeys(plan.model_servers, 2))
    assert config["e"]["environment_servers"]["turn"]["judge_model"]["name"] == f"{POLICY}_as_judge"
    assert config["a"][AGENTS]["simple_agent"]["model_server"]["name"] == POLICY
