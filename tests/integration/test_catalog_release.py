"""The catalog over real releases: everything loads, configs read as Gym's parser reads them, rows are rows."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gymgate.cli import cli
from gymgate.core.config import DEFAULT_NEMO_GYM, SUPPORTED_NEMO_GYM, RuntimeConfig
from gymgate.core.errors import ConfigError
from gymgate.gym.catalog import Catalog, Environment
from gymgate.gym.catalog.parse import ConfigProblem, ConfigReader
from gymgate.gym.row_sources import open_rows
from gymgate.gym.runtime import Runtime, clean_env, ensure_runtime

pytestmark = pytest.mark.gym

COUNTS = {
    "0.7.0": {"resources_servers": 145, "environments": 49, "benchmarks": 120},
    "0.6.0": {"resources_servers": 116, "environments": 43, "benchmarks": 95},
}
"""Directories with a config: 6 of the 55 under environments/ of 0.7.0 only forward to another one, and
benchmarks/prompts holds prompts."""
RUNS_WITH_THE_WHEEL = (
    "blackjack",
    "calendar",
    "circle_click",
    "circle_count",
    "equivalence_rule",
    "example_multi_step",
    "example_session_state_mgmt",
    "example_single_tool_call",
    "format_verification",
    "gpqa_diamond",
    "indirect_prompt_injection",
    "math_proof_judgement",
    "nvarc",
    "proof_genselect",
    "proof_judge",
    "ruler",
    "text_to_sql",
    "workplace_assistant",
    "xlam_fc",
)
"""Ran in 0.7.0 and 0.6.0 with nothing but the wheel."""


@pytest.fixture(
    params=SUPPORTED_NEMO_GYM,
    scope="module",
)
def runtime(request: pytest.FixtureRequest) -> Runtime:
    return ensure_runtime(RuntimeConfig(version=request.param))


@pytest.fixture(scope="module")
def catalog(runtime: Runtime) -> Catalog:
    return Catalog(runtime.site, runtime.version)


@pytest.fixture(scope="module")
def environments(catalog: Catalog) -> list[Environment]:
    return catalog.environments()


def test_every_environment_loads(environments: list[Environment], runtime: Runtime) -> None:
    assert Counter(item.kind for item in environments) == COUNTS[runtime.version]
    assert all(item.configs for item in environments)


def test_rows_of_datasets_outside_the_release_are_those_that_nemo_gym_states(catalog: Catalog) -> None:
    def stated(name: str) -> dict[str, int | None]:
        found = catalog.find(name)
        return {each.path.rpartition("/")[2]: found.stated_rows(each) for each in found.config().datasets}

    assert stated("mcqa") == {
        "train.jsonl": 27568,
        "validation.jsonl": None,
        "example.jsonl": 5,
        "example_with_template_metadata.jsonl": 5,
    }
    assert stated("benchmarks/ifbench") == {"ifbench_benchmark.jsonl": 294}  # 1470, each five times
    assert stated("benchmarks/gpqa") == {"gpqa_diamond_benchmark.jsonl": None}  # 0


def test_find_agrees_with_the_list(catalog: Catalog, environments: list[Environment]) -> None:
    fresh = Catalog(catalog.site, catalog.version)
    for item in environments[::20]:
        assert fresh.find(f"{item.kind}/{item.name}") == item


def test_what_ran_with_the_wheel_alone_needs_nothing(catalog: Catalog) -> None:
    needy = {name: catalog.find(name).config().needs for name in RUNS_WITH_THE_WHEEL}
    assert {name: needs for name, needs in needy.items() if needs} == {}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("math_with_judge", "package"),
        ("mcqa", "package"),
        ("imo_proofbench_judge", "judge"),
        ("tavily_search", "key"),
        ("google_search", "key"),
        ("ifbench", "git"),
        ("ether0", "git"),
        ("bird_sql", "download"),
        ("critpt", "key"),
        ("wmt_translation", "gpu"),
    ],
)
def test_what_is_known_to_need_something(catalog: Catalog, name: str, kind: str) -> None:
    assert kind in catalog.find(name).config().need_kinds


def test_packaged_rows_are_rows(environments: list[Environment]) -> None:
    rows = recordings = 0
    for item in environments:
        recordings += len(item.recordings())
        for file in item.data:
            if file.kind == "rows":
                rows += sum(1 for _ in open_rows(str(file.path), environment=None))
    assert rows > 700
    assert recordings > 80


def test_nearly_every_resources_server_has_example_rows(environments: list[Environment]) -> None:
    servers = [item for item in environments if item.kind == "resources_servers"]
    without = []
    for item in servers:
        try:
            if item.data_file().kind != "rows":
                without.append(item.name)
        except ConfigError:
            without.append(item.name)
    assert set(without) <= {"nemo_user_sim"}


@pytest.mark.parametrize(
    "runtime",
    [
        pytest.param(each, marks=() if each == DEFAULT_NEMO_GYM else pytest.mark.heavy)
        for each in SUPPORTED_NEMO_GYM
    ],
    indirect=True,
    scope="module",
)
def test_configs_read_as_gyms_own_parser_reads_them(
    environments: list[Environment], runtime: Runtime, tmp_path: Path
) -> None:
    paths = [str(config.path) for item in environments for config in item.configs]
    script = Path(__file__).with_name("catalog_gym_parser.py")
    done = subprocess.run(
        [str(runtime.python), str(script)],
        input="\n".join(paths),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=clean_env(),
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads(done.stdout.splitlines()[-1])
    reader = ConfigReader([runtime.site])
    different = [path for path in paths if not same(ours(reader, Path(path)), theirs[path])]
    assert different == []


def ours(reader: ConfigReader, path: Path) -> Any:
    try:
        return json.loads(json.dumps(reader.read(path), default=str))
    except ConfigProblem as problem:
        return str(problem)


def same(mine: Any, gyms: Any) -> bool:
    """Equal but for the policy's own values, which the test gives to Gym, and instances made from its model."""
    if not isinstance(mine, dict) or not isinstance(gyms, dict):
        return isinstance(mine, str) and isinstance(gyms, str)
    names = {name for name in {*mine, *gyms} if not name.startswith("policy_")}
    return all(name in mine and name in gyms for name in names) and all(
        equal(mine[name], gyms[name]) for name in names if "openai_model" not in models_of(gyms[name])
    )


