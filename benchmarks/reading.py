"""What it takes to read a run of many rollouts, and to start a replay of many recordings.

    ./dev python -m benchmarks reading [--rollouts 1000000] [--repeats 16] [--recordings 10552] [--rows 1319]

Makes a run directory of one policy call per rollout, about 3 KB a line (1e6 rollouts: 3 GB under TMPDIR), and runs
`gymgate aggregate`, `report` and `compare` on it, each in a process of its own. `compare` compares the run with itself,
so it reads twice as many rollouts. Then recordings are written for `--rows` rows, and what `run --replay-file` does before
its start is timed: it reads them, finds the rows that they answer, and makes the index of their conversations.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.machine import describe, print_table
from benchmarks.progress import say
from gymgate.gateway.replay.index import load_index
from gymgate.gateway.replay.recording import recorded_rollouts, recorded_rows

WORDS = [f"word{number}" for number in range(3000)]


def write_run(path: Path, rows: int, repeats: int) -> None:
    """Write a run of `rows` x `repeats` rollouts with rewards of 0 and 1."""
    chance = random.Random(1)
    path.mkdir()
    keys = [f"{row * 2654435761 % (1 << 64):016x}" for row in range(rows)]
    extent = {"rollouts": rows * repeats, "rows": rows, "repeats": repeats}
    policy = {"type": "http", "base_url": "http://127.0.0.1:1/v1", "model": "m", "dialect": "chat"}
    described = {"format": 1, "settings": {"policy": policy}, "extent": extent, "created": 1}
    (path / "run.json").write_text(json.dumps(described))
    (path / "rows.txt").write_text("\n".join(keys))
    (path / "failures.jsonl").touch()
    tail = json.dumps(_record())[1:] + "\n"
    with (path / "rollouts.jsonl").open("w") as file:
        for repeat in range(repeats):
            for row, key in enumerate(keys):
                reward = float(chance.random() < 0.4)
                file.write(
                    f'{{"row_key":"{key}","repeat":{repeat},"task":{row},"line":{row + 1},"reward":{reward},{tail}'
                )


def _record() -> dict[str, Any]:
    """What all lines have in common."""
    question = {"role": "user", "content": "Which of these tests finds a known mutation? " * 20}
    text = {"type": "output_text", "text": "I compare the choices. " * 40 + "\\boxed{B}", "annotations": []}
    output = [{"type": "message", "role": "assistant", "content": [text], "id": "m1", "status": "completed"}]
    usage = {"input_tokens": 300, "output_tokens": 200, "cached_tokens": 0, "reasoning_tokens": 0}
    call = {
        "model_server": "policy_model",
        "status_code": 200,
        "usage": usage,
        "started_s": 0.1,
        "duration_s": 4.0,
    }
    return {
        **{
            "occurrence": 0,
            "seed": None,
            "source": "rows.jsonl",
            "environment": "mcqa",
            "agent": "mcqa_simple_agent",
        },
        **{"status": "completed", "limit": None, "reward_parts": {}, "metrics": {}, "error": None},
        "result": {"responses_create_params": {"input": [question]}, "response": {"output": output}},
        **{"calls": [call], "timing": {"total_s": 4.3}, "finished": 1.7e9},
    }


def measure_commands(run: Path) -> Iterator[list[str]]:
    there = str(run)
    for command in (
        ["aggregate", there],
        ["report", there, "-o", f"{there}/report.html"],
        ["compare", there, there],
    ):
        say(f"gymgate {command[0]}")
        began = time.monotonic()
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-m", "gymgate", *command],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
        )
        _, status, used = os.wait4(pid, 0)
        if status:
            raise SystemExit(
                f"benchmarks: gymgate {command[0]} ended with {os.waitstatus_to_exitcode(status)}"
            )
        figures = time.monotonic() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024
        yield [command[0], *(f"{figure:.0f}" for figure in figures)]


def measure_replay(path: Path, rows: int, recordings: int) -> list[str]:
    chance = random.Random(2)
    system = {"role": "system", "content": "Solve the problem. " * 10}
    questions = [
        {"responses_create_params": {"input": [system, {"role": "user", "content": _text(chance, 80)}]}}
        for _ in range(rows)
    ]
    with path.open("w") as file:
        for number in range(recordings):
            text = {"type": "output_text", "text": _text(chance, 200)}
            answer = {"output": [{"type": "message", "role": "assistant", "content": [text]}]}
            file.write(json.dumps({**questions[number % rows], "reward": 1.0, "response": answer}) + "\n")
    began = time.perf_counter()
    found = recorded_rows(recorded_rollouts([path]), questions)
    matched = time.perf_counter()
    load_index((str(path),), None)
    ended = time.perf_counter()
    assert len(found) == min(rows, recordings)
    return [f"{rows} x {recordings}", f"{matched - began:.2f}", f"{ended - matched:.2f}"]


def _text(chance: random.Random, words: int) -> str:
    return " ".join(chance.choices(WORDS, k=words))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=lambda text: int(float(text)), default=1_000_000)
    parser.add_argument("--repeats", type=int, default=16)
    parser.add_argument("--recordings", type=int, default=10_552)
    parser.add_argument("--rows", type=int, default=1_319)
    args = parser.parse_args(argv)
    print(describe("orjson", "pydantic"), flush=True)
    with tempfile.TemporaryDirectory(prefix="gymgate-bench-") as name:
        run = Path(name) / "run"
        say(f"writing {args.rollouts} rollouts")
        write_run(run, args.rollouts // args.repeats, args.repeats)
        print_table(["command", "s", "CPU s", "most memory, MB"], list(measure_commands(run)))
        head = ["rows x recordings", "read and matched, s", "indexed, s"]
        print_table(head, [measure_replay(Path(name) / "recordings.jsonl", args.rows, args.recordings)])


if __name__ == "__main__":
    main()
