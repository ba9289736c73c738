"""What is made of an environment's resolved config, and of keys that are not set."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gymgate.core import codec
from gymgate.core.config import CallableEndpoint, HTTPEndpoint, RolloutLimits, StackConfig
from gymgate.core.errors import ConfigError, NeedMissingError
from gymgate.gym.gym_config import checked_config, parse_order
from gymgate.gym.inside.forkserver import preloading
from gymgate.gym.inside.resolve import NOWHERE, ServerInstance, unset
from gymgate.gym.server_code import ServerCode, component_roots, own_files, read_code
from gymgate.stack.daemon.plan import servers_to_start
from gymgate.stack.wire import endpoint_from_wire, endpoint_to_wire, stack_to_wire
from support.plans import plan_of


def server(kind: str, type_: str, **block: Any) -> dict[str, Any]:
    return {kind: {type_: {"entrypoint": "app.py", **block}}}


def reference(kind: str, name: str) -> dict[str, str]:
    return {"type": kind, "name": name}


CONFIG: dict[str, Any] = {
    "maths": server("resources_servers", "maths", judge=reference("responses_api_models", "judge_model")),
    "solo": server(
        "responses_api_agents", "simple_agent", model_server=reference("responses_api_models", "policy_model")
    ),
    "team": server("responses_api_agents", "relay_agent", inner=[reference("responses_api_agents", "solo")]),
    "other": server("responses_api_agents", "simple_agent"),
    "relay": server("environment_servers", "legacy_agent"),
    "policy_model": server("responses_api_models", "openai_model", key="x"),
    "judge_model": server("responses_api_models", "vllm_model"),
    "policy_base_url": "http://127.0.0.1:1/v1",
}


@pytest.mark.parametrize(
    ("block", "strategy", "policy"),
    [
        ({"model_server": reference("responses_api_models", "policy_model")}, "url", set()),
        ({"base_url": "${policy_base_url}"}, "process", {"policy_base_url"}),
        ({"provider": {"options": [{"url": "${own_base_url}"}]}}, "process", {"own_base_url"}),
        ({"grader": "${judge_base_url}"}, "url", set()),
        (
            {"base_url": "${policy_base_url}", "inner": reference("responses_api_agents", "solo")},
            "url",
            set(),
        ),
        ({"base_url": "https://api.example.com/v1"}, "none", set()),
        ({"base_url": "${set_base_url}"}, "none", set()),
    ],
    ids=[
        "model server",
        "url",
        "url deep inside",
        "judge",
        "another agent",
        "elsewhere",
        "elsewhere by a key",
    ],
)
def test_how_an_agent_without_a_model_server_is_routed(
    block: dict[str, Any], strategy: str, policy: set[str]
) -> None:
    config = {
        "cli": server("responses_api_agents", "codex_agent", **block),
        "set_base_url": "https://api.example.com/v1",
        **dict.fromkeys(("policy_base_url", "own_base_url", "judge_base_url"), NOWHERE),
    }
    plan = plan_of(config)
    assert plan.strategies == {"cli": strategy}
    assert plan_of(config, routing="process").strategies == {"cli": strategy.replace("url", "process")}
    if strategy == "process":
        assert plan.policy_urls(plan.servers["cli"]) == policy


def test_servers_hold_no_rollout_up_at_gyms_limit_of_connections(tmp_path: Path) -> None:
    """An agent calls itself once per rollout; NeMo Gym allows 1,024 connections to one host unless told otherwise."""
    initial = parse_order([tmp_path], (), tmp_path, tmp_path)["initial"]
    placed = plan_of(initial | CONFIG).server_config({"solo": 1}, {"policy_model": 2, "judge_model": 3})
    assert placed["global_aiohttp_connector_limit_per_host"] == 0


def test_models_move_to_the_gateway_and_relays_go() -> None:
    gateway = {"policy_model": 2001, "judge_model": 2002}
    placed = plan_of(CONFIG).server_config({"maths": 1001, "solo": 1002}, gateway)
    assert "relay" not in placed
    assert placed["policy_model"] == {
        "responses_api_models": {"openai_model": {"key": "x", "host": "127.0.0.1", "port": 2001}}
    }
    assert placed["judge_model"]["responses_api_models"]["vllm_model"]["port"] == 2002
    assert placed["maths"]["resources_servers"]["maths"]["port"] == 1001
    assert placed["maths"]["resources_servers"]["maths"]["entrypoint"] == "app.py"
    assert placed["policy_base_url"] == CONFIG["policy_base_url"]
    assert "port" not in CONFIG["maths"]["resources_servers"]["maths"]


def test_a_resources_server_that_judges_by_the_policy_is_told_from_its_turns() -> None:
    config = CONFIG | {
        "maths": server(
            "resources_servers", "maths", judges=[reference("responses_api_models", "policy_model"), {"n": 1}]
        )
    }
    assert plan_of(config).judges == {"judge_model", "policy_model_as_judge"}
    assert plan_of(CONFIG).judges == {"judge_model"}
    ports = {"policy_model": 1, "judge_model": 2, "policy_model_as_judge": 3}
    placed = plan_of(config).server_config({"maths": 4, "solo": 5}, ports)
    judges = placed["maths"]["resources_servers"]["maths"]["judges"]
    assert judges == [reference("responses_api_models", "policy_model_as_judge"), {"n": 1}]
    agent = placed["solo"]["responses_api_agents"]["simple_agent"]
    assert agent["model_server"] == reference("responses_api_models", "policy_model")
    stand_in = placed["policy_model_as_judge"]["responses_api_models"]["openai_model"]
    assert stand_in == {"key": "x", "host": "127.0.0.1", "port": 3}


@pytest.mark.parametrize(
    ("agent", "servers"),
    [
        (None, ["maths", "solo", "team", "other"]),
        ("solo", ["maths", "solo"]),
        ("team", ["maths", "solo", "team"]),
    ],
)
def test_servers_to_start(agent: str | None, servers: list[str]) -> None:
    """A named agent brings those that it refers to."""
    assert [item.name for item in servers_to_start(CONFIG, agent)] == servers


def test_rows_go_to_the_chosen_agent_else_to_the_first() -> None:
    assert plan_of(CONFIG).default_agent == "solo"
    assert plan_of(CONFIG, agent="team").default_agent == "team"


def test_an_unknown_agent_is_named_with_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"'nobody'.*other, solo, team"):
        servers_to_start(CONFIG, "nobody")


def test_missing_keys_are_a_need() -> None:
    with pytest.raises(NeedMissingError, match=r"'search'.*tavily_api_key"):
        checked_config({"missing": ["tavily_api_key"]}, "search")
    with pytest.raises(ConfigError, match="two lines"):
        checked_config({"error": "Error: two\n lines"}, "search")
    unset = "InterpolationResolutionError: \"Environment variable 'MY_KEY' not found\""
    with pytest.raises(ConfigError, match="--env-var MY_KEY"):
        checked_config({"error": unset}, "search")


def test_unset_keys_of_models_get_placeholders() -> None:
    """What only a model server uses is the gateway's to fill; the rest is the user's."""
    merged = {
        "judge": server(
            "responses_api_models",
            "openai_model",
            url="${judge_base_url}",
            key="${judge_api_key}",
            model="???",
        ),
        "search": server(
            "resources_servers", "search", key="${tavily_api_key}", model="${judge_api_key}", set="${given}"
        ),
        "given": 1,
    }
    placeholders = {
        "judge_base_url": "http://127.0.0.1:1/v1",
        "judge_api_key": "gymgate",
        "judge.responses_api_models.openai_model.model": "gymgate",
    }
    assert unset(merged) == (placeholders, ["tavily_api_key"])


def test_models_called_by_url_get_a_place_on_the_gateway() -> None:
    """A server that takes the policy's or a judge's URL, in place of a model server's name."""
    config = {
        "strict": server("resources_servers", "strict", url="${judge_base_url}", mine="${my_url}"),
        "judge": server("responses_api_models", "openai_model", url="${other_base_url}"),
        "judge_base_url": NOWHERE,
        "other_base_url": NOWHERE,
        "my_url": "http://mine/v1",
    }
    plan = plan_of(config)
    assert plan.urls == ("judge_base_url",)
    placed = plan.server_config({"strict": 1}, {"judge": 2, "judge_base_url": 3})
    assert placed["judge_base_url"] == "http://127.0.0.1:3/v1"
    assert (placed["other_base_url"], placed["my_url"]) == (NOWHERE, "http://mine/v1")


