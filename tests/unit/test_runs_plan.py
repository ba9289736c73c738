"""Which rollouts a run consists of: identities, shards, seeds, and what is wrong with an input."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from gymgate.core.config import CallableEndpoint, HTTPEndpoint, ReplayEndpoint, RolloutLimits, StackConfig
from gymgate.core.errors import ConfigError, DataError, PolicyError
from gymgate.gym.records import answer_fields
from gymgate.gym.row_sources import RowSource, open_rows
from gymgate.rollouts import Rollout
from gymgate.rollouts.row import make_row
from gymgate.runs.collected.run import Collection
from gymgate.runs.collected.store import open_run
from gymgate.runs.described.plan import (
    SEED_STRIDE,
    Identity,
    IdentitySet,
    RolloutPlan,
    Shard,
    parse_seeds,
    parse_shard,
)
from gymgate.runs.described.settings import (
    context_overflow_of,
    differences,
    extent_of,
    settings_of,
    shown_settings,
)
from gymgate.runs.stored.record import collected

STACK = StackConfig(environments=("mcqa",))


def row(number: int) -> dict[str, Any]:
    return {"responses_create_params": {"input": f"question {number}"}}


def source(numbers: list[int], **fields: Any) -> RowSource:
    return RowSource(
        [make_row(row(number), "rows", line) for line, number in enumerate(numbers, 1)], **fields
    )


def write_rows(path: Path, count: int, *, broken_line: int | None = None) -> Path:
    lines = [orjson.dumps(row(number)) for number in range(count)]
    if broken_line is not None:
        lines[broken_line - 1] = b'{"responses_create_params": {"inp'
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def test_every_row_seed_and_repeat_once() -> None:
    plan = RolloutPlan([source([0, 1, 2])], repeats=2, seeds=(0, 5))
    identities = [planned.identity for planned in plan.rollouts()]
    assert len(identities) == len(set(identities)) == plan.total() == 12
    assert {(i.repeat, i.seed) for i in identities} == {(0, 0), (1, 0), (0, 5), (1, 5)}
    assert [planned.task for planned in plan.rollouts()] == [0, 1, 2] * 4


def test_rows_of_several_sources_have_numbers_of_their_own() -> None:
    plan = RolloutPlan([source([0, 1], environment="a"), source([0, 2], environment="b")])
    assert {(each.environment, each.row.line): each.task for each in plan.rollouts()} == {
        ("a", 1): 0,
        ("a", 2): 1,
        ("b", 1): 2,
        ("b", 2): 3,
    }


def test_what_has_finished_is_a_sample_of_the_run() -> None:
    """Ten rows of one environment and thirty of another: a quarter of either after a quarter of the rollouts, and each row
    once before any row again."""
    plan = RolloutPlan(
        [source(list(range(10)), environment="a"), source(list(range(10, 40)), environment="b")], repeats=2
    )
    rollouts = list(plan.rollouts())
    quarter = [planned.environment for planned in rollouts[:20]]
    assert (quarter.count("a"), quarter.count("b")) == (5, 15)
    assert len({planned.identity.row_key for planned in rollouts[:40]}) == 40
    assert len({planned.identity for planned in rollouts}) == plan.total() == 80


def test_repeats_of_a_seed_get_seeds_of_their_own() -> None:
    plan = RolloutPlan([source([0])], repeats=2, seeds=(0, 3))
    assert [planned.sent_seed for planned in plan.rollouts()] == [0, 3, SEED_STRIDE, 3 + SEED_STRIDE]
    assert [planned.sent_seed for planned in RolloutPlan([source([0])]).rollouts()] == [None]


async def test_the_policy_gets_the_seed_and_the_settings_do_not() -> None:
    policies: list[HTTPEndpoint] = []

    class Recorder:
        async def run(self, row: Any, *, policy: HTTPEndpoint, **_: Any) -> None:
            policies.append(policy)

    endpoint = HTTPEndpoint(base_url="http://h/v1", model="m", sampling=(("temperature", 0.5),))
    plan = RolloutPlan([source([0])], repeats=2, seeds=(3,))
    stack = StackConfig(environments=("mcqa",))
    run = Collection(stack=stack, policy=endpoint, plan=plan, names=["rows"])
    for planned in plan.rollouts():
        await run._run_one(Recorder(), planned)  # type: ignore[arg-type]
    assert [dict(policy.sampling)["seed"] for policy in policies] == [3, 3 + SEED_STRIDE]
    assert {dict(policy.sampling)["temperature"] for policy in policies} == {0.5}
    secret = endpoint.model_copy(update={"api_key": SecretStr("s3cret"), "base_url": "http://other/v1"})
    settings = [settings_of(each, RolloutLimits(), ["rows"]) for each in (endpoint, secret)]
    assert settings[0] == settings[1]
    assert "s3cret" not in str(settings)


def test_runs_that_treat_a_context_overflow_otherwise_are_not_one_run() -> None:
    """One has a score of 0 where the other has none, so their means differ for the same model."""
    endpoint = HTTPEndpoint(base_url="http://h/v1")
    answered, refused = (
        settings_of(endpoint, RolloutLimits(context_overflow=overflow), ["rows"])
        for overflow in ("answer", "refuse")
    )
    stored_before = {**answered, "limits": {"timeout_s": 3600.0, "max_calls": 1000}}
    for other in (refused, stored_before):
        (difference,) = differences(other, answered)
        assert difference.startswith("limits.context_overflow: ")
    assert context_overflow_of(stored_before) == context_overflow_of(refused) == "refuse"


def test_a_function_has_no_context_that_overflows() -> None:
    one, other = (
        settings_of(CallableEndpoint(name="f"), RolloutLimits(context_overflow=overflow), ["rows"])
        for overflow in ("answer", "refuse")
    )
    assert one == other
    assert context_overflow_of(one) is None


def test_what_only_a_stack_knows_is_a_difference_once_both_have_said_it() -> None:
    for before, now, count in (("0.6.0", "0.7.0", 1), ("0.7.0", "0.7.0", 0), (None, "0.7.0", 0)):
        settings = [{} if release is None else {"nemo_gym": release} for release in (before, now)]
        assert len(differences(*settings)) == count


def test_what_may_be_a_secret_is_not_shown() -> None:
    overrides = {"hf_token": "secret", "max_tokens": 5, "url": "http://me:secret@host/v1"}
    shown = shown_settings({"environments": [{"name": "e", "overrides": overrides}]})
    assert "secret" not in str(shown)
    assert shown["environments.0.overrides.max_tokens"] == 5
    assert shown["environments.0.overrides.url"] == "http://host/v1"


def test_equal_rows_are_told_apart() -> None:
    plan = RolloutPlan([source([7, 8, 7]), source([7])])
    assert sorted(planned.identity.occurrence for planned in plan.rollouts()) == [0, 0, 1, 2]
    assert len({planned.identity for planned in plan.rollouts()}) == 4


def test_reordering_changes_no_identity() -> None:
    numbers = [*range(20), 3, 3]
    shuffled = random.Random(1).sample(numbers, len(numbers))
    one, other = (RolloutPlan([source(order)], repeats=3) for order in (numbers, shuffled))
    assert set(one.identities()) == set(other.identities())


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=8),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(1, 7),
)
def test_shards_are_a_partition(numbers: list[int], repeats: int, seeds: int, count: int) -> None:
    wanted = {"repeats": repeats, "seeds": tuple(range(seeds)) or None}
    whole = list(RolloutPlan([source(numbers)], **wanted).identities())
    parts = [RolloutPlan([source(numbers)], **wanted, shard=Shard(i, count)) for i in range(1, count + 1)]
    found = [identity for part in parts for identity in part.identities()]
    assert sorted(map(str, found)) == sorted(map(str, whole))
    assert sum(part.total() for part in parts) == len(whole)


def test_shards_are_even_where_repeats_are_a_multiple_of_them() -> None:
    parts = [RolloutPlan([source(list(range(9)))], repeats=8, shard=Shard(i, 4)) for i in range(1, 5)]
    assert [part.total() for part in parts] == [18, 18, 18, 18]


@given(
    st.sets(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 5), st.none() | st.integers(0, 4)))
)
def test_done_is_a_set(members: set[tuple[int, int, int, int | None]]) -> None:
    identities = [Identity(f"{key:016x}", *rest) for key, *rest in sorted(members, key=str)]
    done = IdentitySet()
    assert [done.add(identity) for identity in identities] == [True] * len(identities)
    assert [done.add(identity) for identity in identities] == [False] * len(identities)
    assert len(done) == len(identities)
    assert all(identity in done for identity in identities)
    assert Identity("f" * 16, 0, 0, None) not in done


def test_what_is_done_is_not_run_again() -> None:
    plan = RolloutPlan([source([0, 1])], repeats=2)
    first, *rest = plan.rollouts()
    done = IdentitySet()
    done.add(first.identity)
    assert [planned.identity for planned in plan.rollouts(done)] == [planned.identity for planned in rest]


def test_a_broken_line_in_the_middle_costs_itself_only(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", 5, broken_line=3)
    plan = RolloutPlan([RowSource(open_rows(str(path), environment=None))], repeats=2)
    assert plan.total() == 8
    assert [planned.row.line for planned in plan.rollouts()] == [1, 2, 4, 5] * 2
    assert [str(error).split(": ")[0] for error in plan.invalid] == [f"{path}:3"]


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=r"rows\.jsonl"):
        RolloutPlan([RowSource(open_rows(str(tmp_path / "rows.jsonl"), environment=None))])


def test_a_file_without_one_good_row_is_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", 1, broken_line=1)
    with pytest.raises(DataError, match=r"rows\.jsonl:1: not JSON"):
        RolloutPlan([RowSource(open_rows(str(path), environment=None))])


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("4", (0, 1, 2, 3)), ("3,5,7-9", (3, 5, 7, 8, 9)), ("4,", (4,)), ("1", (0,)), ("0", (0,))],
)
def test_seeds(text: str, seeds: tuple[int, ...]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1,2,1", "seeds 1 "),
        ("1-3,2-5", "seeds 2, 3 "),
        ("a", "'a'"),
        ("3-1", "seed"),
        (f"{SEED_STRIDE},", "not between 0 and"),
        (f"0-{10**12}", f"seed {10**12} "),
        (str(10**12), f"seed {10**12 - 1} "),
    ],
)
def test_wrong_seeds(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_seeds(text)


@pytest.mark.parametrize("text", ["5/4", "0/4", "1/0", "4", "a/b", "-1/4", "1/4/2"])
def test_wrong_shards(text: str) -> None:
    with pytest.raises(ConfigError, match="I/N"):
        parse_shard(text)


def test_a_shard() -> None:
    assert parse_shard("4/4") == Shard(4, 4)
    assert parse_shard("4/4").directory == "shard-4-of-4"


async def test_a_resume_does_not_take_a_row_for_an_equal_one_of_another_environment(tmp_path: Path) -> None:
    """With more rows, the first environment has one that the second had alone: its occurrence is another row's now."""
    both = [
        [make_row(row(number), name, line) for line, number in enumerate(numbers, 1)]
        for name, numbers in (("a", (1, 2)), ("b", (2, 3)))
    ]

    def run_of(limit: int) -> Collection:
        plan = RolloutPlan([RowSource(rows, name, limit) for rows, name in zip(both, "ab", strict=True)])
        nowhere = HTTPEndpoint(base_url="http://127.0.0.1:9/v1", model="m")
        return Collection(STACK, nowhere, plan, wait_for_policy_s=0, output=tmp_path / "run")

    before = run_of(1)
    with open_run(
        tmp_path / "run", before.settings(), extent_of(before.plan), before.plan.row_keys()
    ) as kept:
        for planned in before.plan.rollouts():
            about = {"id": "r", "environment": planned.environment, "agent": "a", "status": "completed"}
            kept.add(collected(planned, Rollout(**about, reward=1.0), 0))
    await run_of(1).run()  # nothing is left
    with pytest.raises(ConfigError, match="'a'"):
        await run_of(2).run()


