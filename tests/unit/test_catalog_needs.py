"""What a config needs, from its text, its servers' requirements and its servers' sources."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import yaml
from locks.servercode import CodeReader, read_module

from gymgate.core.config import EnvironmentConfig, StackConfig
from gymgate.core.errors import NeedMissingError
from gymgate.gym.catalog import Catalog, EnvConfig, Environment
from gymgate.gym.catalog.needs import policy_servers, refuse_unanswered
from gymgate.gym.catalog.requirements import Distributions, read_requirements
from gymgate.gym.catalog.scan import Scanner
from gymgate.gym.inside.resolve import ServerInstance
from gymgate.gym.open_needs import require_needs
from gymgate.gym.runtime import open_catalog


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def model(name: str) -> dict[str, str]:
    return {"type": "responses_api_models", "name": name}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GYMGATE_CACHE", str(tmp_path / "cache"))
    site = tmp_path / "site-packages"
    metadata = 'Requires-Dist: opensandbox>=0.1; extra == "sandbox"\nRequires-Dist: pytest; extra == "dev"\n'
    write(site / "nemo_gym-0.7.0.dist-info" / "METADATA", metadata)
    (site / "numpy-2.5.5.dist-info").mkdir()
    (site / "typing_extensions-4.16.0.dist-info").mkdir()
    write(site / "responses_api_agents/simple_agent/app.py", "")
    return site


def scanned(
    site: Path, settings: dict[str, Any], code: str = "", requirements: str = "", **more: Any
) -> EnvConfig:
    """The config of one resources server `e` with those settings, code and requirements."""
    path = site / "resources_servers" / "e"
    write(path / "app.py", code)
    write(path / "requirements.txt", requirements)
    agent = {"entrypoint": "app.py", "resources_server": {"name": "e"}, "model_server": model("policy_model")}
    config = {
        "e": {"resources_servers": {"e": {"entrypoint": "app.py", **settings}}},
        "a": {"responses_api_agents": {"simple_agent": agent}},
        **more,
    }
    write(path / "configs" / "e.yaml", yaml.safe_dump(config))
    found = Scanner([site], site, CodeReader([site])).directory(path, "resources_servers")
    assert found is not None
    return found.config()


@pytest.mark.parametrize(
    ("settings", "kinds", "detail"),
    [
        pytest.param({}, (), "", id="nothing"),
        pytest.param({"judge_model_server": model("policy_model")}, (), "", id="the-policy-judges"),
        pytest.param({"judge_model_server": model("j")}, ("judge",), "j (judge_model_server", id="judge"),
        pytest.param({"judge_model_server": model("???")}, ("judge",), "judge_model_server", id="open-judge"),
        pytest.param(
            {"judges": [{"server": model("j")}]}, ("judge",), "judges[0].server", id="judge-in-a-list"
        ),
        pytest.param({"tavily_api_key": "???"}, ("key",), "tavily_api_key of resources server e", id="key"),
        pytest.param({"x": "${tavily_api_key}"}, ("key",), "'tavily_api_key'", id="interpolated-key"),
        pytest.param({"x": "${oc.env:MY_TOKEN}"}, ("key",), "MY_TOKEN", id="environment"),
        pytest.param({"x": "${oc.env:HOST,localhost}"}, (), "", id="default"),
        pytest.param({"api_key": "${oc.env:K,null}"}, ("key",), "api_key ", id="key-without-default"),
        pytest.param({"api_key": "${oc.select:k,${oc.env:K,''}}"}, ("key",), "api_key ", id="nested"),
        pytest.param({"root": "${oc.env:R,/nonexistent/set-R}"}, ("config",), "root ", id="no-path"),
        pytest.param({"url": "${policy_base_url}"}, (), "", id="the-policys-values-are-given"),
        pytest.param(
            {"x": "${a.responses_api_agents.simple_agent.entrypoint}"}, (), "", id="defined-elsewhere"
        ),
        pytest.param(
            {"x": "${j.responses_api_models.openai_model.key}"},
            ("config",),
            "'j.responses_api_models.openai_model.key'",
            id="defined-elsewhere-as-missing",
        ),
        pytest.param({"path": "???"}, ("config",), "path ", id="config"),
        pytest.param({"sandbox_provider": {"docker": {}}}, ("docker",), "sandbox_provider", id="sandbox"),
        pytest.param({"sandbox_provider": None}, (), "", id="no-sandbox"),
    ],
)
def test_needs_from_the_config(
    site: Path, settings: dict[str, Any], kinds: tuple[str, ...], detail: str
) -> None:
    judge = {"responses_api_models": {"openai_model": {"entrypoint": "app.py", "key": "???"}}}
    found = scanned(site, settings, j=judge)
    assert found.need_kinds == kinds
    assert any(detail in need.detail for need in found.needs) or not detail
    assert all("\n" not in need.detail for need in found.needs)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("openai_model", set()),
        ("local_vllm_model", {"vLLM"}),
        (None, {"not defined"}),
    ],
)
def test_a_judges_need_says_what_answers_unless_an_endpoint_is_given(
    site: Path, kind: str | None, said: set[str]
) -> None:
    judge = {"j": {"responses_api_models": {kind: {"entrypoint": "app.py"}}}} if kind else {}
    [need] = scanned(site, {"judge_model_server": model("j")}, **judge).needs
    assert need.kind == "judge"
    assert {words for words in ("vLLM", "not defined") if words in need.detail} == said


def test_a_model_servers_own_values_are_no_needs_but_missing(site: Path) -> None:
    judge = {"responses_api_models": {"openai_model": {"entrypoint": "app.py", "api_key": "???"}}}
    found = scanned(site, {"judge_model_server": model("j")}, j=judge)
    assert found.need_kinds == ("judge",)
    assert found.model_servers == ("j",)
    assert found.missing == ("j.responses_api_models.openai_model.api_key",)


def test_what_data_sets_lack_is_no_need(site: Path) -> None:
    """Their addresses are for preparing data; no server reads them."""
    settings = {"datasets": [{"jsonl_fpath": "???", "api_key": "${oc.env:K,null}"}]}
    assert scanned(site, settings).needs == ()
    assert scanned(site, {"more": settings["datasets"]}).need_kinds == ("config", "key")


def test_judges_are_the_model_servers_that_servers_name(site: Path) -> None:
    """Not the policy's, not one that is only defined, and not one whose name is still open."""
    settings = {
        "judge_model_server": model("j"),
        "user": {"model": model("u")},
        "own": model("policy_model"),
        "open": model("???"),
        "computed": model("${some_name}"),
    }
    other = {"responses_api_models": {"openai_model": {"entrypoint": "app.py"}}}
    found = scanned(site, settings, nobody=other)
    assert found.judges == {
        "j": "judge_model_server of resources server e",
        "u": "user.model of resources server e",
    }
    assert scanned(site, {}).judges == {}
    further = {"resources_servers": {"e": {"entrypoint": "app.py", "judge": model("j")}}}
    twice = scanned(site, {"judge_model_server": model("j"), "user": {"model": model("j")}}, f=further)
    assert twice.judges == {"j": "judge_model_server of resources server e"}, "the first setting is named"


