"""Our figures beside those of NeMo Gym's own profiler, run on the same rollouts, which it reads as we export them."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path
from typing import Any

import orjson
import pytest

from gymgate.gym.runtime import clean_env, ensure_runtime
from gymgate.rollouts.row import row_key
from gymgate.runs.counted.aggregate import read_runs
from gymgate.runs.counted.metrics import summary_rows, task_rows
from gymgate.runs.stored.gym_rollouts import export_rollouts
from support.stacks import runtime

pytestmark = [pytest.mark.gym, pytest.mark.warm]

SCRIPT = """
import json, sys
from nemo_gym.reward_profile import RewardProfiler, compute_pass_majority_metrics, select_measured
results = [json.loads(line) for line in open(sys.argv[1])]
rows = [json.loads(line) for line in open(sys.argv[2])]
rows, results, _, _ = select_measured(rows, results)
tasks = {}
for result in sorted(results, key=lambda r: (r["_ng_task_index"], r["_ng_rollout_index"])):
    tasks.setdefault(result["_ng_task_index"], []).append(result)
metrics, those_of_longest = [
    compute_pass_majority_metrics([task for task in tasks.values() if len(task) >= least], answer_key="extracted_answer")[0]
    for least in (1, int(sys.argv[3]))
]
groups, agents, *_ = RewardProfiler().profile_from_data(rows, results)
per_task = [[g["mean/reward"], g["std/reward"]] for g in groups]
agent = [agents[0]["mean/reward"], agents[0]["std/reward"]]
print("FIGURES", json.dumps({"metrics": metrics, "longest": those_of_longest, "tasks": per_task, "agent": agent}))
"""


def write_run(directory: Path, rewards: list[float], *, masked: float, missing: float) -> int:
    """A run of 12 rows, 3 seeds and 2 repeats, in any order, some of which are missing; how many are there."""
    dice = random.Random(len(rewards))
    rows = [{"responses_create_params": {"input": f"{number}"}, "number": number} for number in range(12)]
    source = directory / "rows.jsonl"
    source.write_bytes(b"\n" + b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows))
    lines = []
    for number, row in enumerate(rows):
        for seed in range(3):
            for repeat in range(2):
                reward = dice.choice(rewards)
                if dice.random() < missing:
                    continue
                value: dict[str, Any] = {
                    "row_key": row_key(row),
                    "occurrence": 0,
                    "repeat": repeat,
                    "seed": seed,
                }
                value |= {
                    "task": number,
                    "source": str(source),
                    "line": number + 2,
                    "environment": "e",
                    "agent": "a",
                }
                status = "masked" if dice.random() < masked else "completed"
                answer = dice.choice(["x", "y", None]) if reward < 1 else "right"
                result = {**row, "reward": reward, "extracted_answer": answer, "response": {"output": []}}
                lines.append({**value, "status": status, "reward": reward, "result": result})
    dice.shuffle(lines)
    described = {"format": 1, "settings": {"policy": {"type": "http"}}, "extent": {}}
    (directory / "run.json").write_bytes(orjson.dumps(described))
    (directory / "rollouts.jsonl").write_bytes(
        b"".join(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE) for line in lines)
    )
    return len(lines)


@pytest.mark.parametrize(
    ("rewards", "masked", "missing"),
    [
        ([0.0, 1.0], 0.0, 0.0),
        ([0.0, 1.0], 0.1, 0.0),
        ([0.0, 0.25, 1.0], 0.0, 0.0),
        ([0.0, 1.0], 0.0, 0.2),
        ([0.0, 0.25, 1.0], 0.1, 0.2),
    ],
    ids=str,
)
def test_figures_are_those_of_nemo_gym(
    tmp_path: Path, rewards: list[float], masked: float, missing: float
) -> None:
    """Where tasks have different numbers of rollouts too: of all tasks up to the fewest, of the longest ones for each k."""
    count = write_run(tmp_path, rewards, masked=masked, missing=missing)
    assert export_rollouts(read_runs([tmp_path]), tmp_path / "gym.jsonl") == count
    collected = read_runs([tmp_path]).tasks
    longest = max(len(task.rewards()) for task in collected.ordered())
    python = runtime().interpreter or str(ensure_runtime(runtime()).python)
    files = [str(tmp_path / "gym.jsonl"), str(tmp_path / "gym_materialized_inputs.jsonl")]
    done = subprocess.run(
        [python, "-c", SCRIPT, *files, str(longest)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**clean_env(), "WANDB_MODE": "disabled"},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    [printed] = [text for text in done.stdout.splitlines() if text.startswith("FIGURES")]
    theirs = orjson.loads(printed.removeprefix("FIGURES"))
    [ours] = summary_rows(collected)
    assert ours["mean_reward"] == pytest.approx(theirs["agent"][0])
    assert ours["std_reward"] == pytest.approx(theirs["agent"][1])
    assert ours["scored_tasks"] == 12
    assert (ours["max_k"] < longest) == bool(masked or missing)
    compare(ours, theirs["metrics"], binary=len(rewards) == 2, longest=longest)
    [of_longest] = summary_rows(collected, (1, 3, longest))
    assert (of_longest["scored_tasks"] < 12) == bool(masked or missing)
    assert of_longest["max_k"] == longest
    compare(of_longest, theirs["longest"], binary=len(rewards) == 2, longest=longest)
    rows = sorted(task_rows(collected), key=lambda row: row["line"])
    order = {row["row_key"]: number for number, row in enumerate(rows)}
    by_export = {value["_ng_task_index"]: row_key(_own(value)) for value in _read(files[1])}
    for index, (mean, spread) in enumerate(theirs["tasks"]):
        row = rows[order[by_export[index]]]
        assert (row["mean_reward"], row["std_reward"]) == (pytest.approx(mean), pytest.approx(spread))


def compare(ours: dict[str, Any], theirs: dict[str, Any], *, binary: bool, longest: int) -> None:
    ks = [int(name[5:]) for name in ours if name.startswith("pass@") and name[5:].isdecimal()]
    assert max(ks) == ours["max_k"] > 1
    for k in ks:
        if binary:  # of graded scores, Gym takes the best of the first k
            assert 100 * ours[f"pass@{k}"] == pytest.approx(theirs[f"pass@{k}/accuracy"]), k
        assert 100 * ours[f"maj@{k}"] == pytest.approx(theirs[f"majority@{k}/accuracy"]), k
    assert 100 * ours["pass@1"] == pytest.approx(theirs[f"pass@1[avg-of-{longest}]/accuracy"])
    runs = f"pass@1[avg-of-{ours['max_k']}]/accuracy"
    assert 100 * ours["pass@1_std_runs"] == pytest.approx(theirs[f"{runs}/std_dev_across_runs"])
    assert 100 * ours["pass@1_se_runs"] == pytest.approx(theirs[f"{runs}/std_err_across_runs"])


def _read(path: str) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in Path(path).read_bytes().splitlines()]


def _own(value: dict[str, Any]) -> dict[str, Any]:
    return {name: item for name, item in value.items() if name != "agent_ref"}
