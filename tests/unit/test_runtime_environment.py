"""What of the caller's environment variables reaches NeMo Gym's processes and uv."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from gymgate.gym.runtime import clean_env, daemon_env
from gymgate.gym.runtime.pip_settings import index_settings
from gymgate.gym.runtime.variables import installer_env, users_env

SECRETS = (
    "OPENAI_API_KEY",
    "ANTHROPIC_API_KEY",
    "HF_TOKEN",
    "WANDB_API_KEY",
    "PRIME_API_KEY",
    "AWS_SECRET_ACCESS_KEY",
)
MISLEADING = (
    "UV_PYTHON",
    "UV_PROJECT_ENVIRONMENT",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "PYTHONHOME",
    "PYTHONPATH",
)


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """An environment of nothing but a home and a path."""
    for name in list(os.environ):
        if name not in ("PATH", "PYTEST_CURRENT_TEST"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return monkeypatch


def test_no_secret_and_nothing_misleading_reaches_gym(clean: pytest.MonkeyPatch) -> None:
    for name in (*SECRETS, *MISLEADING, "PYTHONDONTWRITEBYTECODE", "NEMO_GYM_CONFIG_DICT"):
        clean.setenv(name, "x")
    assert set(clean_env()) == {"PATH", "HOME", "NO_PROXY", "no_proxy"}


def test_named_variables_and_the_usual_ones_do(clean: pytest.MonkeyPatch) -> None:
    for name in ("JUDGE_KEY", "LC_ALL", "TZ", "HF_HOME", "SSL_CERT_FILE", "HTTPS_PROXY", "TMPDIR"):
        clean.setenv(name, "x")
    clean.setenv("NEMO_SKILLS_SANDBOX_HOST", "n7")
    assert clean_env()["NEMO_SKILLS_SANDBOX_HOST"] == "n7"
    kept = clean_env(["JUDGE_KEY", "NOT_SET"])
    assert {"JUDGE_KEY", "LC_ALL", "TZ", "HF_HOME", "SSL_CERT_FILE", "HTTPS_PROXY", "TMPDIR"} <= set(kept)
    assert "NOT_SET" not in kept


def test_loopback_goes_past_a_proxy(clean: pytest.MonkeyPatch) -> None:
    clean.setenv("NO_PROXY", "example.org, localhost")
    assert clean_env()["NO_PROXY"] == "example.org,localhost,127.0.0.1,::1"
    assert clean_env()["no_proxy"] == "127.0.0.1,localhost,::1"


def test_the_sdks_environment_is_not_on_gyms_path(clean: pytest.MonkeyPatch) -> None:
    own = f"{sys.prefix}/bin"
    clean.setenv("VIRTUAL_ENV", "/some/venv")
    clean.setenv("PATH", os.pathsep.join(["/some/venv/bin", own, "/usr/bin"]))
    expected = "/usr/bin" if sys.prefix != sys.base_prefix else f"{own}:/usr/bin"
    assert clean_env()["PATH"] == expected


def test_uv_keeps_network_settings_and_loses_what_changes_the_outcome(clean: pytest.MonkeyPatch) -> None:
    kept = {
        "UV_DEFAULT_INDEX": "https://a",
        "UV_CACHE_DIR": "/c",
        "HTTPS_PROXY": "p",
        "UV_INDEX_X_PASSWORD": "s",
    }
    lost = (
        *MISLEADING,
        "UV_CONSTRAINT",
        "UV_RESOLUTION",
        "UV_SYSTEM_PYTHON",
        "UV_COMPILE_BYTECODE",
        "CONDA_EXE",
    )
    for name, value in {**kept, **dict.fromkeys(lost, "x")}.items():
        clean.setenv(name, value)
    environment = installer_env()
    assert kept.items() <= environment.items()
    assert environment.keys().isdisjoint(lost)


def test_nemo_gyms_own_command_line_sees_the_users_variables(clean: pytest.MonkeyPatch) -> None:
    kept = {"HF_TOKEN": "t", "UV_PYTHON_INSTALL_DIR": "/uv", "PIP_INDEX_URL": "https://mirror/simple"}
    for name, value in {**kept, **dict.fromkeys(MISLEADING, "x")}.items():
        clean.setenv(name, value)
    clean.setenv("PATH", "/usr/bin")
    environment = users_env(Path("/gym/bin"), Path("/uv/bin"))
    assert kept.items() <= environment.items()
    assert environment.keys().isdisjoint(MISLEADING)
    assert environment["PATH"] == "/gym/bin:/usr/bin:/uv/bin"
    assert environment["UV_DEFAULT_INDEX"] == "https://mirror/simple"


def test_offline_is_handed_on(clean: pytest.MonkeyPatch) -> None:
    assert "UV_OFFLINE" not in installer_env()
    clean.setenv("GYMGATE_OFFLINE", "1")
    assert installer_env()["UV_OFFLINE"] == "1"


def test_pips_file_and_variables_become_uvs(tmp_path: Path) -> None:
    file = tmp_path / ".config" / "pip" / "pip.conf"
    file.parent.mkdir(parents=True)
    file.write_text(
        "[global]\nindex-url = https://mirror/simple\nextra-index-url =\n  https://b\n  https://c\n"
    )
    environment = {"HOME": str(tmp_path), "XDG_CONFIG_DIRS": str(tmp_path), "PIP_FIND_LINKS": "/w1 /w2"}
    found = index_settings(environment)
    assert found["UV_DEFAULT_INDEX"] == "https://mirror/simple"
    assert found["UV_INDEX"] == "https://b https://c"
    assert found["UV_INDEX_STRATEGY"] == "unsafe-best-match"
    assert found["UV_FIND_LINKS"] == "/w1,/w2"
    assert index_settings({**environment, "PIP_INDEX_URL": "https://d"})["UV_DEFAULT_INDEX"] == "https://d"


@pytest.mark.parametrize("own", ["variable", "file"])
def test_uvs_own_index_settings_win(tmp_path: Path, own: str) -> None:
    environment = {"HOME": str(tmp_path), "PIP_INDEX_URL": "https://mirror/simple"}
    if own == "variable":
        environment["UV_INDEX"] = "https://own"
    else:
        (tmp_path / ".config" / "uv").mkdir(parents=True)
        (tmp_path / ".config" / "uv" / "uv.toml").write_text('[[index]]\nurl = "https://own"\n')
    assert index_settings(environment) == {}


def test_an_unreadable_pip_file_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "pip.conf").write_text("index-url without a section")
    environment = {
        "HOME": str(tmp_path),
        "PIP_CONFIG_FILE": str(tmp_path / "pip.conf"),
        "PIP_INDEX_URL": "https://d",
    }
    assert index_settings(environment)["UV_DEFAULT_INDEX"] == "https://d"


def test_a_key_under_a_name_of_our_own_reaches_no_child(clean: pytest.MonkeyPatch) -> None:
    """Where a prefix lets settings pass, a name that tells of a secret does not."""
    secrets = (
        "GYMGATE_JUDGE_KEY",
        "GYMGATE_STACK_TOKEN",
        "UV_PUBLISH_TOKEN",
        "PYTHON_API_KEY",
        "LC_KEY",
        "XDG_KEY",
    )
    settings = (
        "GYMGATE_CACHE",
        "GYMGATE_OFFLINE",
        "UV_INDEX_MINE_PASSWORD",
        "UV_CACHE_DIR",
        "PYTHONUTF8",
        "LC_ALL",
    )
    for name in (*secrets, *settings):
        clean.setenv(name, "x")
    assert not {*secrets} & {*daemon_env(), *clean_env(), *installer_env()}
    assert {*settings} <= {*daemon_env()}
    assert "GYMGATE_JUDGE_KEY" in daemon_env(["GYMGATE_JUDGE_KEY"])
