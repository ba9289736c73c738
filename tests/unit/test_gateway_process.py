"""What the gateway takes from its process: proxies named in the environment, the limit on open files."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest
from yarl import URL

from gymgate.core import http_client, retrying
from gymgate.core.errors import PolicyError
from gymgate.gateway.serving_process import raise_file_limit

PROXIED = {
    "http://127.0.0.1:8000/v1": None,
    "http://localhost/v1": None,
    "http://inside.example/v1": None,
    "http://models.example/v1": URL("http://proxy.example:3128"),
    "http://127.models.example/v1": URL("http://proxy.example:3128"),
    "https://models.example/v1": None,
}


@pytest.mark.parametrize("url", PROXIED)
def test_proxies(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "REQUEST_METHOD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    monkeypatch.setenv("no_proxy", "inside.example")
    assert http_client.proxy_for(URL(url)) == PROXIED[url]


@pytest.mark.parametrize(
    ("given", "proxy"),
    [
        ("proxy.example:3128", "http://proxy.example:3128"),
        ("me:secret@proxy.example:3128", "http://me:secret@proxy.example:3128"),
        ("http://me:se#cret@proxy.example:3128", None),
        ("http://", None),
    ],
)
def test_a_proxy_needs_no_scheme_and_a_broken_one_is_refused_unseen(
    given: str, proxy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("https_proxy", given)
    url = URL("https://models.example/v1")
    if proxy is not None:
        assert http_client.proxy_for(url) == URL(proxy)
        return
    with pytest.raises(ValueError, match="https proxy") as refused:
        http_client.proxy_for(url)
    assert "cret" not in str(refused.value)


def test_the_file_limit_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
    raise_file_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)


@pytest.mark.parametrize(("limit", "files", "fitting"), [(1024, 5, 192), (256, 5, 38), (256, 3, 64)])
def test_as_many_rollouts_as_the_limit_on_open_files_allows(limit: int, files: int, fitting: int) -> None:
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, {limit}))\n"
        "from gymgate.gateway.serving_process import max_rollouts\n"
        f"print(max_rollouts({files}), resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == [str(fitting), str(limit)]


async def test_the_first_retries_may_be_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each at another replica; the pauses come after them."""
    paused: list[float] = []

    async def pause(delay_s: float) -> None:
        paused.append(delay_s)

    async def attempt(retries: int) -> int:
        if retries < 3:
            raise retrying.Retryable(PolicyError("gone", retryable=True))
        return retries

    monkeypatch.setattr(retrying.asyncio, "sleep", pause)
    assert await retrying.with_retries(attempt, 1, at_once=2) == 3
    assert len(paused) == 1
    assert 0.25 <= paused[0] <= 0.5


def test_backoff_is_bounded() -> None:
    failure = retrying.Retryable(PolicyError("busy"))
    delays = [failure.delay_s(retries) for retries in range(1, 20)]
    assert 0.25 <= delays[0] <= 0.5
    assert max(delays) <= retrying.LONGEST_BACKOFF_S
    assert (
        retrying.Retryable(PolicyError("busy", retry_after_s=1e9)).delay_s(1)
        == retrying.LONGEST_RETRY_AFTER_S
    )