@pytest.mark.parametrize(
    ("block", "servers"),
    [
        ({}, {"policy_model"}),
        ({"model_server": model("own"), "judge": model("j")}, {"own"}),
        (
            {"model_server": model("own"), "policy_model_server": model("policy_model")},
            {"own", "policy_model"},
        ),
    ],
)
def test_an_agents_policy_is_what_its_own_settings_name(block: dict[str, Any], servers: set[str]) -> None:
    agent = ServerInstance("a", "responses_api_agents", "simple_agent", block)
    assert policy_servers(agent) == servers


def test_what_a_config_interpolates_and_does_not_define_is_missing(site: Path) -> None:
    found = scanned(site, {"there": "${known}", "gone": "${unknown}"}, known=1)
    assert found.missing == ("e.resources_servers.e.gone",)


def needing(kind: str) -> Environment:
    """A packaged environment whose default config leaves a judge or a sandbox to the user."""
    lacks = {
        "judge": lambda config: config.judges,
        "sandbox": lambda config: any(each.provider is None for each in config.sandboxes),
    }
    return next(each for each in open_catalog().environments() if lacks[kind](each.config()))


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("judge", {"overrides": {"x.y": 1}}),
        ("judge", {"agent": "other"}),
        ("sandbox", {"sandbox": "docker"}),
    ],
)
def test_a_need_that_the_user_may_have_answered_is_left_to_the_start(
    kind: str, answer: dict[str, Any]
) -> None:
    environment = needing(kind)
    config = StackConfig(environments=(environment.known_as,))
    with pytest.raises(NeedMissingError, match=kind):
        require_needs(config, [environment])
    answered = EnvironmentConfig(name=environment.known_as, **answer)
    require_needs(config.model_copy(update={"environments": (answered,)}), [environment])


