"""Which judges an environment's servers need, and which endpoints can serve them."""

from __future__ import annotations

from typing import Any

import pytest

from gymgate.core.config import CallableEndpoint, HTTPEndpoint, JudgeEndpoint, ReplayEndpoint
from gymgate.core.errors import NeedMissingError
from gymgate.gym.catalog.needs import judge_references
from gymgate.gym.inside.resolve import AGENTS, NOWHERE, ServerInstance
from gymgate.stack.daemon.plan import EnvironmentPlan, keyless_endpoints
from support.plans import plan_of

HTTP = HTTPEndpoint(base_url="http://127.0.0.1:1/v1")


def model(name: str) -> dict[str, str]:
    return {"type": "responses_api_models", "name": name}


def plan(
    agent: str | None = None, *, models: dict[str, JudgeEndpoint] | None = None, **settings: Any
) -> EnvironmentPlan:
    """Of one resources server with these settings, three agents (one with a user simulator) and their models."""
    entry = {"entrypoint": "app.py"}
    agents: dict[str, Any] = {
        "plain": {"simple_agent": {**entry, "model_server": model("policy_model")}},
        "talks": {"tau2": {**entry, "model_server": model("policy_model"), "user": model("user_model")}},
        "by_url": {"own": {**entry, "url": "${policy_base_url}", "judge_url": "${agents_judge_url}"}},
    }
    config = {
        "policy_base_url": NOWHERE,
        "rubric_base_url": NOWHERE,
        "agents_judge_url": NOWHERE,
        "r": {"resources_servers": {"r": {**entry, **settings}}},
        **{name: {"responses_api_agents": block} for name, block in agents.items()},
        "policy_model": {"responses_api_models": {"openai_model": entry}},
        "j": {"responses_api_models": {"openai_model": entry}},
    }
    return plan_of(config, agent=agent, models=models)


def references(agent: str | None = None, **settings: Any) -> dict[str, str]:
    return judge_references([*plan(agent, **settings).servers.values()])


def test_judges_of_the_servers_that_are_started() -> None:
    assert references("plain") == {}
    assert [*references("plain", judge=model("j"), own=model("policy_model"))] == ["j"]
    assert [*references("talks")] == ["user_model"]
    assert references("talks")["user_model"].endswith(" talks")
    assert {*references(judge=model("j"))} == {"j", "user_model"}
    own = ServerInstance(
        "a", AGENTS, "simple_agent", {"model_server": model("own_policy"), "user": model("u")}
    )
    assert {*judge_references([own])} == {"u"}
    caller = ServerInstance("b", AGENTS, "multi", {"user": {"type": AGENTS, "name": "a"}})
    assert {*judge_references([own, caller])} == {"own_policy", "u"}
    assert "policy_model_as_judge" in plan("plain", judge=model("policy_model")).judges
    assert "policy_model_as_judge" not in plan("plain", judge=model("j")).judges


def needed(agent: str, models: dict[str, JudgeEndpoint] | None = None, **settings: Any) -> str | None:
    try:
        plan(agent, models=models, **settings).require_judges()
    except NeedMissingError as error:
        return error.need
    return None


@pytest.mark.parametrize("endpoint", [HTTP, CallableEndpoint(name="x"), "policy", "none"])
@pytest.mark.parametrize("name", ["j", "*"])
def test_what_answers_for_a_judge_with_a_rollouts_key(name: str, endpoint: JudgeEndpoint) -> None:
    judge = model("j")
    assert needed("plain", judge=judge) == needed("plain", {"other": HTTP}, judge=judge) == "judge j"
    assert needed("plain", {name: endpoint}, judge=judge) is None


@pytest.mark.parametrize("name", ["rubric_base_url", "*"])
def test_a_judge_called_by_its_address_needs_one(name: str) -> None:
    """Nobody knows whose the call is, so that neither a rollout's policy nor a caller's function can answer it."""
    grading = {"judge_base_url": "${rubric_base_url}"}
    assert needed("plain", grading=grading) == "judge rubric_base_url"
    for endpoint in (HTTP, ReplayEndpoint(rollouts=("x.jsonl",)), "none"):
        assert needed("plain", {name: endpoint}, grading=grading) is None
    for wrong in ("policy", CallableEndpoint(name="x")):
        assert needed("plain", {name: wrong}, grading=grading) == "judge rubric_base_url"
    assert needed("plain", grading={"base_url": "${rubric_base_url}"}) is None  # says nothing of a judge


def test_the_policys_own_address_is_no_judge() -> None:
    """An agent with a process per rollout gets its policy by a URL; its judge's calls arrive at that process's ports."""
    assert plan("by_url").strategies == {"by_url": "process"}
    assert needed("by_url", {"agents_judge_url": HTTP}) is None
    assert needed("by_url") == "judge agents_judge_url"
    assert needed("plain", judge_base_url="${policy_base_url}") == "judge policy_base_url"


def test_endpoints_for_calls_without_a_key() -> None:
    given: dict[str, JudgeEndpoint] = {"a": HTTP, "b": "policy", "c": "none", "d": CallableEndpoint(name="x")}
    assert keyless_endpoints(given) == {"a": HTTP, "c": "none"}


def test_a_judge_past_the_gateway_is_told() -> None:
    (line,) = plan("plain", grading={"judge_base_url": "https://judges.example/v1"}).warnings()
    assert line.startswith("grading.judge_base_url of r ")
    assert "https://judges.example/v1" in line
    for settings in (
        {"judge_base_url": ""},
        {"judge_base_url": "${rubric_base_url}"},
        {"base_url": "https://x"},
    ):
        assert list(plan("plain", **settings).warnings()) == []


@pytest.mark.parametrize(
    ("more", "few"),
    [({}, True), ({"j": {"responses_api_models": {"openai_model": {"entrypoint": "app.py"}}}}, False)],
)
def test_rollouts_with_a_judge_may_hold_more_files(more: dict[str, Any], few: bool) -> None:
    """How many was measured with simple agents alone; more at once could run out of files."""
    agent = {"entrypoint": "app.py", "model_server": model("policy_model")}
    config = {
        "policy_base_url": NOWHERE,
        "a": {"responses_api_agents": {"simple_agent": agent}},
        "policy_model": {"responses_api_models": {"openai_model": {"entrypoint": "app.py"}}},
    }
    assert plan_of({**config, **more}).holds_few_files == few
