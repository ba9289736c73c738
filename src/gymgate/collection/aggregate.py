"""From the rollouts of any number of runs and shards to figures per task, per environment and overall."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from gymgate.collection import statistics as st
from gymgate.collection.gym_rollouts import read_gym_rollouts
from gymgate.collection.plan import Identity
from gymgate.collection.record import line_error, read_values
from gymgate.collection.store import FAILURES, ROLLOUTS, RUN, differences, read_run, run_directories
from gymgate.errors import ConfigError, DataError
from gymgate.rollout.result import number

ANSWER_KEYS = (
    "extracted_answer",
    "predicted_answer",
    "predicted_value",
    "extracted_label",
    "extracted_model_code",
    "extracted_code",
    "extracted_sql",
    "extracted_verdict",
    "extracted_judgement",
    "extracted_grade",
)
"""Fields of a result that NeMo Gym's environments put the answer in; the first that is there is taken."""
OVERALL = "all"
_LONGEST_ANSWER = 64
Place = tuple[str, Identity]
"""Environment and identity."""


class Score(NamedTuple):
    """What is kept of one rollout."""

    order: tuple[int, int]
    """Seed and repeat."""
    reward: float | None
    answer: str | None
    masked: bool
    truncated: bool


@dataclass
class Task:
    """The rollouts of one row."""

    environment: str
    agent: str
    row_key: str
    occurrence: int
    task: int
    source: str
    line: int
    scores: list[Score] = field(default_factory=list)
    failed: int = 0
    calls: int = 0
    output_tokens: int = 0
    seconds: float = 0.0

    def measured(self) -> list[Score]:
        """Those with a reward that is a measurement, in order."""
        kept = [score for score in self.scores if score.reward is not None and not score.masked]
        return sorted(kept, key=lambda score: score.order)

    def rewards(self) -> list[float]:
        return [score.reward for score in self.measured() if score.reward is not None]


@dataclass
class Collected:
    """Everything that was read."""

    tasks: dict[tuple[str, str, int], Task] = field(default_factory=dict)
    answer_keys: dict[str, str] = field(default_factory=dict)
    """By environment, where it names an answer."""
    notes: list[str] = field(default_factory=list)
    """What a reader of the figures should know: missing rollouts, rewards that are no numbers."""
    not_numbers: int = 0

    def ordered(self) -> list[Task]:
        return sorted(
            self.tasks.values(), key=lambda task: (task.environment, task.task, task.row_key, task.occurrence)
        )


def read_runs(
    paths: Iterable[Path], *, answer_key: str | None = None, first_of_overlap: bool = False
) -> Collected:
    """The rollouts under directories of runs, shards included, and in files that NeMo Gym's collector wrote.

    Raises `DataError` for a directory without a run and `ConfigError` for runs of different policies, and for a
    rollout that is in two of them (unless the first is to be taken).
    """
    directories = [found for path in paths for found in _directories(path)]
    collected = Collected()
    _refuse_mixture(directories)
    home: dict[Place, int] = {}
    overlaps: Counter[int] = Counter()
    example: dict[int, Place] = {}
    for index, directory in enumerate(directories):
        for place, value in _rollouts(directory):
            if place in home:
                overlaps[index] += 1
                example.setdefault(index, place)
            else:
                home[place] = index
                _add(collected, value, answer_key)
    for directory in filter(Path.is_dir, directories):
        _add_failures(collected, directory, home)
    _settle_overlaps(collected, directories, overlaps, example, home, first_of_overlap)
    _note_missing(collected, directories, home)
    if collected.not_numbers:
        collected.notes.append(
            f"{collected.not_numbers} rewards are not finite numbers and are counted as unscored"
        )
    return collected


def task_rows(collected: Collected) -> Iterator[dict[str, Any]]:
    """A row per task: counts, mean and deviation of its rewards, pass@k, maj@k."""
    for task in collected.ordered():
        rewards = task.rewards()
        answers = [score.answer for score in task.measured()]
        row: dict[str, Any] = {
            "environment": task.environment,
            "agent": task.agent,
            "row_key": task.row_key,
            "occurrence": task.occurrence,
            "source": task.source,
            "line": task.line,
            **_counts([task]),
            "mean_reward": st.mean(rewards),
            "std_reward": st.deviation(rewards),
            "min_reward": min(rewards, default=None),
            "max_reward": max(rewards, default=None),
        }
        for k in st.wanted_ks(len(rewards)):
            row[f"pass@{k}"] = st.pass_at_k(rewards, k)
            if task.environment in collected.answer_keys:
                row[f"maj@{k}"] = st.majority_at_k(rewards, answers, k)
        finished = len(task.scores) or 1
        row["mean_calls"] = task.calls / finished
        row["mean_output_tokens"] = task.output_tokens / finished
        row["mean_seconds"] = task.seconds / finished
        row["rewards"] = rewards
        yield row


