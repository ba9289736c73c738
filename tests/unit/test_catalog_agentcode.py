"""What an agent's source shows of how it hands its rollout on."""

from __future__ import annotations

from pathlib import Path

import pytest

from gymgate.catalog.agentcode import AgentCode, read_agent

LENIENT = 'class Body(BaseRunRequest):\n    model_config = ConfigDict(extra="allow")\n'
STRICT = "class Body(BaseRunRequest):\n    pass\n"


def read(root: Path, source: str, **others: str) -> AgentCode:
    """The code of an agent `mine`; `others` are agents beside it."""
    for name, code in {"mine": source, **others}.items():
        home = root / "responses_api_agents" / name
        home.mkdir(parents=True)
        (home / "app.py").write_text(code)
    return read_agent([root], root / "responses_api_agents" / "mine", "app.py")


def agent(run: str, base: str = "SimpleResponsesAPIAgent", body: str = "Body") -> str:
    return f"class Agent({base}):\n    async def run(self, request: Request, body: {body}):\n        {run}\n"


TO_MODEL = (
    'await self.server_client.post(server_name=self.config.model_server.name, url_path="/v1/responses")'
)
TO_ITSELF = 'await self.server_client.post(server_name=self.config.name, url_path="/v1/responses")'
WITH_KEY = 'await self.server_client.post(server_name=self.config.name, url_path=self.url_path_for_run("/v1/responses", body))'


@pytest.mark.parametrize(
    ("run", "helpers", "client"),
    [
        (WITH_KEY, True, False),
        ("self.resolve_model_base_url(self.config.model_server.name, rollout_id)", True, False),
        ("self.resolve_model_base_url(self.config.model_server.name)", False, False),
        ("apply_rollout_prefix(url, rollout_id)", True, False),
        (TO_MODEL, False, True),
        ('await self.server_client.post("policy_model", "/v1/chat/completions")', False, True),
        ('await self.server_client.post(server_name="x", url_path="/verify")', False, False),
        (f"{TO_ITSELF}\n        {TO_MODEL}", False, False),
        ("await session.post(self.config.base_url)", False, False),
    ],
)
def test_how_the_model_is_asked(tmp_path: Path, run: str, helpers: bool, client: bool) -> None:
    """Through NeMo Gym's helpers, through its client, or by a request to itself that knows no rollout."""
    assert read(tmp_path, LENIENT + agent(run)) == AgentCode(helpers, client, entries=True, policy_url=False)


@pytest.mark.parametrize(
    ("source", "entries"),
    [
        (LENIENT + agent("pass"), True),
        (STRICT + agent("pass"), False),
        (agent("pass", body="BaseRunRequest"), False),
        (LENIENT + "class Mine(Body):\n    pass\n" + agent("pass", body="Mine"), True),
        (
            "class Place:\n    pass\nclass Tool:\n    async def run(self, place: Place): ...\n"
            + LENIENT
            + agent("pass"),
            True,
        ),
        ("class Agent:\n    pass\n", False),
        ("this is no Python", False),
    ],
)
def test_which_bodies_keep_what_they_do_not_declare(tmp_path: Path, source: str, entries: bool) -> None:
    assert read(tmp_path, source).entries is entries


def test_an_agent_that_extends_another_does_what_that_does(tmp_path: Path) -> None:
    mine = "from responses_api_agents.other.app import Agent\nclass Mine(Agent):\n    pass\n"
    assert read(tmp_path, mine, other=LENIENT + agent(WITH_KEY)) == AgentCode(True, False, True, False)


def test_a_policys_url_in_the_body(tmp_path: Path) -> None:
    assert read(tmp_path, LENIENT + agent("url = body.policy_base_url or self.url")).policy_url
    (tmp_path / "b").mkdir()
    assert not read(tmp_path / "b", LENIENT + agent("url = self.config.policy_base_url")).policy_url