def code_of(root: Path, **files: str) -> ServerCode:
    """What the code of a resources server under a root shows; `app.py` calls nothing unless it is given."""
    for name, text in {"app": "import json\n", **files}.items():
        path = root / "resources_servers" / "maths" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return read_code(MATHS, [root])


MATHS = ServerInstance("maths", "resources_servers", "maths", {"entrypoint": "app.py"})


@pytest.mark.parametrize(
    ("code", "uses"),
    [
        ("class A:\n    ray_enabled = False\nimport ray\n", False),
        ("class A:\n    ray_enabled: bool = True\nimport ray\n", True),
        ("@ray.remote\ndef f(): ...\n", True),
        ("array.remote_calls\n# an import of rays\n", False),
    ],
)
def test_uses_ray(tmp_path: Path, code: str, uses: bool) -> None:
    directory = tmp_path / "resources_servers" / "maths"
    (directory / "tests").mkdir(parents=True)
    (directory / "tests" / "test_app.py").write_text("import ray\n")
    assert code_of(tmp_path, app=code) == ServerCode(directory, uses_ray=uses)


@pytest.mark.parametrize(
    "place",
    [
        ".venv/lib/python3.13/site-packages/ray",
        "venv/lib/anything",
        ".cache/wheels",
        "build/lib/site-packages/ray",
        "node_modules/ray",
        "helpers/__pycache__",
        "helpers/tests",
    ],
)
def test_what_lies_beside_a_servers_code_does_not_make_it_use_ray(tmp_path: Path, place: str) -> None:
    directory = tmp_path / "resources_servers" / "maths"
    (directory / "venv").mkdir(parents=True)
    (directory / "venv" / "pyvenv.cfg").touch()
    (directory / place).mkdir(parents=True)
    (directory / place / "__init__.py").write_text("import ray\n")
    assert not code_of(tmp_path).uses_ray
    assert [*own_files(directory)] == [directory / "app.py"]
    (directory / "helpers" / "deep").mkdir(parents=True)
    (directory / "helpers" / "deep" / "work.py").write_text("import ray\n")
    assert code_of(tmp_path).uses_ray