def models_of(instance: Any) -> Any:
    return (instance.get("responses_api_models") or {}) if isinstance(instance, dict) else {}


def equal(mine: Any, gyms: Any) -> bool:
    """OmegaConf reads `1e6` as a number, YAML 1.1 as text."""
    if isinstance(mine, dict) and isinstance(gyms, dict):
        return mine.keys() == gyms.keys() and all(equal(mine[key], gyms[key]) for key in mine)
    if isinstance(mine, list) and isinstance(gyms, list):
        return len(mine) == len(gyms) and all(map(equal, mine, gyms))
    return bool(mine == gyms) or (isinstance(gyms, float) and isinstance(mine, str) and float(mine) == gyms)


def run(*arguments: str) -> str:
    done = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_list(runtime: Runtime) -> None:
    version = ("--gym", runtime.version)
    lines = run("list", *version).splitlines()
    assert len(lines) == 1 + sum(COUNTS[runtime.version].values())
    assert lines[0].split() == ["environment", "kind", "domain", "agents", "data", "needs"]
    assert any(line.split()[0] in ("calendar", "environments/calendar") for line in lines)
    assert "single_step_tool_use_with_argument_comparison" in run("list", "single_step", *version)
    free = json.loads(run("list", "--needs", "none", "--json", *version))
    assert {item["name"] for item in free} >= {"workplace_assistant", "calendar"}
    assert all(item["needs"] == [] for item in free)
    judged = json.loads(run("list", "--needs", "judge", "--without", "key", "--json", *version))
    assert all({need["kind"] for need in item["needs"]} & {"judge", "key"} == {"judge"} for item in judged)
    assert judged
    assert run("list", "no such environment", *version) == ""


def test_info(runtime: Runtime) -> None:
    version = ("--gym", runtime.version)
    text = run("info", "mcqa", *version)
    for expected in ("mcqa_simple_agent (simple_agent)", "example_rollouts  ", "package: tiktoken"):
        assert expected in text
    assert "[user] You should output your final response letter" in text
    described = json.loads(run("info", "resources_servers/mcqa", "--json", *version))
    assert described["default_config"] == "mcqa"
    assert {"name": "example", "kind": "rows"}.items() <= described["data"][0].items()
    assert described["data"][0]["lines"] == 5
    assert described["configs"][0]["requirements"] == ["tiktoken"]


def test_info_says_which_provider_and_images_an_environment_asks_for(runtime: Runtime) -> None:
    text = run("info", "terminal_bench_2_1", "--gym", runtime.version)
    assert "--sandbox (block 'sandbox')" in text
    assert ": alexgshaw/path-tracing:20251031, alexgshaw/" in text
    for name in ("mcqa", "responses_api_agents/anyterminal_agent"):
        images = json.loads(run("info", name, "--json", "--gym", runtime.version))["row_images"]
        assert ("alexgshaw/fix-git:20260403" in images) is (name != "mcqa")


def test_each_place_of_the_release_that_runs_code_was_read() -> None:
    command = [sys.executable, str(Path(__file__).parents[2] / "locks" / "places.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, (
        f"{done.stdout}{done.stderr}; read it: src/gymgate/gym/catalog/code_places.toml"
    )


def test_the_scans_that_ship_are_those_of_the_releases() -> None:
    command = [sys.executable, str(Path(__file__).parents[2] / "locks" / "scans.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}; make them again: ./dev python locks/scans.py"