def summary_rows(collected: Collected) -> list[dict[str, Any]]:
    """A row per environment and, if there are several, one over all tasks."""
    tasks = collected.ordered()
    names = sorted({task.environment for task in tasks})
    rows = [_summary(name, [task for task in tasks if task.environment == name], collected) for name in names]
    return [*rows, _summary(OVERALL, tasks, collected)] if len(names) > 1 else rows


def keep(collected: Collected, low: float, high: float) -> Iterator[Task]:
    """The tasks whose mean reward lies between two bounds, those included; for curricula."""
    for task in collected.ordered():
        mean = st.mean(task.rewards())
        if mean is not None and low <= mean <= high:
            yield task


def parse_bounds(text: str) -> tuple[float, float]:
    """`LOW..HIGH`, either may be left out. Raises `ConfigError`."""
    low, dots, high = text.partition("..")
    try:
        bounds = float(low or "-inf"), float(high or "inf")
    except ValueError:
        dots = ""
    if not dots or not bounds[0] <= bounds[1]:
        raise ConfigError(f"--keep {text!r}: write LOW..HIGH, such as 0.1..0.9")
    return bounds


def _summary(name: str, tasks: Sequence[Task], collected: Collected) -> dict[str, Any]:
    rewards = [task.rewards() for task in tasks]
    scored = [values for values in rewards if values]
    every = [reward for values in scored for reward in values]
    means = [st.mean(values) or 0.0 for values in scored]
    runs = st.run_means(scored)
    mean, error = st.mean(means), st.standard_error(means)
    low, high = _interval(mean, error, (0.0, 1.0) if st.is_binary(every) else (-math.inf, math.inf))
    row: dict[str, Any] = {
        "environment": name,
        "tasks": len(tasks),
        **_counts(tasks),
        "mean_reward": st.mean(every),
        "std_reward": st.deviation(every),
        "pass@1": mean,
        "pass@1_se": error,
        "pass@1_ci95_low": low,
        "pass@1_ci95_high": high,
        "pass@1_std_runs": st.deviation(runs),
        "pass@1_se_runs": st.standard_error(runs),
        "task_std": st.mean([spread for values in scored if (spread := st.deviation(values)) is not None]),
    }
    for k in st.wanted_ks(max(map(len, scored), default=0)):
        if k > 1:
            values = [value for scores in scored if (value := st.pass_at_k(scores, k)) is not None]
            row[f"pass@{k}"], row[f"pass@{k}_se"] = st.mean(values), st.standard_error(values)
        votes = _votes(tasks, collected, k)
        if votes:
            row[f"maj@{k}"], row[f"maj@{k}_se"] = st.mean(votes), st.standard_error(votes)
    return row


def _interval(
    mean: float | None, error: float | None, bounds: tuple[float, float]
) -> tuple[float | None, float | None]:
    """The 95 % interval, within what is possible."""
    if mean is None or error is None:
        return None, None
    return max(bounds[0], mean - st.Z95 * error), min(bounds[1], mean + st.Z95 * error)


def _votes(tasks: Sequence[Task], collected: Collected, k: int) -> list[float]:
    return [
        st.majority_at_k(task.rewards(), [score.answer for score in task.measured()], k)
        for task in tasks
        if task.environment in collected.answer_keys and task.measured()
    ]


def _counts(tasks: Sequence[Task]) -> dict[str, int]:
    scores = [score for task in tasks for score in task.scores]
    masked = sum(score.masked for score in scores)
    return {
        "rollouts": len(scores),
        "scored": sum(score.reward is not None and not score.masked for score in scores),
        "masked": masked,
        "unscored": sum(score.reward is None and not score.masked for score in scores),
        "truncated": sum(score.truncated for score in scores),
        "failed": sum(task.failed for task in tasks),
    }


