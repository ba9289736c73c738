"""For every test."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from support import accounting, smoke
from support.warm import DIRECTORY, WarmForkServers

# A shell that starts the suite in the background ignores SIGINT for it, and what is ignored stays ignored in every program
# that the tests start; theirs is to be interrupted.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says more about the machine than about the code; every test has a time limit of its own.
if find_spec("hypothesis"):  # not in the environments of Inspect and Agent Lightning
    from hypothesis import HealthCheck, settings

    settings.register_profile("ci", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("quick", settings.get_profile("ci"), max_examples=20)
    settings.load_profile("ci")


def pytest_configure(config: pytest.Config) -> None:
    accounting.register(config)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.removeprefix("tests/") in smoke.TESTS:
            item.add_marker(pytest.mark.smoke)


@pytest.fixture(scope="session")
def warm_processes() -> Iterator[WarmForkServers]:
    warm = WarmForkServers()
    yield warm
    warm.close()


@pytest.fixture(autouse=True, scope="module")
def warm_fork_servers(request: pytest.FixtureRequest) -> Iterator[None]:
    """In a module that is marked warm, stacks take their fork servers from a warm one, those of its fixtures, too."""
    if request.node.get_closest_marker("warm") is None:
        yield
        return
    warm: WarmForkServers = request.getfixturevalue("warm_processes")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in warm.variables.items():
            patch.setenv(name, value)
        warm.start_wanted()
        yield


@pytest.fixture(autouse=True)
def warm_fork_server(request: pytest.FixtureRequest, warm_fork_servers: None) -> None:
    """Start what has been asked for; `warm(False)` on a test leaves its stacks their own fork servers."""
    if (marker := request.node.get_closest_marker("warm")) is None:
        return
    if marker.args == (False,):
        request.getfixturevalue("monkeypatch").delenv(DIRECTORY, raising=False)
    else:
        request.getfixturevalue("warm_processes").start_wanted()