def test_what_a_servers_code_shows_of_its_workers_and_containers(tmp_path: Path) -> None:
    assert code_of(tmp_path)[2:] == (False, None)
    shown = code_of(tmp_path, work="DockerProvider()", more="num_workers: Literal[1] = 1")
    assert shown[2:] == (True, Path("maths/more.py"))


def test_servers_are_found_in_the_users_tree_first(tmp_path: Path) -> None:
    mine, site = tmp_path / "mine", tmp_path / "site"
    for root in (mine, site):
        code_of(root)
    roots = component_roots([mine / "resources_servers" / "maths" / "configs" / "a.yaml"], (), site)
    assert read_code(MATHS, roots).directory == mine / "resources_servers" / "maths"
    with pytest.raises(ConfigError, match="component_roots"):
        read_code(MATHS, [tmp_path])


def test_deferred_packages_are_imported_when_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`from package import name` at the top of a module costs nothing until the name is called."""
    (tmp_path / "heavy_package").mkdir()
    (tmp_path / "heavy_package" / "__init__.py").write_text("class Frame(dict): pass\n")
    (tmp_path / "light_module.py").write_text(
        "import heavy_package.sub\nfrom heavy_package import Frame\n"
        "from typing import Optional\ndef f(x: Optional[Frame] = None) -> Frame | None: return Frame(a=1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(preloading, "DEFERRED", ("heavy_package",))
    finder = preloading.DeferringFinder()
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    light = importlib.import_module("light_module")
    for name in ("heavy_package", "heavy_package.sub"):
        del sys.modules[name]
    sys.meta_path.remove(finder)  # type: ignore[arg-type]
    made = light.f()
    assert made == {"a": 1}
    assert isinstance(made, light.Frame)
    monkeypatch.delitem(sys.modules, "heavy_package")
    monkeypatch.delitem(sys.modules, "light_module")


def test_secrets_cross_the_wire_in_the_clear_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    headers = {"X-Team": "s3cret team"}
    judge = HTTPEndpoint(
        base_url="http://h/v1", api_key_env="JUDGE_KEY", headers=headers, sampling=(("stop", ("a", "b")),)
    )
    config = StackConfig(environments=("mcqa",), models={"judge_model": judge, "*": "policy"})
    received = StackConfig.model_validate(codec.loads(codec.dumps(stack_to_wire(config))))
    endpoint = dict(received.models)["judge_model"]
    assert isinstance(endpoint, HTTPEndpoint)
    assert endpoint.api_key is not None
    assert endpoint.api_key.get_secret_value() == "s3cret"
    assert endpoint.api_key_env is None, "a variable of this process"
    assert [(name, value.get_secret_value()) for name, value in endpoint.headers] == [*headers.items()]
    assert dict(received.models)["*"] == "policy"
    assert "s3cret" not in config.model_dump_json() + received.model_dump_json() + repr(received)
    assert endpoint_from_wire(endpoint_to_wire(judge)) == endpoint
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ConfigError, match="JUDGE_KEY"):
        endpoint_to_wire(judge)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), "inf", "nan"])
@pytest.mark.parametrize(
    ("model", "field"),
    [
        (RolloutLimits, "timeout_s"),
        (RolloutLimits, "max_calls"),
        (HTTPEndpoint, "timeout_s"),
        (HTTPEndpoint, "max_retries"),
        (CallableEndpoint, "timeout_s"),
        (StackConfig, "start_timeout_s"),
        (StackConfig, "linger_s"),
        (StackConfig, "hang_timeout_s"),
    ],
)
def test_limits_and_timeouts_are_finite(model: Any, field: str, value: Any) -> None:
    """JSON has no infinity and no NaN: they would arrive as null."""
    fields = {"base_url": "http://h/v1", "name": "f", "environments": ("mcqa",)}
    given = {name: fields[name] for name in fields if name in model.model_fields}
    with pytest.raises(ValidationError, match=field):
        model.model_validate({**given, field: value})


@pytest.mark.parametrize("value", [float("inf"), [0.5, float("nan")], {"a": {"b": (float("-inf"),)}}])
def test_sampling_is_finite(value: Any) -> None:
    with pytest.raises(ValidationError, match="sampling"):
        HTTPEndpoint(base_url="http://h/v1", sampling=(("top_p", value),))
    assert HTTPEndpoint(base_url="http://h/v1", sampling=(("top_p", 0.5), ("stop", "inf"))).sampling


def test_the_policy_moves_to_the_address_for_sandboxes_and_nothing_else_does() -> None:
    ports = {"policy_model": 2, "judge_model": 3}
    placed = plan_of(CONFIG, gateway_host="192.0.2.7").server_config({"maths": 4, "solo": 5}, ports)
    models = {name: next(iter(placed[name]["responses_api_models"].values())) for name in ports}
    assert (models["policy_model"]["host"], models["judge_model"]["host"]) == ("192.0.2.7", "127.0.0.1")
    assert placed["maths"]["resources_servers"]["maths"]["host"] == "127.0.0.1"


@pytest.mark.parametrize(("host", "shown"), [("192.0.2.7", "192.0.2.7"), ("fd00::1", "[fd00::1]")])
def test_the_address_for_sandboxes_stands_in_urls(host: str, shown: str) -> None:
    by_url = {name: CONFIG[name] for name in ("solo", "policy_model")}
    plan = plan_of(by_url, gateway_host=host)
    assert (plan.policy_host, [*plan.warnings()]) == (shown, [])
    by_process = plan_of(by_url, gateway_host=host, routing="process")
    assert by_process.policy_host == "127.0.0.1"
    assert "gateway_host" in next(by_process.warnings())


def test_an_agent_that_replaces_loopback_is_told_where_the_policy_is() -> None:
    block = {"entrypoint": "app.py", "model_server": {"type": "responses_api_models", "name": "policy_model"}}
    config = CONFIG | {"own": {"responses_api_agents": {"harness_agent": block}}}
    placed = plan_of(config).server_config({"own": 1}, {"policy_model": 2, "judge_model": 3})
    agent = placed["own"]["responses_api_agents"]["harness_agent"]
    assert agent["sandbox_model_base_url"] == "http://127.0.0.1:2"
    block["sandbox_model_base_url"] = "http://mine"
    placed = plan_of(config).server_config({"own": 1}, {"policy_model": 2, "judge_model": 3})
    assert placed["own"]["responses_api_agents"]["harness_agent"]["sandbox_model_base_url"] == "http://mine"


def test_a_server_that_makes_containers_without_a_setting(tmp_path: Path) -> None:
    """As anyterminal_agent does: these containers are labelled, too."""
    made = "provider = DockerProvider(create=None)\n"
    imported = "from nemo_gym.sandbox.providers.docker import DockerProvider\n"
    for code, settings, uses in (
        (made, {}, True),
        (made, {"sandbox_provider": {"apptainer": {}}}, False),
        (imported, {}, False),
    ):
        config = {"maths": server("resources_servers", "maths", **settings)}
        plan = replace(plan_of(config), code={"maths": code_of(tmp_path, app=code)})
        assert plan.uses_docker is uses