async def test_a_shard_with_other_settings_than_another_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read as one run: half of its rewards would be those of another grader."""
    stack = StackConfig(environments=("e",), env_vars=("MODE",))
    nowhere = HTTPEndpoint(base_url="http://127.0.0.1:9/v1", model="m")
    plans = [RolloutPlan([source([*range(8)])], shard=Shard(index, 2)) for index in (1, 2)]

    def run_of(plan: RolloutPlan, grader: str = "old") -> Collection:
        settings = {"environments": [{"name": "e", "content": {"app.py": grader}}]}
        return Collection(stack, nowhere, plan, wait_for_policy_s=0, output=tmp_path, stack_settings=settings)

    monkeypatch.setenv("MODE", "easy")
    first = run_of(plans[0])
    with open_run(tmp_path / "shard-1-of-2", first.settings(), extent_of(plans[0])):
        pass
    with pytest.raises(ConfigError, match=r"content\.app\.py"):
        await run_of(plans[1], "new").run()
    monkeypatch.setenv("MODE", "hard")
    with pytest.raises(ConfigError, match=r"variables\.MODE"):
        await run_of(plans[1]).run()
    monkeypatch.setenv("MODE", "easy")
    with pytest.raises(PolicyError):  # it goes as far as the policy
        await run_of(plans[1]).run()


@pytest.mark.parametrize(
    ("environment", "answers", "warned"),
    [
        ("mcqa", [{"expected_answer": "A"}, {}, {"expected_answer": None}, {"expected_answer": ""}], 3),
        ("mcqa", [{"expected_answer": "A"}, {"expected_answer": 0}, {"expected_answer": False}], 0),
        ("nosuch", [{}], 0),
        (None, [{}], 0),
    ],
)
async def test_rows_without_the_answer_that_scoring_reads_are_warned_of_and_planned(
    environment: str | None, answers: list[dict[str, Any]], warned: int
) -> None:
    rows = [make_row({**row(n), **answer}, "mine.jsonl", n) for n, answer in enumerate(answers, 1)]
    plan = RolloutPlan([RowSource(rows, environment)])
    assert plan.rows == len(answers)
    assert len(plan.warnings) == bool(warned)
    lines: list[str] = []
    nowhere = HTTPEndpoint(base_url="http://127.0.0.1:9/v1", model="m")
    run = Collection(STACK, nowhere, plan, wait_for_policy_s=0, log=lines.append)
    with pytest.raises(PolicyError):  # before anything starts
        await run.run()
    for line in lines[: len(plan.warnings)]:
        for word in ("warning: ", f"{warned} of {len(answers)}", "'expected_answer'", "mine.jsonl:2"):
            assert word in line


def test_every_environment_with_a_paid_answer_is_known_by_one_field() -> None:
    fields = answer_fields()
    assert len(fields) > 40
    assert fields["mcqa"] == "expected_answer"


@pytest.mark.parametrize(
    ("policy", "kind"),
    [(lambda body: "hi", "a function"), (ReplayEndpoint(rollouts=("f",)), "recorded rollouts")],
)
def test_seeds_of_a_policy_that_gets_none_are_refused(policy: Any, kind: str) -> None:
    """They would only be labels on equal requests."""
    plan = RolloutPlan([source([0])], seeds=(0, 1))
    with pytest.raises(ConfigError, match=kind):
        Collection(stack=StackConfig(environments=("e",)), policy=policy, plan=plan)
    Collection(stack=StackConfig(environments=("e",)), policy=HTTPEndpoint(base_url="http://a/v1"), plan=plan)
