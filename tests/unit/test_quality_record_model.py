"""The quality record as a value: what is noticed in it, its thresholds, its file, and the records that ship."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import click
import pytest
import yaml

from gymgate.cli import cli
from gymgate.core.config import HTTPEndpoint
from gymgate.core.errors import DataError
from gymgate.gateway.route import POLICY_AS_JUDGE
from gymgate.quality import CheckRequest, CheckResult
from gymgate.quality.model import SectionName, Thresholds
from gymgate.quality.record import deterministic, failure_cases, model_rewards, storage
from gymgate.quality.record.context import (
    OWN_JUDGE,
    MeasurementContext,
    ReplayCase,
    Unmeasured,
    constant_policy,
)
from gymgate.quality.record.findings import problems, unmet_thresholds
from gymgate.quality.record.scoring import Scorer
from gymgate.quality.record.shape import distribution
from gymgate.quality.sections import NO_REWARD, FailureCase, ProbeRewards, Section
from gymgate.rollouts import ModelCall, Rollout

ROOT = Path(__file__).parents[2]
EVERYTHING = Thresholds(max_constant_reward=0.05, deterministic=True, reproducible=True, honest=True)


def record(**sections: Any) -> CheckResult:
    about = {
        "environment": "mine",
        "kind": "config",
        "nemo_gym": "0.7.0",
        "gymgate": "0",
        "date": "2026-11-22",
    }
    verdict = {"verdict": "match", "matched": 2, "compared": 2}
    return CheckResult.model_validate({**about, **verdict, **sections})


def answers(**means: float) -> dict[str, Any]:
    names = {"empty": "empty", "other": "another row's best"}
    given = {
        names[key]: {"rows": 4, "failed": 0, "mean": mean, "highest": 2 * mean, "above_zero": 2 * bool(mean)}
        for key, mean in means.items()
    }
    return {"recorded_mean": 0.8, "answers": given}


def cases(**outcomes: str) -> dict[str, Any]:
    return {"cases": {name: {"outcomes": {outcome: 1}, "rewards": [0]} for name, outcome in outcomes.items()}}


SOUND = record(
    deterministic={"rollouts": 2, "scored": 6, "failed": 0},
    probes=answers(empty=0.0, other=0.4),
    failures=cases(judge_down="error", tool_timeout="masked", cut_off="truncated", long_answer="number"),
)


def test_a_sound_record_has_no_findings_and_meets_every_threshold() -> None:
    assert list(problems(SOUND)) == []
    assert list(unmet_thresholds(SOUND, EVERYTHING)) == []


@pytest.mark.parametrize(
    ("sections", "threshold", "value"),
    [
        ({"verdict": "differs", "matched": 1, "detail": "why"}, "--reproducible: differs: ", "why"),
        (
            {
                "deterministic": {
                    "rollouts": 2, "scored": 4, "failed": 0, "changed": [{"rollout": "a:1", "rewards": [0, 1]}],
                }
            },
            "--deterministic: ",
            "a:1: 0, 1",
        ),
        ({"probes": answers(empty=0.06)}, "--max-constant-reward 0.05: ", " 0.06"),
        ({"probes": answers(other=0.5)}, "--max-constant-reward 0.05: ", " 0.5"),
        ({"failures": cases(judge_down="number")}, "--honest: ", "(0)"),
        ({"failures": cases(long_answer="error")}, "--honest: ", "no reward"),
    ],
)  # fmt: skip
def test_each_fault_is_a_finding_and_misses_a_threshold(
    sections: dict[str, Any], threshold: str, value: str
) -> None:
    wrong = record(**{**SOUND.model_dump(exclude={"schema_version"}), **sections})
    (found,) = unmet_thresholds(wrong, EVERYTHING)
    assert found.startswith(threshold)
    assert value in found
    assert len(list(problems(wrong))) == 1


PAID = {"rows": 1, "failed": 0, "mean": 1, "highest": 1, "above_zero": 1}
FLAG = {"row": "row 0", "answer": "x", "reward": 1.0, "right": 1.0}
JUDGED: dict[str, dict[str, Any]] = {
    "deterministic.failed": {"deterministic": {"rollouts": 1, "scored": 1, "failed": 1}},
    "deterministic.scored": {"deterministic": {"rollouts": 1, "scored": 0, "failed": 0}},
    "deterministic.changed": {
        "deterministic": {"rollouts": 1, "scored": 3, "failed": 0, "changed": [{"rollout": "a", "rewards": [0, 1]}]}
    },
    "probes.recorded_mean": {"probes": {"recorded_mean": 0.1, "answers": {"another row's best": {**PAID, "mean": 0.2}}}},
    "probes.answers": {"probes": {"answers": {"empty": PAID}}},
    "probes.answers.mean": {"probes": {"answers": {"empty": PAID}}},
    "probes.answers.highest": {"probes": {"answers": {"empty": PAID}}},
    "probes.answers.failed": {"probes": {"answers": {"empty": {**PAID, "failed": 1, "mean": 0, "highest": 0}}}},
    "probes.answers.flagged": {"probes": {"answers": {"negated": {**PAID, "flagged": [FLAG]}}}},
    "failures.cases": {"failures": cases(judge_down="number")},
    "failures.cases.outcomes": {"failures": cases(cut_off="number")},
    "failures.cases.rewards": {"failures": {"cases": {"long_answer": {"outcomes": {"number": 1}, "rewards": [1]}}}},
    "oracle.reason": {"oracle": {"reason": "other", "detail": "why"}},
    "oracle.solved": {"oracle": {"field": "a", "rows": 1, "solved": 0, "reward": 0.0}},
    "oracle.reward": {"oracle": {"field": "a", "rows": 1, "solved": 1, "reward": 0.5}},
    "oracle.suspect": {"oracle": {"field": "a", "rows": 3, "solved": 2, "reward": 1.0, "suspect": ["row 0"]}},
    "oracle.phrasings": {
        "oracle": {
            "field": "a", "asked_for": "answer", "rows": 1, "solved": 1, "reward": 1.0,
            "phrasings": {
                "answer": {"rows": 1, "full_rows": 0, "partial_rows": 0, "zero_rows": 1, "mean": 0},
                "x": {"rows": 1, "full_rows": 1, "partial_rows": 0, "zero_rows": 0, "mean": 1},
            },
        }
    },
    "data.duplicates": {"data": {"files": {"a": 2}, "duplicates": 1}},
    "data.answers_in_prompt": {"data": {"answers": 1, "answers_in_prompt": 1}},
    "data.shared": {"data": {"shared": 1}},
}  # fmt: skip
"""A record in which this figure is bad."""
UNJUDGED = {
    "counts of what was tried, no quality": (
        "deterministic.rollouts", "deterministic.at_once", "probes.date", "probes.answers.rows", "oracle.rows",
        "oracle.full", "data.files", "data.answers", "data.splits",
    ),
    "`highest` and `flagged` decide": ("probes.answers.above_zero",),
    "names of rows, messages and texts that go with a judged figure": (
        "data.duplicate_rows", "data.rows_with_answer", "data.shared_rows", "failures.cases.said", "oracle.detail",
        "oracle.field", "oracle.asked_for", "oracle.unsolved", "oracle.recorded",
    ),
    "only `--probe` fills it, to test a published reason": ("probes.answers.counter",),
    "of the machine and its load; no value is wrong": ("cost",),
    "describes rows and recordings; no value is wrong": ("shape",),
    "a model's, not the environment's": ("policy",),
}  # fmt: skip


def figures(model: type[Section], above: str) -> set[str]:
    """The figures of a section, those of records inside it included."""
    names: set[str] = set()
    for name, field in model.model_fields.items():
        if name != "missing":
            names.add(f"{above}.{name}")
            inner = [each for each in get_args(field.annotation) if each in (ProbeRewards, FailureCase)]
            names |= {f"{above}.{name}.{each}" for kind in inner for each in kind.model_fields}
    return names


def test_each_figure_is_judged_by_some_rule_or_says_why_not() -> None:
    unjudged = {name for names in UNJUDGED.values() for name in names}
    sections = {
        name: kind
        for name, field in CheckResult.model_fields.items()
        for kind in get_args(field.annotation)
        if isinstance(kind, type) and issubclass(kind, Section)
    }
    assert {*sections} == {*get_args(SectionName), "data"}
    wanted = {figure for name in sections if name not in unjudged for figure in figures(sections[name], name)}
    assert JUDGED.keys() | unjudged == wanted | {"cost", "shape", "policy"}
    assert not JUDGED.keys() & unjudged
    strictest = Thresholds(
        max_constant_reward=0.05,
        deterministic=True,
        honest=True,
        min_oracle_reward=1.0,
        no_flags=True,
        clean_rows=True,
    )
    good = record(
        deterministic={"rollouts": 1, "scored": 3, "failed": 0},
        probes={"answers": {"empty": {**PAID, "mean": 0, "highest": 0, "above_zero": 0}}},
        failures=cases(long_answer="number"),
        oracle={"field": "a", "rows": 1, "solved": 1, "reward": 1.0},
        data={"duplicates": 0, "answers_in_prompt": 0, "shared": 0},
    )
    assert [*unmet_thresholds(good, strictest)] == []
    for name, sections_of in JUDGED.items():
        bad = record(**{**good.model_dump(exclude={"schema_version"}), **sections_of})
        assert [*unmet_thresholds(bad, strictest)], name


def test_a_reward_that_only_another_replay_gave_is_not_reproducible() -> None:
    row = {"recording": "a:1", "recorded": 1.0, "reward": 1.0, "verdict": "match", "first": 0.0}
    late = record(rows=[row], detail="1 of 2: scored 0 when first replayed")
    (found,) = unmet_thresholds(late, Thresholds(reproducible=True))
    assert late.detail in found
    assert [*unmet_thresholds(record(rows=[{**row, "first": None}]), Thresholds(reproducible=True))] == []


@pytest.mark.parametrize("sentence", [0, 1])
def test_a_paid_long_answer_is_a_finding_if_its_beginning_alone_earns_nothing(sentence: int) -> None:
    long = {"cases": {"long_answer": {"outcomes": {"number": 2}, "rewards": [0, 1]}}}
    probes = {
        "answers": {"fixed sentence": {**PAID, "above_zero": sentence, "highest": sentence, "mean": sentence}}
    }
    kinds = [(each.kind, each.probe) for each in problems(record(probes=probes, failures=long))]
    assert kinds == [("free reward", "fixed sentence" if sentence else None)]


def test_what_was_not_measured_meets_no_threshold() -> None:
    why = "nothing could be run"
    nothing = record(missing={"all": why})
    assert list(unmet_thresholds(nothing, EVERYTHING)) == [
        f"--deterministic: not measured: {why}",
        f"--max-constant-reward: not measured: {why}",
        f"--honest: not measured: {why}",
    ]
    assert list(unmet_thresholds(nothing, Thresholds())) == []
    partly = record(
        deterministic={"rollouts": 2, "scored": 5, "failed": 1},
        probes={"missing": {"the prompt": "no judge", "another row's best": "no other row"}},
        failures={"missing": {"long_answer": "no rows"}},
    )
    unscored, constant, honest = unmet_thresholds(partly, EVERYTHING)
    assert unscored.startswith("--deterministic: ")
    assert "1 of 6 " in unscored
    assert constant.startswith("--max-constant-reward: not measured: ")
    assert constant.endswith("(no judge)")
    assert honest == "--honest: not measured: no rows"


@pytest.mark.parametrize("verdict", ["match", "differs", "blocked"])
def test_only_what_was_compared_is_reproducible(verdict: Any) -> None:
    unmet = [*unmet_thresholds(record(verdict=verdict, detail="why"), Thresholds(reproducible=True))]
    assert len(unmet) == (verdict != "match")


def test_a_reward_in_a_single_row_is_a_finding_beside_negative_ones() -> None:
    given = {"rows": 4, "failed": 0, "mean": -0.5, "highest": 1, "above_zero": 1}
    found = record(probes={"recorded_mean": 0.5, "answers": {"empty": given}})
    [finding] = map(str, problems(found))
    assert [value for value in (" -0.5 ", "1 of 4 rows", " 0.5") if value not in finding] == []
    assert [*unmet_thresholds(found, EVERYTHING)][1:] == ["--honest: not measured: "]


def test_options_that_changed_what_was_run_are_in_the_record() -> None:
    environment = {"name": "mine", "sandbox": "/here/box.yaml", "overrides": {"a.b": "x y", "c": 1}}
    judges = {"judge": HTTPEndpoint(base_url="http://h/v1"), "user": "none"}
    request = CheckRequest.model_validate(
        {"environments": [environment], "models": judges, "env_vars": ["KEY"]}
    )
    result = request.result(0.0, environment="mine", kind="config", verdict="match")
    assert result.options == (
        "--sandbox box.yaml", "--set 'a.b=x y'", "--set c=1", "--judge judge=URL", "--judge user=none", "--env-var KEY",
    )  # fmt: skip


def test_a_record_comes_back_from_its_file_and_from_the_package(tmp_path: Path) -> None:
    path = storage.record_path(tmp_path, SOUND.name)
    assert path == tmp_path / "config" / "mine-0.7.0.json"
    storage.save_record(path, SOUND)
    assert storage.load_record(path) == SOUND
    (line,) = storage.pack_records([SOUND]).splitlines()
    assert CheckResult.model_validate_json(line) == SOUND
    path.write_text("{}")
    with pytest.raises(DataError, match=re.escape(path.name)):
        storage.load_record(path)


def test_of_a_record_that_ships_only_the_rollouts_that_differ_stay() -> None:
    row = {"recording": "a:1", "recorded": 1.0, "reward": 1.0, "verdict": "match"}
    other = {**row, "recording": "a:2", "reward": 0.0, "verdict": "differs", "cause": "noise"}
    (line,) = storage.pack_records([record(rows=[row, other], settings="{}", traceback="x")]).splitlines()
    shipped = CheckResult.model_validate_json(line)
    assert [(each.recording, each.reward, each.cause) for each in shipped.rows] == [("a:2", 0.0, "noise")]
    assert (shipped.settings, shipped.traceback) == ("", "")


def test_rewards_are_counted_each_or_in_ranges() -> None:
    assert distribution([1.0, 0.0, 1.0]) == {"0": 1, "1": 2}
    assert [*distribution([n / 4 for n in range(10)])] == [f"{n / 4:g}" for n in range(10)]
    ranges = distribution([n / 20 for n in range(21)])
    assert (len(ranges), sum(ranges.values())) == (10, 21)
    assert next(iter(ranges)) == "0 to 0.1"


def test_the_shipped_records_hold_nothing_of_the_machine_that_made_them() -> None:
    records = storage.shipped_records()
    assert records
    assert len({each.name for each in records}) == len(records)
    text = storage.pack_records(records).decode()
    assert not re.search(r"(?<![\w.:/-])/(?:root|tmp|work|Users)/", text)
    assert "127.0.0.1:" not in text


def test_no_shipped_record_counts_a_judge_without_an_answer_as_a_case() -> None:
    sections = [each.failures for each in storage.shipped_records() if each.failures is not None]
    said = [case.said for section in sections for case in section.cases.values()]
    assert said
    assert not [each for each in said if "the record does not hold" in each]


def test_the_workflow_in_the_docs_is_a_command() -> None:
    page = (ROOT / "docs" / "check.md").read_text()
    workflow = page.partition("```yaml\n")[2].partition("```")[0]
    steps = yaml.safe_load(workflow)["jobs"]["check"]["steps"]
    (line,) = [step["run"] for step in steps if "gymgate check" in step.get("run", "")]
    name, *arguments = shlex.split(line)[1:]
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    context = command.make_context(name, arguments)
    assert context.params["honest"]


async def test_a_server_with_several_workers_is_stopped_in_all_of_them() -> None:
    async def status() -> dict[str, Any]:
        servers = {"own worker 1": {"pid": 1}, "own worker 2": {"pid": 2}, "own_agent": {"pid": 3}}
        return {"environments": {"mine": {"servers": servers}}}

    kinds = {"own": "resources_servers", "own_agent": "responses_api_agents"}
    context: Any = SimpleNamespace(
        stack=SimpleNamespace(status=status),
        request=SimpleNamespace(environment="mine"),
        config=SimpleNamespace(
            servers=[SimpleNamespace(name=name, kind=kind) for name, kind in kinds.items()]
        ),
    )
    assert await MeasurementContext.server_pids(context, "resources_servers") == [1, 2]


async def test_a_models_rollouts_that_are_scored_together_are_not_measured_one_by_one(tmp_path: Path) -> None:
    (path := tmp_path / "c.yaml").write_text("a: {b: {c: {num_rollouts_per_prompt: 4}}}")
    request = SimpleNamespace(policy=HTTPEndpoint(base_url="http://h/v1"), rows=1)
    config = SimpleNamespace(path=path)
    context: Any = SimpleNamespace(config=config, request=request, rows=[{}])
    context.refuse_cohorts = lambda: MeasurementContext.refuse_cohorts(context)
    with pytest.raises(Unmeasured, match="each other"):
        await model_rewards.measure(context)


def test_an_answer_without_any_reward_is_a_finding_and_its_length_is_not_blamed() -> None:
    trivial = {"missing": {"empty": NO_REWARD, "fixed sentence": NO_REWARD}}
    wrong = record(probes=trivial, failures=cases(long_answer="error"))
    [finding] = map(str, problems(wrong))
    assert "'I do not know.'" in finding
    assert [*unmet_thresholds(wrong, Thresholds(honest=True))] == []
    (line,) = unmet_thresholds(wrong, Thresholds(max_constant_reward=0.0))
    assert line.startswith("--max-constant-reward: not measured: ")
    assert line.endswith(f"({NO_REWARD})")


def test_scorings_that_never_give_a_reward_say_nothing_about_noise() -> None:
    masked = record(deterministic={"rollouts": 4, "scored": 0, "failed": 8})
    assert [*problems(masked)] == []
    (line,) = unmet_thresholds(masked, Thresholds(deterministic=True))
    assert line.startswith("--deterministic: not measured: ")


class Answered:
    """A context whose rollouts all end as one."""

    def __init__(self, rollout: Rollout) -> None:
        self.judge_problem = None
        self.request, self.judge = (
            SimpleNamespace(stack=SimpleNamespace(models=())),
            SimpleNamespace(refused=0),
        )
        self.replays = [SimpleNamespace(name="a")]
        self.has_recorded_judge = False
        self._rollout = rollout

    async def run_without_judge(self, *given: Any, **limits: Any) -> Rollout:
        return self._rollout

    run = run_without_judge

    async def run_all(self, replays: list[Any], at_once: int) -> list[Rollout]:
        return [self._rollout for _ in replays]


LIMITED = Rollout(id="r", environment="e", agent="a", status="truncated", limit="max_calls")


async def test_a_rollout_that_the_limit_of_calls_ended_is_not_blamed_on_the_answer() -> None:
    context: Any = Answered(LIMITED)
    with pytest.raises(Unmeasured, match=r"\b3\b"):
        await failure_cases._long_answer(context)
    scorer = Scorer(context)
    assert await scorer.score(context.replays[0], constant_policy("")) is None
    assert " 20 " in scorer.problem
    with pytest.raises(Unmeasured, match="no rollout"):
        await deterministic.measure(context)


class Cut:
    """A context whose agents ask for so many answers, one agent for each rollout; a judge may refuse."""

    def __init__(self, *asks: int, refusal: str | None = None, limit: Any = None) -> None:
        self.judge_problem = refusal
        self._asks = asks
        self._limit = limit
        recorded = SimpleNamespace(recording=SimpleNamespace(steps=[None] * 3))
        self.replays = [
            ReplayCase(f"{n}", {}, lambda: constant_policy("half of it"), cast("Any", recorded)) for n in asks
        ]
        self.said: list[str] = []

    async def run(self, replay: ReplayCase, policy: Any, **limits: Any) -> Rollout:
        answers = [await policy({}) for _ in range(int(replay.name))]
        self.said += [each["output"][0]["content"][0]["text"] for each in answers]
        is_cut = bool(answers) and answers[-1].get("status") == "incomplete"
        status: Any = "truncated" if is_cut else "completed"
        reward = None if self._limit else 1.0
        return Rollout(id="r", environment="e", agent="a", status=status, reward=reward, limit=self._limit)


async def test_a_rollout_that_ends_before_its_answer_is_cut_is_not_measured() -> None:
    context: Any = Cut(3, 2, 4)
    found = await failure_cases._cut_off(context)
    assert [rollout.status for rollout in found] == ["truncated", "truncated"]
    whole, half = "half of it", "half "
    assert context.said == [whole, whole, half, whole, whole, whole, whole, half, half]


@pytest.mark.parametrize(
    ("context", "reason"),
    [
        (Cut(1, 2), "cut"),
        (Cut(3, refusal="its judge has no recorded answers"), "its judge has no recorded answers"),
        (Cut(5, limit="max_calls"), "go on"),
    ],
)
async def test_what_was_not_cut_or_not_judged_is_not_measured(context: Any, reason: str) -> None:
    with pytest.raises(Unmeasured, match=reason):
        await failure_cases._cut_off(context)


@pytest.mark.parametrize(("recorded", "reason"), [(None, OWN_JUDGE), (SimpleNamespace(agent="a"), None)])
async def test_a_made_up_answer_is_no_judge_of_itself(recorded: Any, reason: str | None) -> None:
    """proof_judge asks the policy's own model whether the policy is right."""
    call = ModelCall(index=0, model_server=POLICY_AS_JUDGE, dialect="chat")

    async def run(*given: Any, **limits: Any) -> Rollout:
        return Rollout(id="r", environment="e", agent="a", status="completed", reward=1.0, calls=[call])

    stack = SimpleNamespace(register=lambda *given, **named: None, unregister=lambda name: None)
    judge: Any = SimpleNamespace(judged_by=None, refused=0, begin=lambda record: None)
    nothing: Any = None
    context = MeasurementContext(
        cast("Any", stack),
        nothing,
        nothing,
        nothing,
        cast("Any", SimpleNamespace(run=run)),
        judge,
        (),
        (),
        0.0,
    )
    await context.run_without_judge(ReplayCase("s", {}, lambda: constant_policy(""), recorded))
    assert context.judge_problem == reason
