"""Which rows a curriculum draws: it finds the target, follows it, loses no row, and goes on from its state."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from benchmarks.curriculum import simulate

from gymgate.core.errors import ConfigError
from gymgate.integrations.training.curriculum import Curriculum, CurriculumConfig, Group

RATES = [0.0] * 40 + [0.05] * 20 + [0.5] * 20 + [0.95] * 20 + [1.0] * 40
KEYS = [f"{at:016x}" for at in range(len(RATES))]


def trained(config: CurriculumConfig, batches: int, *, seed: int = 0) -> tuple[Curriculum, list[int]]:
    """Train on rows of fixed rates; return the positions that were drawn."""
    curriculum, dice, drawn = Curriculum(config, {"e": KEYS}, seed=seed), random.Random(seed), []
    for _ in range(batches):
        batch = curriculum.draw(["e"] * 8)
        drawn += batch
        curriculum.update(
            Group("e", at, [float(dice.random() < RATES[at]) for _ in range(8)]) for at in batch
        )
    return curriculum, drawn


def test_rows_near_the_target_are_drawn_most_and_none_is_lost() -> None:
    _, drawn = trained(CurriculumConfig(), 600)
    late = drawn[-3200:]
    near = sum(RATES[at] == 0.5 for at in late) / len(late)
    assert near > 0.5, "20 of 140 rows are near the target, a seventh"
    assert set(late) == set(range(len(RATES)))


def test_another_target_draws_other_rows() -> None:
    _, drawn = trained(CurriculumConfig(target=0.95, width=0.05), 400)
    rates = [RATES[at] for at in drawn[-1600:]]
    assert rates.count(0.95) > 2 * rates.count(0.5)


def test_it_follows_a_learner_and_forgetting_matters() -> None:
    """Ability that is gained at equal budget, over two seeds (`benchmarks curriculum`)."""

    def ability(config: CurriculumConfig | None) -> float:
        return sum(simulate(config, rows=200, steps=250, seed=seed).ability for seed in range(2)) / 2

    followed = ability(CurriculumConfig())
    assert followed > ability(None) + 1
    assert followed > ability(CurriculumConfig(half_life=1e9)) + 0.1


def test_evidence_fades() -> None:
    """A row that was solved long ago is as little known as any other."""
    curriculum = Curriculum(CurriculumConfig(half_life=1.0), {"e": KEYS})
    curriculum.update([Group("e", 0, [1.0] * 8)])
    assert curriculum.rate("e", 0) > curriculum.rate("e", 1) + 0.1
    for _ in range(20):
        curriculum.update([])
    assert curriculum.rate("e", 0) == pytest.approx(curriculum.rate("e", 1), abs=0.001)


def test_rows_that_are_not_known_are_taken_for_what_the_others_turned_out_to_be() -> None:
    """Each of 30 batches finds one more hopeless row. The half of that is forgotten after 10."""
    curriculum = Curriculum(CurriculumConfig(half_life=10.0), {"e": KEYS})
    for at in range(30):
        curriculum.update([Group("e", at, [0.0, 0.0])])
    weight = sum(0.5 ** (age / 10) for age in range(30))
    assert curriculum.rate("e", 99) == pytest.approx(2 / (weight + 4))


@pytest.mark.parametrize(("solved", "least", "most"), [((8, 0), 0.9, 1.0), ((4, 4), 0.5, 0.6)])
def test_one_rollout_says_most_where_rows_are_solved_always_or_never(
    solved: tuple[int, int], least: float, most: float
) -> None:
    curriculum = Curriculum(CurriculumConfig(), {"e": KEYS})
    curriculum.update(
        Group("e", at, [1.0] * count + [0.0] * (8 - count)) for at in range(40) for count in [solved[at % 2]]
    )
    curriculum.update([Group("e", 99, [1.0])])
    assert least < curriculum.rate("e", 99) < most


def test_rewards_beyond_0_and_1_are_cut() -> None:
    curriculum = Curriculum(CurriculumConfig(), {"e": KEYS[:2]})
    curriculum.update([Group("e", 0, [-10.0] * 4), Group("e", 1, [10.0] * 4)])
    assert 0 < curriculum.rate("e", 0) < 0.5 < curriculum.rate("e", 1) < 1
    assert sorted(curriculum.draw(["e", "e"])) == [0, 1]


def test_another_seed_draws_other_rows() -> None:
    first, again, other = (Curriculum(CurriculumConfig(), {"e": KEYS}, seed=seed) for seed in (1, 1, 2))
    drawn = first.draw(["e"] * 8)
    assert again.draw(["e"] * 8) == drawn != other.draw(["e"] * 8)


def test_rollouts_without_a_reward_teach_nothing() -> None:
    curriculum = Curriculum(CurriculumConfig(), {"e": KEYS})
    before = curriculum.state()["environments"]
    assert curriculum.update([Group("e", 0, [None, None])]) == {}
    assert curriculum.state()["environments"] == before
    assert curriculum.update([Group("e", 0, [1.0, None])]) == {"distance": 0.5}
    assert curriculum.rate("e", 0) > 0.5


def test_the_metrics_are_of_the_batch() -> None:
    curriculum = Curriculum(CurriculumConfig(target=0.25), {"e": KEYS})
    groups = [Group("e", 0, [1.0, 1.0]), Group("e", 1, [0.0, 1.0]), Group("e", 2, [0.25])]
    assert curriculum.update(groups) == {"flat_groups": 0.5, "distance": pytest.approx((0.75 + 0.25) / 3)}


def test_a_batch_holds_no_row_twice_unless_it_is_larger_than_the_data() -> None:
    curriculum = Curriculum(CurriculumConfig(), {"a": KEYS[:3], "b": KEYS})
    drawn = curriculum.draw(["a", "b", "a", "b", "a", "a"])
    first = [drawn[at] for at in (0, 2, 4, 5)]
    assert sorted(first[:3]) == [0, 1, 2]
    assert first[3] == first[0]


def test_equal_rows_have_evidence_of_their_own_after_a_resume(tmp_path: Path) -> None:
    keys = ["a", "b", "a", "a"]
    curriculum = Curriculum(CurriculumConfig(), {"e": keys})
    curriculum.update([Group("e", 0, [1.0] * 8), Group("e", 2, [0.0] * 8)])
    again = Curriculum(CurriculumConfig(), {"e": keys})
    again.restore(json.loads(json.dumps(curriculum.state())))
    rates = [curriculum.rate("e", at) for at in range(4)]
    assert [again.rate("e", at) for at in range(4)] == rates
    assert [again.draw(["e"] * 3) for _ in range(20)] == [curriculum.draw(["e"] * 3) for _ in range(20)]
    assert rates[0] > rates[3] > rates[2]

    rows = [{"environment": "e", "row_key": "a", "occurrence": n, "rewards": [n / 2] * 4} for n in range(3)]
    (path := tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    started = Curriculum(CurriculumConfig(rates=str(path)), {"e": keys})
    assert started.rate("e", 0) < started.rate("e", 2) < started.rate("e", 3)


def test_a_state_goes_on_with_the_same_draws_whatever_the_order_of_the_rows() -> None:
    curriculum, _ = trained(CurriculumConfig(), 20)
    state = json.loads(json.dumps(curriculum.state()))
    again = Curriculum(CurriculumConfig(), {"e": KEYS})
    again.restore(state)
    assert [again.draw(["e"] * 8) for _ in range(3)] == [curriculum.draw(["e"] * 8) for _ in range(3)]
    turned = Curriculum(CurriculumConfig(), {"e": KEYS[::-1]})
    turned.restore(state)
    assert turned.rate("e", len(KEYS) - 1) == pytest.approx(curriculum.rate("e", 0))
    with pytest.raises(ConfigError, match="99"):
        again.restore({**state, "version": 99})


def test_it_starts_from_the_rates_of_a_run(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    tasks = [
        {
            "environment": "e",
            "row_key": key,
            "rewards": [1.0] * round(8 * rate) + [0.0] * round(8 * (1 - rate)),
        }
        for key, rate in zip(KEYS, RATES, strict=True)
    ]
    file.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    config = CurriculumConfig(rates=str(file))
    curriculum = Curriculum(config, {"e": KEYS})
    assert sum(RATES[at] == 0.5 for _ in range(20) for at in curriculum.draw(["e"] * 8)) > 60
    with pytest.raises(ConfigError, match="other"):
        Curriculum(config, {"other": KEYS})
    file.write_text(json.dumps({**tasks[0], "rewards": []}) + "\n")
    with pytest.raises(ConfigError, match="no rate"):
        Curriculum(config, {"e": KEYS})
    file.write_text('{"environment": "e"}\n')
    with pytest.raises(ConfigError, match=f"{file}:1"):
        Curriculum(config, {"e": KEYS})
