"""Which configs are one stack, and that nothing secret can be read out of its name."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest

import gymgate
from gymgate.core.config import EnvironmentConfig, HTTPEndpoint, ReplayEndpoint, StackConfig
from gymgate.core.errors import ConfigError
from gymgate.stack.client import identity
from gymgate.stack.client.identity import identity_of
from gymgate.stack.daemon.lease_holder import LeaseHolder
from gymgate.stack.daemon.process import Daemon
from gymgate.stack.paths import salt
from gymgate.stack.protocol import PROTOCOL
from gymgate.stack.wire import endpoint_to_wire, stack_to_wire

SALT = b"a secret of this user's"


def judged(**fields: Any) -> StackConfig:
    judge = HTTPEndpoint(base_url="http://h/v1", **fields)
    return StackConfig(environments=("mcqa",), models={"judge": judge})


def name_of(config: StackConfig | None = None, **fields: Any) -> str:
    return identity_of(config or StackConfig(**{"environments": ("mcqa",), **fields}), SALT)


def test_one_config_is_one_stack() -> None:
    assert name_of() == name_of()
    assert name_of(judged(api_key="a")) == name_of(judged(api_key="a"))
    assert name_of() == name_of(linger_s=1)
    assert name_of() != name_of(max_restarts=1)
    assert identity_of(judged(), b"another user's") != name_of(judged())


def test_servers_as_they_are_and_lean_ones_are_two_stacks() -> None:
    assert name_of(stock_servers=True) != name_of()


def test_a_judges_credentials_are_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the key is read from does not matter, what it is does."""
    monkeypatch.setenv("KEY", "a")
    by_name = name_of(judged(api_key_env="KEY"))
    monkeypatch.setenv("KEY", "b")
    assert name_of(judged(api_key_env="KEY")) != by_name
    assert name_of(judged(api_key="a")) == by_name
    assert name_of(judged(headers=(("X-Key", "a"),))) != name_of(judged(headers=(("X-Key", "b"),)))
    monkeypatch.delenv("KEY")
    with pytest.raises(ConfigError, match="KEY"):
        name_of(judged(api_key_env="KEY"))


def test_a_sandboxs_file_is_part_of_it(tmp_path: Path) -> None:
    file = tmp_path / "sandbox.yaml"
    file.write_text("docker: {image: one}\n")
    environment = EnvironmentConfig(name="mcqa", sandbox=str(file))
    before = name_of(environments=(environment,))
    assert name_of(environments=(environment,)) == before
    file.write_text("docker: {image: another}\n")
    assert name_of(environments=(environment,)) != before


def test_values_of_variables_are_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODE", "a")
    named = name_of(env_vars=("MODE",))
    alone = name_of()
    monkeypatch.setenv("MODE", "b")
    assert name_of(env_vars=("MODE",)) != named
    assert name_of() == alone
    monkeypatch.setenv("HTTPS_PROXY", "http://another:3128")
    assert name_of() != alone, "the servers reach the network in another way"


@pytest.fixture
def projects(tmp_path: Path) -> tuple[Path, Path]:
    """Two projects that look alike."""
    for name in ("a", "b"):
        server = tmp_path / name / "resources_servers" / "mine"
        (server / "configs").mkdir(parents=True)
        (server / "app.py").write_text("reward = 1\n")
        (server / "configs" / "mine.yaml").write_text("mine:\n")
    return tmp_path / "a", tmp_path / "b"


