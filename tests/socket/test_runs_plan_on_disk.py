"""The plan that a command leaves in its run's directory, and what later commands and readers make of it.

The endpoint answers nothing, so that each command ends after it has opened the directory and before it starts a stack.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from click.testing import CliRunner

import gymgate
from gymgate.cli.aggregate import command
from gymgate.core.config import HTTPEndpoint, StackConfig
from gymgate.core.errors import ConfigError, PolicyError
from gymgate.gym.row_sources import RowSource
from gymgate.rollouts import Rollout
from gymgate.rollouts.row import make_row, row_key
from gymgate.runs.collected.run import Collection
from gymgate.runs.collected.store import open_run
from gymgate.runs.counted.aggregate import read_runs
from gymgate.runs.described.plan import RolloutPlan, Shard
from gymgate.runs.stored.layout import ROLLOUTS, read_run
from gymgate.runs.stored.record import CollectedRollout, collected, to_line
from support.upstream import Seen, upstream

NOWHERE = "http://127.0.0.1:9/v1"
STACK = StackConfig(environments=("mcqa",))


def row(text: str) -> dict[str, Any]:
    return {"responses_create_params": {"input": text}}


async def command_over(output: Path, texts: Sequence[str], **fields: Any) -> RolloutPlan:
    """A command over these rows, with -r and the like in `fields`."""
    rows = [make_row(row(text), "rows", number) for number, text in enumerate(texts, 1)]
    plan = RolloutPlan([RowSource(rows, "mcqa")], **fields)
    run = Collection(
        STACK, HTTPEndpoint(base_url=NOWHERE, model="m"), plan, ["rows"], output, wait_for_policy_s=0
    )
    with contextlib.suppress(PolicyError):  # nothing is left where all has finished
        await run.run()
    return plan


def finish(path: Path, plan: RolloutPlan) -> None:
    with (path / ROLLOUTS).open("ab") as file:
        for planned in plan.rollouts():
            rollout = Rollout(id="x", environment="mcqa", agent="a", status="completed", reward=1.0)
            file.write(to_line(collected(planned, rollout, 0)))


def missing(path: Path) -> tuple[int, str]:
    """The exit code of `aggregate --complete`, and its notes."""
    done = CliRunner().invoke(command, [str(path), "--complete"])
    return done.exit_code, done.stderr


async def test_rollouts_of_rows_that_left_the_input_complete_nothing(tmp_path: Path) -> None:
    finish(tmp_path, await command_over(tmp_path, "abc"))
    code, notes = missing(tmp_path)
    assert (code, [line for line in notes.splitlines() if not line.startswith("next: ")]) == (0, [])
    plan = await command_over(tmp_path, "abd")
    code, notes = missing(tmp_path)
    assert code == 1
    assert "1 of 3 rollouts" in notes
    assert row_key(row("c")) in notes
    finish(tmp_path, RolloutPlan([RowSource([make_row(row("d"), "rows", 3)], "mcqa")]))
    assert plan.total() == 3
    code, notes = missing(tmp_path)
    assert (code, "missing" in notes) == (0, False)
    assert row_key(row("c")) in notes


@pytest.mark.parametrize(
    ("texts", "before", "after", "strangers"),
    [
        ("ab", {"repeats": 4}, {"repeats": 2}, 4),
        ("ab", {"seeds": (0, 1)}, {"seeds": (1, 2)}, 2),
        ("aab", {}, {"repeats": 2}, 0),
        ("aaab", {"shard": Shard(1, 2)}, {"shard": Shard(1, 2), "repeats": 3}, 0),
    ],
)
async def test_what_the_plan_holds_is_what_readers_take_for_it(
    tmp_path: Path, texts: str, before: dict[str, Any], after: dict[str, Any], strangers: int
) -> None:
    """Repeats, seeds, equal rows and shards: a reader counts as the plan itself does."""
    path = tmp_path / "shard-1-of-2" if "shard" in before else tmp_path
    plan = await command_over(tmp_path, texts, **before)
    finish(path, plan)
    grown = await command_over(tmp_path, texts, **after)
    left = len(set(grown.identities()) - set(plan.identities()))
    found = [note for note in read_runs([path]).missing if "rollouts" in note]
    assert len(found) == bool(left)
    assert all(note.startswith(f"{path}: {left} of {grown.total()} rollouts ") for note in found)
    assert (f"{strangers} older rollouts" in missing(path)[1]) == bool(strangers)


async def stream(output: Path, model: str | None, into: list[CollectedRollout], url: str = NOWHERE) -> None:
    policy = HTTPEndpoint(base_url=url, model=model)
    rollouts = gymgate.collect(STACK, [row("a"), row("b")], policy=policy, output=output, wait_for_policy_s=0)
    async for rollout in rollouts:
        into.append(rollout)


async def test_another_policys_rollouts_are_not_yielded(tmp_path: Path) -> None:
    found: list[CollectedRollout] = []
    finish(tmp_path, await command_over(tmp_path, "ab"))
    with pytest.raises(ConfigError, match="'m' there, 'new' here"):
        await stream(tmp_path, "new", found)
    assert found == []
    await stream(tmp_path, "m", found)
    assert len(found) == 2


async def test_a_rollout_with_two_lines_is_yielded_once(tmp_path: Path) -> None:
    """As `aggregate` counts it: of two the first. `evaluate` counted both."""
    found: list[CollectedRollout] = []
    finish(tmp_path, await command_over(tmp_path, "ab"))
    with (tmp_path / ROLLOUTS).open("a") as file:
        file.write((tmp_path / ROLLOUTS).read_text())
    await stream(tmp_path, "m", found)
    assert len({rollout.identity for rollout in found}) == len(found) == 2


async def test_an_endpoints_only_model_is_the_runs_policy_and_one_of_several_must_be_chosen(
    tmp_path: Path,
) -> None:
    """As for `gymgate run` without -m."""
    names = ["m"]

    async def script(seen: Seen) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in names]})

    found: list[CollectedRollout] = []
    finish(tmp_path, await command_over(tmp_path, "ab"))
    async with upstream(script) as server:
        await stream(tmp_path, None, found, server.url)
        assert len(found) == 2
        names.append("n")
        with pytest.raises(ConfigError, match="m, n"):
            await stream(tmp_path, None, found, server.url)


async def test_rollouts_of_a_run_that_another_process_writes_are_not_yielded(tmp_path: Path) -> None:
    found: list[CollectedRollout] = []
    finish(tmp_path, await command_over(tmp_path, "ab"))
    described = read_run(tmp_path)
    with (
        open_run(tmp_path, described["settings"], described["extent"]),
        pytest.raises(ConfigError, match=re.escape(str(tmp_path))),
    ):
        await stream(tmp_path, "m", found)
    assert found == []
