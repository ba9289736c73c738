"""NeMo Gym's own recorded rollouts, replayed through its real agents and scoring: the rewards come out again.

One stack per release for the whole file. Where a reward cannot be compared, or comes out otherwise, the test
says why and asserts that.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gymgate.core.config import ReplayEndpoint, RuntimeConfig, StackConfig
from gymgate.gateway.replay.recording import Recording, pair_rows, recorded_rollouts
from gymgate.gym.catalog import Catalog
from gymgate.gym.row_sources import open_rows
from gymgate.gym.runtime import ensure_runtime
from gymgate.rollouts import Rollout
from gymgate.stack import Stack, acquire

pytestmark = [
    pytest.mark.gym,
    pytest.mark.warm,
    pytest.mark.timeout(900),  # the first use of a release installs it
    pytest.mark.asyncio(loop_scope="module"),
]

COMMON = (
    "example_single_tool_call",
    "example_multi_step",
    "example_session_state_mgmt",
    "reasoning_gym",
    "calendar",
)
REPRODUCED = (*COMMON, "xlam_fc", "circle_click")
EXPLAINED = ("workplace_assistant", "mcqa", "structured_outputs", "blackjack")


class Lab:
    """A running stack and the recordings that its release ships."""

    def __init__(self, catalog: Catalog, stack: Stack) -> None:
        self.catalog = catalog
        self.stack = stack

    def file(self, name: str) -> Path:
        files = self.catalog.find(name).recordings()
        return next(file.path for file in files if file.name == "example_rollouts")

    def pairs(self, name: str) -> list[tuple[Recording, dict[str, Any]]]:
        """Each recording with the row to run; the record itself where no packaged row is its own."""
        recordings = recorded_rollouts([self.file(name)])
        rows = pair_rows(recordings, list(open_rows("example", environment=self.catalog.find(name))))
        return [(r, row.data if row is not None else r.row) for r, row in zip(recordings, rows, strict=True)]

    async def replay(
        self, name: str, rows: Sequence[dict[str, Any]], path: Path | None = None
    ) -> list[Rollout]:
        """The n-th row with the n-th recording as its policy."""
        file = str(path or self.file(name))
        return await asyncio.gather(
            *(
                self.stack.run(row, policy=ReplayEndpoint(rollouts=(file,), index=n), environment=name)
                for n, row in enumerate(rows)
            )
        )


@asynccontextmanager
async def lab_of(version: str, environments: Sequence[str]) -> AsyncIterator[Lab]:
    runtime = RuntimeConfig(version=version)
    installed = await asyncio.to_thread(ensure_runtime, runtime)
    async with acquire(StackConfig(environments=tuple(environments), runtime=runtime)) as stack:
        yield Lab(Catalog(installed.site, installed.version), stack)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab() -> AsyncIterator[Lab]:
    async with lab_of("0.7.0", [*REPRODUCED, *EXPLAINED]) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def old_lab() -> AsyncIterator[Lab]:
    async with lab_of("0.6.0", COMMON) as running:
        yield running


def rewards(rollouts: Sequence[Rollout]) -> list[float | None]:
    assert [rollout.error for rollout in rollouts] == [None] * len(rollouts)
    return [rollout.reward for rollout in rollouts]


def tool_outputs(items: Sequence[dict[str, Any]]) -> list[str]:
    return [item["output"] for item in items if item["type"] == "function_call_output"]


async def check_reproduced(lab: Lab, name: str) -> None:
    pairs = lab.pairs(name)
    rollouts = await lab.replay(name, [row for _, row in pairs])
    assert rewards(rollouts) == [recording.reward for recording, _ in pairs]
    for rollout, (recording, _) in zip(rollouts, pairs, strict=True):
        assert len(rollout.policy_calls) == len(recording.turns)


@pytest.mark.parametrize("name", REPRODUCED)
async def test_recorded_rewards_are_reproduced(lab: Lab, name: str) -> None:
    await check_reproduced(lab, name)


@pytest.mark.heavy  # `test_stack_versions.py` runs 0.6.0 in the test lane
@pytest.mark.parametrize("name", COMMON)
async def test_recorded_rewards_are_reproduced_on_0_6(old_lab: Lab, name: str) -> None:
    await check_reproduced(old_lab, name)


async def test_mcqa_scores_one_recorded_answer_otherwise(lab: Lab) -> None:
    """The third answer boxes a letter with its option's text. The release that recorded it found no letter in
    that (`extracted_answer` null, reward 0); this one reads the leading letter, which is right."""
    pairs = lab.pairs("mcqa")
    rollouts = await lab.replay("mcqa", [row for _, row in pairs])
    assert [recording.reward for recording, _ in pairs] == [0.0, 1.0, 0.0, 1.0, 1.0]
    assert rewards(rollouts) == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert pairs[2][0].raw["extracted_answer"] is None
    assert (rollouts[2].result or {})["extracted_answer"] == "C" == pairs[2][1]["expected_answer"]


async def test_structured_outputs_needs_the_schema_of_the_prompt(lab: Lab) -> None:
    """None of the packaged rows is one that was recorded, and the record lacks `schema_str`, which the verifier
    requires. The prompt has it; with that every recorded reward comes out."""
    pairs = lab.pairs("structured_outputs")
    rows = [{**row, "schema_str": schema_in(row)} for _, row in pairs]
    assert not any("schema_str" in row for _, row in pairs)
    assert rewards(await lab.replay("structured_outputs", rows)) == [r.reward for r, _ in pairs]
    (failed,) = await lab.replay("structured_outputs", [pairs[0][1]])
    assert failed.reward is None
    assert failed.error is not None
    assert "schema_str" in failed.error.message


def schema_in(row: dict[str, Any]) -> str:
    """The JSON object in a prompt, which is a schema or only its properties."""
    text = "\n".join(item["content"] for item in row["responses_create_params"]["input"])
    schema, _ = json.JSONDecoder().raw_decode(text, text.index('{"'))
    return json.dumps(schema if "properties" in schema else {"type": "object", "properties": schema})


async def test_workplace_assistant_needs_a_ground_truth(lab: Lab) -> None:
    """None of the packaged rows is one that was recorded, and the record lacks `ground_truth`, which the verifier
    compares with by its effects. Taken for the truth, what was recorded is right by definition: the first
    recording scored 0 against a truth that is not in the release. Taken for wrong, it scores 0.
    """
    pairs = lab.pairs("workplace_assistant")
    truths = [calls_of(recording.response["output"]) for recording, _ in pairs]
    lacking = {"id": 0, "category": "unknown", "environment_name": "workbench"}
    rows = [{**row, **lacking, "ground_truth": truth} for (_, row), truth in zip(pairs, truths, strict=True)]
    assert rewards(await lab.replay("workplace_assistant", rows)) == [1.0] * len(pairs)
    assert [recording.reward for recording, _ in pairs] == [0.0, 1.0, 1.0, 1.0, 1.0]
    others = [{**row, "ground_truth": truths[2]} for row in rows]
    assert rewards(await lab.replay("workplace_assistant", others)) == [0.0, 0.0, 1.0, 0.0, 0.0]
    (failed,) = await lab.replay("workplace_assistant", [pairs[0][1]])
    assert failed.error is not None
    assert "ground_truth" in failed.error.message


async def test_workplace_assistant_rewards_its_ground_truth(lab: Lab, tmp_path: Path) -> None:
    """The packaged rows, with a policy that makes the calls of their ground truth, and one that leaves one out."""
    rows = [row.data for row in open_rows("example", environment=lab.catalog.find("workplace_assistant"))]
    for left_out, reward in ((0, 1.0), (1, 0.0)):
        scripts = [[*made(row["ground_truth"][left_out:]), message("Done.")] for row in rows]
        path = write(tmp_path / f"{left_out}.jsonl", zip(rows, scripts, strict=True))
        assert rewards(await lab.replay("workplace_assistant", rows, path)) == [reward] * len(rows)


def calls_of(items: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    return [{k: i[k] for k in ("name", "arguments")} for i in items if i["type"] == "function_call"]


def made(calls: Sequence[dict[str, str]]) -> list[dict[str, Any]]:
    return [{"type": "function_call", "call_id": f"call_{n}", **call} for n, call in enumerate(calls)]


def message(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": text}


def write(path: Path, rollouts: Iterable[tuple[dict[str, Any], list[Any]]]) -> Path:
    lines = [json.dumps({**row, "response": {"output": output}}) for row, output in rollouts]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


CALL, TEXT = "function_call", "message"
ALTERATIONS = {
    "example_multi_step": (CALL, r"\d+", "1"),
    "example_session_state_mgmt": (CALL, r"\d+", "1"),
    "reasoning_gym": (TEXT, r".+", "I do not know."),
    "calendar": (TEXT, r".+", "[]"),
    "xlam_fc": (CALL, r".+", "{}"),
    "circle_click": (CALL, r"\d+", "1"),
}


@pytest.mark.parametrize("name", ALTERATIONS)
async def test_an_altered_recording_gets_another_reward(lab: Lab, name: str, tmp_path: Path) -> None:
    """What the policy says is what is scored: the reward is not read from anywhere."""
    kind, old, new = ALTERATIONS[name]
    recording, row = next(pair for pair in lab.pairs(name) if pair[0].reward == 1.0)
    items = [
        altered(item, old, new) if item["type"] == kind else item for item in recording.response["output"]
    ]
    assert items != recording.response["output"]
    path = write(tmp_path / "altered.jsonl", [(recording.row, items)])
    assert rewards(await lab.replay(name, [row], path)) == [0.0]


def altered(item: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    if item["type"] == CALL:
        return {**item, "arguments": re.sub(old, new, item["arguments"], flags=re.DOTALL)}
    return {**item, "content": [{**part, "text": new} for part in item["content"]]}


CARDS = {**{str(n): n for n in range(2, 11)}, "J": 10, "Q": 10, "K": 10, "A": 11}


def worth(cards: str) -> int:
    """Of a hand as the environment prints it, `[10, A]`; an ace counts 11, or 1 where that is too much."""
    hand = cards.strip("[]").split(", ")
    total, aces = sum(CARDS[card] for card in hand), hand.count("A")
    while total > 21 and aces:
        total, aces = total - 10, aces - 1
    return total


def observed(items: Sequence[dict[str, Any]]) -> list[str]:
    """The hands that the player was shown."""
    return [hand for item in items for hand in re.findall(r"Your hand: (\[.*?\])", str(item["content"]))]


async def hit_below_17(request: dict[str, Any]) -> dict[str, Any]:
    decision = "hit" if worth(observed(request["messages"])[-1]) < 17 else "stand"
    said = {"role": "assistant", "content": f"<action>{decision}</action>"}
    choice = {"index": 0, "message": said, "finish_reason": "stop"}
    return {"id": "chatcmpl-1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}


async def test_blackjack_by_its_rules(lab: Lab) -> None:
    """The cards are not seeded, so no recording can be replayed: a policy plays, and the rules say who won."""
    (row, *_) = open_rows("example", environment=lab.catalog.find("blackjack"))
    games = (
        lab.stack.run(row.data, policy=hit_below_17, record_bodies=True, environment="blackjack")
        for _ in range(20)
    )
    rollouts = await asyncio.gather(*games)
    assert len(set(rewards(rollouts))) > 1
    for rollout in rollouts:
        check_game(rollout)


def check_game(rollout: Rollout) -> None:
    info = (rollout.result or {})["info"]
    last = rollout.policy_calls[-1].request or {}
    shown = observed(last["input"])
    assert len(shown) == len(rollout.policy_calls)
    assert all(worth(hand) < 17 for hand in shown[:-1])
    assert info["player"].startswith(shown[-1].rstrip("]"))
    player, dealer = worth(info["player"]), worth(info.get("dealer", "[2]"))
    if player > 21:
        assert (rollout.reward, info["result"]) == (-1.0, "bust")
    else:
        assert dealer >= 17
        assert rollout.reward == (
            1.0 if dealer > 21 or player > dealer else 0.0 if player == dealer else -1.0
        )


async def test_an_unseeded_recording_is_a_policy_failure(lab: Lab) -> None:
    (_, row), *_ = lab.pairs("blackjack")
    (rollout,) = await lab.replay("blackjack", [row])
    assert rollout.error is not None
    assert (rollout.reward, rollout.error.kind, rollout.error.type) == (
        None,
        "policy",
        "UnknownConversationError",
    )
    assert "example_rollouts.jsonl:1, " in rollout.error.message
    assert "message 2 (user)" in rollout.error.message


async def test_blend(lab: Lab, tmp_path: Path) -> None:
    """One file whose rows name the agents of three environments."""
    lines, expected, files = [], [], []
    for name in ("example_multi_step", "calendar", "xlam_fc"):
        agent = next(a.instance for a in lab.stack.agents.values() if a.environment == name)
        files.append(str(lab.file(name)))
        for recording, row in lab.pairs(name):
            lines.append({**row, "agent_ref": {"type": "responses_api_agents", "name": agent}})
            expected.append((name, recording.reward))
    order = [n * 7 % len(lines) for n in range(len(lines))]
    blend = tmp_path / "blend.jsonl"
    blend.write_text("".join(json.dumps(lines[n]) + "\n" for n in order))
    policy = ReplayEndpoint(rollouts=tuple(files))
    rollouts = await asyncio.gather(
        *(lab.stack.run(row.data, policy=policy) for row in open_rows(str(blend), environment=None))
    )
    assert [(r.environment, r.reward) for r in rollouts] == [expected[n] for n in order]