JUDGES = {"j": "judge of resources server e", "u": "user of agent a"}


@pytest.mark.parametrize(
    ("named", "missing"),
    [((), ["j", "u"]), (("u", "other"), ["j"]), (("j",), ["u"]), (("j", "u"), []), (("*",), [])],
)
def test_a_judge_without_an_endpoint_is_refused(named: tuple[str, ...], missing: list[str]) -> None:
    if not missing:
        refuse_unanswered("env", JUDGES, named)
        refuse_unanswered("env", {}, ())
        return
    with pytest.raises(NeedMissingError) as caught:
        refuse_unanswered("env", JUDGES, named)
    error = str(caught.value)
    assert (caught.value.environment, caught.value.need) == ("env", f"judge {', '.join(missing)}")
    assert [name for name in JUDGES if f"{name!r} ({JUDGES[name]})" in error] == missing
    assert " ".join(f"--judge {name}=URL" for name in missing) in error
    assert "'none'" in error
    assert f"models={{'{missing[0]}': ...}}" in error
    assert "\n" not in error


@pytest.mark.parametrize(
    ("named", "meant"), [({"genrm"}, ["genrm"]), ({"GenRM_model"}, ["GenRM_model"]), ({"judge", "u"}, [])]
)
def test_a_judge_with_nearly_the_name_is_told(named: set[str], meant: list[str]) -> None:
    with pytest.raises(NeedMissingError) as caught:
        refuse_unanswered("env", {"genrm_model": "a setting", "u": "user of agent a"}, named)
    told = str(caught.value).partition("models={")[2]
    assert [name for name in sorted(named) if repr(name) in told] == meant


def test_the_policy_is_not_offered_for_calls_without_a_key() -> None:
    with pytest.raises(NeedMissingError) as caught:
        refuse_unanswered("env", JUDGES, (), keyless=True, hint="; see the docs")
    assert "'policy'" not in str(caught.value)
    assert "--judge j=URL --judge u=URL" in str(caught.value)
    assert str(caught.value).endswith("; see the docs")


def test_a_config_without_agents_says_so(site: Path) -> None:
    scanned(site, {})
    servers = {"e": {"resources_servers": {"e": {"entrypoint": "app.py"}}}}
    write(site / "resources_servers/e/configs/e.yaml", yaml.safe_dump(servers))
    (need,) = Catalog(site, "0.7.0").find("e").config().needs
    assert need.kind == "config"
    assert "agent" in need.detail


CONFIG_CLASS = """
class Config(Base):
    google_api_key: str
    limit: int = 3
    path: str = Field(description="where")
    other: str = Field(..., description="x")
    fine: str = Field("a")
class Unused(Base):
    nothing: str
class Server(BaseServer):
    config: Config
"""


def test_fields_that_a_server_requires_and_the_config_leaves_out(site: Path) -> None:
    found = scanned(site, {"other": "set"}, CONFIG_CLASS)
    assert [(need.kind, need.detail.split()[0]) for need in found.needs] == [
        ("key", "google_api_key"),
        ("config", "path"),
    ]


@pytest.mark.parametrize(
    ("code", "kinds"),
    [
        ("import numpy\nsubprocess.run(['ls', '-l'])", set()),
        ("import docker", {"docker"}),
        ("from nemo_gym import sandbox", {"docker"}),
        ("from nemo_gym.sandbox.api import Sandbox", {"docker"}),
        ("def f():\n    from datasets import load_dataset\n    load_dataset('nvidia/x')", {"download"}),
        ("load_dataset('json', data_files=x)", set()),
        ("self.load_dataset('x')", set()),
        ("urllib.request.urlopen(url)", {"download"}),
        ("run(['git', 'clone', '--depth=1', url])", {"git"}),
        ("run(f'git clone https://github.com/{x}')", {"git"}),
        ("'''Does not git clone anything; see docker docs.'''", set()),
        ("NAMES = ['docker', 'apptainer']", set()),
        ("run(['docker', 'run', image])", {"docker"}),
        ("command = 'apptainer exec image'", {"docker"}),
        ("import torch.nn", {"gpu"}),
        ("shutil.which('lean')", {"binary"}),
        ("shutil.which('git')", set()),
        ("from tavily import AsyncTavilyClient", {"search"}),
        ("run(['uv', 'venv', '--python', '3.10'])", {"download"}),
        ("get(f'https://github.com/a/b/releases/download/1/b-{arch}.tar.gz')", {"download"}),
        ("DOCS = 'https://github.com/a/b/releases'", set()),
    ],
)
def test_signals_in_code(code: str, kinds: set[str]) -> None:
    assert {kind for kind, _ in read_module(ast.parse(code)).signals} == kinds