def _directories(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    found = run_directories(path)
    if not found:
        raise DataError(f"{path} holds no run: neither it nor a shard in it has a {RUN}", path=str(path))
    return found


def _rollouts(directory: Path) -> Iterator[tuple[Place, dict[str, Any]]]:
    path = directory / ROLLOUTS
    if directory.is_file():
        for value in read_gym_rollouts(directory):
            yield _place(value), value
        return
    for line_number, value in read_values(path):
        try:
            yield _place(value), value
        except (KeyError, TypeError, ValueError) as error:
            raise line_error(path, line_number, f"not a rollout of a run: {error!r}") from error


def _place(value: Mapping[str, Any]) -> Place:
    seed = value.get("seed")
    identity = Identity(
        str(value["row_key"]),
        int(value.get("occurrence", 0)),
        int(value.get("repeat", 0)),
        None if seed is None else int(seed),
    )
    return str(value.get("environment", "")), identity


def _add(collected: Collected, value: Mapping[str, Any], answer_key: str | None) -> None:
    task = _task(collected, value)
    result = value.get("result") or {}
    environment = task.environment
    if environment not in collected.answer_keys:
        keys = (answer_key,) if answer_key else ANSWER_KEYS
        if (found := next((key for key in keys if key in result), None)) is not None:
            collected.answer_keys[environment] = found
    reward = number(value.get("reward"))
    if reward is None and value.get("reward") is not None:
        collected.not_numbers += 1
    task.scores.append(
        Score(
            (value.get("seed") or 0, int(value.get("repeat", 0))),
            reward,
            _answer(result.get(collected.answer_keys.get(environment, ""))),
            value.get("status") == "masked",
            value.get("status") == "truncated",
        )
    )
    calls = [call for call in value.get("calls") or () if call.get("model_server") == "policy_model"]
    task.calls += len(calls)
    task.output_tokens += sum((call.get("usage") or {}).get("output_tokens") or 0 for call in calls)
    task.seconds += (value.get("timing") or {}).get("total_s") or 0.0


def _task(collected: Collected, value: Mapping[str, Any]) -> Task:
    name = (str(value.get("environment", "")), str(value["row_key"]), int(value.get("occurrence", 0)))
    if name not in collected.tasks:
        collected.tasks[name] = Task(
            environment=name[0],
            agent=str(value.get("agent", "")),
            row_key=name[1],
            occurrence=name[2],
            task=int(value.get("task", 0)),
            source=str(value.get("source", "")),
            line=int(value.get("line", 0)),
        )
    return collected.tasks[name]


def _answer(value: Any) -> str | None:
    """An answer in little room; equal answers stay equal."""
    if value is None:
        return None
    text = value if isinstance(value, str) else orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()
    return text if len(text) <= _LONGEST_ANSWER else hashlib.sha256(text.encode()).hexdigest()


def _add_failures(collected: Collected, directory: Path, home: Container[Place]) -> None:
    """Rollouts that were given up and have not finished since."""
    given_up: set[Place] = set()
    for _, value in read_values(directory / FAILURES):
        place = _place(value)
        if value.get("final") and place not in home and place not in given_up:
            given_up.add(place)
            _task(collected, value).failed += 1


def _refuse_mixture(directories: Sequence[Path]) -> None:
    """Rollouts of two policies have no common mean."""
    first: tuple[Path, Mapping[str, Any]] | None = None
    for directory in filter(Path.is_dir, directories):
        policy = read_run(directory)["settings"].get("policy")
        compared = {"policy": policy if isinstance(policy, Mapping) else {"type": policy}}
        if first is None:
            first = directory, compared
        elif changed := differences(first[1], compared):
            raise ConfigError(f"{first[0]} and {directory} are of different policies ({'; '.join(changed)})")


def _settle_overlaps(
    collected: Collected,
    directories: Sequence[Path],
    overlaps: Counter[int],
    example: Mapping[int, Place],
    home: Mapping[Place, int],
    first_of_overlap: bool,
) -> None:
    named = [
        f"{count} rollouts of {directories[place]} are in {directories[home[example[place]]]} too ({example[place][1]})"
        for place, count in sorted(overlaps.items())
    ]
    if named and not first_of_overlap:
        raise ConfigError(f"{'; '.join(named)}; leave one out, or take each from the first: --overlap first")
    collected.notes += [f"{note}; the first is taken" for note in named]


def _extent(directory: Path) -> Mapping[str, Any]:
    return (read_run(directory).get("extent") or {}) if directory.is_dir() else {}


def _note_missing(collected: Collected, directories: Sequence[Path], home: Mapping[Place, int]) -> None:
    """What the runs set out to do and have not."""
    have = Counter(home.values())
    for place, directory in enumerate(directories):
        extent = _extent(directory)
        planned = extent.get("rollouts")
        if isinstance(planned, int) and have[place] < planned:
            collected.notes.append(f"{directory}: {planned - have[place]} of {planned} rollouts are missing")
    by_parent: dict[tuple[Path, int], set[int]] = {}
    for directory in directories:
        part, count = _extent(directory).get("shard") or (1, 1)
        if count > 1:
            by_parent.setdefault((directory.parent, count), set()).add(part)
    for (parent, count), parts in by_parent.items():
        if missing := sorted({*range(1, count + 1)} - parts):
            collected.notes.append(f"{parent}: shards {', '.join(map(str, missing))} of {count} are missing")