@pytest.mark.parametrize(
    "name", ["resources_servers/mine/configs/mine.yaml", "resources_servers/mine", "mine"]
)
def test_a_relative_path_means_another_environment_elsewhere(
    projects: tuple[Path, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []
    for project in projects:
        monkeypatch.chdir(project)
        names.append(name_of(environments=(name,)))
        assert name_of(environments=(name,)) == names[-1]
    assert names[0] != names[1]
    roots = {name_of(environments=(name,), component_roots=(str(project),)) for project in projects}
    assert len(roots) == 2


@pytest.mark.parametrize("by_root", [False, True])
def test_changed_code_means_another_stack(
    projects: tuple[Path, Path], by_root: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data, caches and environments made beside a server do not."""
    monkeypatch.chdir(tmp_path)
    server = projects[0] / "resources_servers" / "mine"
    fields = (
        {"environments": ("mine",), "component_roots": (str(projects[0]),)}
        if by_root
        else {"environments": (str(server / "configs" / "mine.yaml"),)}
    )
    before = name_of(**fields)
    for aside in ("__pycache__/x.py", ".venv/lib/x.py", "rollouts.jsonl"):
        (server / aside).parent.mkdir(parents=True, exist_ok=True)
        (server / aside).write_text("x")
    assert name_of(**fields) == before
    (server / "app.py").write_text("reward = 0.0\n")
    assert (changed := name_of(**fields)) != before
    time_ns = (server / "app.py").stat().st_mtime_ns
    os.utime(server / "app.py", ns=(time_ns, time_ns + 1_000))
    assert name_of(**fields) != changed, "saved twice within a second"


def test_a_tree_that_is_too_large_to_be_read_is_named(
    projects: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(identity, "_MAX_DIRECTORIES", 2)
    server = projects[0] / "resources_servers" / "mine"
    fields = {"environments": (str(server),)}
    name_of(**fields)
    assert not [record for record in caplog.records if str(server) in record.getMessage().split()]
    (server / "more" / "below").mkdir(parents=True)
    name_of(**fields)
    assert [record for record in caplog.records if str(server) in record.getMessage().split()]


def test_overrides_may_hold_relative_paths(
    projects: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"name": "mcqa", "overrides": (("x.prompt", "prompts/p.yaml"),)}
    monkeypatch.chdir(projects[0])
    names = {name_of(environments=(environment,))}
    monkeypatch.chdir(projects[0].parent)
    assert name_of(environments=(environment,)) not in names


def test_another_checkout_of_gymgate_has_stacks_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so has this one, once its code is another."""
    found = [name_of()]
    package = tmp_path / "gymgate"
    shutil.copytree(Path(gymgate.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(gymgate, "__file__", str(package / "__init__.py"))
    for text in ("", "# scores otherwise\n"):
        with (package / "rollouts" / "result.py").open("a") as file:
            file.write(text)
        identity._package.cache_clear()
        found.append(name_of())
    identity._package.cache_clear()
    assert len(set(found)) == 3


@pytest.mark.parametrize(
    "fields",
    [
        {"runtime": {"interpreter": "venv/bin/python"}},
        {"runtime": {"python": "own/python"}},
        {"state_dir": "state"},
        {"component_roots": ("empty",)},
    ],
)
def test_each_relative_path_means_another_place_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    """Although nothing is there yet."""
    found = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        found.append((name_of(**fields), name_of()))
    assert found[0][0] != found[1][0]
    assert found[0][1] == found[1][1]


def test_a_removed_working_directory_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert name_of() == name_of()


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with TemporaryDirectory(prefix="gi-", dir="/tmp") as path:  # short enough for sockets
        monkeypatch.setenv("XDG_RUNTIME_DIR", path)
        yield Path(path) / "gymgate"


def test_the_salt_is_made_once_and_private(base: Path) -> None:
    first = salt()
    assert len(first) == 32
    assert salt() == first
    assert [oct(path.stat().st_mode & 0o777) for path in base.glob("salt")] == ["0o600"]
    (base / "salt").unlink()
    assert salt() != first


def test_a_replayed_judges_files_are_found_from_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sent = endpoint_to_wire(ReplayEndpoint(rollouts=("r.jsonl",)))
    assert isinstance(sent, dict)
    assert sent["rollouts"] == [str(tmp_path / "r.jsonl")]


async def test_a_connection_uses_the_judges_that_it_brought(tmp_path: Path) -> None:
    """Whoever else said hello to the same daemon."""

    class Up(Daemon):
        async def started(self, config: StackConfig) -> Any:
            return self

        def describe(self) -> dict[str, Any]:
            return {}

        @property
        def running(self) -> Any:
            gateway = SimpleNamespace(open=lambda policy, **given: given, prepare=lambda endpoint: endpoint)
            return SimpleNamespace(gateway=gateway)

    with socket.socket() as listener:
        daemon = Up(listener, tmp_path / "s.sock", tmp_path, os.getpid())
        holders = [LeaseHolder(daemon), LeaseHolder(daemon)]
        for key, holder in zip("ab", holders, strict=True):
            await holder.hello({"protocol": PROTOCOL, "config": stack_to_wire(judged(api_key=key))}, b"")
        await asyncio.sleep(0)
        used: list[Any] = [holder._prepared_judges()["judge"] for holder in holders]
        assert [judge.api_key.get_secret_value() for judge in used] == ["a", "b"]