def test_only_modules_that_the_entrypoint_reaches_count(site: Path) -> None:
    path = site / "resources_servers" / "e"
    write(path / "prepare.py", "import docker")
    write(path / "helper/__init__.py", "from .deep import x")
    write(path / "helper/deep.py", "from resources_servers.other.tool import y\nload_dataset('a/b')")
    write(site / "resources_servers/other/tool.py", "import torch")
    found = scanned(site, {}, "from helper import thing\nimport nope\n(")
    assert found.needs == ()
    found = scanned(site, {}, "from helper import thing\nimport nope\n")
    assert [(need.kind, need.detail.partition("(")[2]) for need in found.needs] == [
        ("download", "e/helper/deep.py)"),
        ("gpu", "other/tool.py)"),
    ]


REQUIREMENTS = """\
-e nemo-gym[dev,sandbox] @ ../../
--extra-index-url https://example.invalid
# a comment
tiktoken   # why
numpy>=2,<3
typing-extensions
tau2[knowledge] @ git+https://github.com/x/tau2@main#egg=y
tomli>=2 ; python_version < "3.11"
verifiers[x] @ git+https://github.com/PrimeIntellect-ai/verifiers.git@v0.3.1
other @ git+https://github.com/x/other.git@v0.3.1
-e ./pocketshell[pcre]
-e ./shell[pcre]
../sibling
-r more.txt
"""


def test_requirements(site: Path) -> None:
    write(site / "resources_servers/e/more.txt", "scipy==1.0\n")
    shell = write(site / "resources_servers/e/shell/pyproject.toml", "[project]\nname = 'shell'\n").parent
    found = scanned(site, {}, requirements=REQUIREMENTS)
    assert found.requirements == (
        "opensandbox>=0.1",
        "other @ git+https://github.com/x/other.git@v0.3.1",
        "scipy==1.0",
        f"shell[pcre] @ {shell.resolve().as_uri()}",
        "tau2[knowledge] @ git+https://github.com/x/tau2@main#egg=y",
        "tiktoken",
        'tomli>=2 ; python_version < "3.11"',
        "verifiers[x]==0.3.1",
    )
    assert found.need_kinds == ("download", "package")
    assert any(need.detail.startswith("-e ./pocketshell") for need in found.needs)


def test_requirements_of_a_pyproject(site: Path, tmp_path: Path) -> None:
    project = """
[project]
name = "x"
dependencies = ["nemo-gym[dev]", "infilling", "aiohttp>=3"]
[tool.uv.sources]
nemo-gym = { path = "../..", editable = true }
infilling = { git = "https://github.com/x/infilling.git", rev = "abc" }
"""
    write(tmp_path / "server/pyproject.toml", project)
    assert read_requirements(tmp_path / "server", Distributions(site)) == [
        "infilling @ git+https://github.com/x/infilling.git@abc",
        "aiohttp>=3",
    ]
    write(tmp_path / "broken/pyproject.toml", "[")
    assert read_requirements(tmp_path / "broken", Distributions(site)) == []
    assert read_requirements(tmp_path / "none", Distributions(site)) == []


@pytest.mark.parametrize(
    ("requirement", "certain"),
    [
        ("numpy", True),
        ("NumPy>=2.1,<3", True),
        ("numpy~=2.5.1", True),
        ("numpy~=2.4.0", False),
        ("numpy==2.5.5", True),
        ("numpy!=2.5.5", False),
        ("numpy<2.5", False),
        ("numpy==2.*", True),
        ("numpy>=2.5.5rc1", True),
        ("numpy>=2.6rc1", False),
        ("numpy[extra]", False),
        ("numpy @ https://example.invalid/numpy.whl", False),
        ("typing_extensions", True),
        ("scipy", False),
        ("?", False),
    ],
)
def test_what_the_installation_already_satisfies(site: Path, requirement: str, certain: bool) -> None:
    assert Distributions(site).satisfies(requirement) is certain
