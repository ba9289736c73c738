"""The endpoint of a judge that is verifiers' own model: addressed and authorised as verifiers' client does it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from verifiers.v1.clients import EvalClient, EvalClientConfig, ModelContext
from verifiers.v1.clients.base import join_url
from verifiers.v1.dialects import DIALECTS

from gymgate.core.config import RolloutLimits
from gymgate.integrations.verifiers.harness import _judge_policy

CHAT = next(dialect for dialect in DIALECTS if dialect.upstream_path.endswith("/chat/completions"))


@pytest.fixture(autouse=True)
def prime(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who is logged in with Prime's command line and has exported nothing."""
    for name in ("PRIME_API_KEY", "PRIME_TEAM_ID", "PRIME_INFERENCE_URL"):
        monkeypatch.delenv(name, raising=False)
    config = {"api_key": "prime-key", "team_id": "team-1"}
    monkeypatch.setattr("verifiers.v1.configs.client.load_prime_config", lambda: config)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"base_url": "http://127.0.0.1:8000", "api_key_var": "NOT_SET"},
        {"base_url": "http://127.0.0.1:8000/v1", "api_key_var": "MY_KEY"},
        {
            "base_url": "http://127.0.0.1:8000/v1/",
            "headers": {"x-one": "1", "X-Two": "static"},
            "headers_from_env": {"x-two": "TWO", "x-three": "NOT_SET"},
        },
    ],
)
async def test_a_judge_is_reached_as_verifiers_reaches_its_model(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    monkeypatch.setenv("MY_KEY", "mine")
    monkeypatch.setenv("TWO", "from env")
    config = EvalClientConfig(**fields)
    theirs = EvalClient(config)
    run: Any = SimpleNamespace(dialect="chat", limits=RolloutLimits())
    ours = _judge_policy(run, ModelContext(model="m", client=config))
    await theirs.client.aclose()
    assert f"{ours.base_url.rstrip('/')}/chat/completions" == join_url(theirs.base_url, CHAT.upstream_path)
    assert ours.api_key is not None
    assert ours.api_key.get_secret_value() == theirs.api_key
    assert {name: value.get_secret_value() for name, value in ours.headers} == theirs.headers
