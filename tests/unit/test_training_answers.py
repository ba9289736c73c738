"""Evals and trainers warn of rows without the answer that scoring reads, once for each environment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from gymgate.core.config import RuntimeConfig
from gymgate.gym.row_sources import open_rows
from gymgate.integrations.eval_options import EvalOptions
from gymgate.integrations.eval_rows import eval_rows
from gymgate.integrations.training import sources as training

Read = Callable[[str], Any]


def _eval(path: str) -> list[str]:
    lines: list[str] = []
    assert len(list(eval_rows(EvalOptions(env="mcqa", data=path), lines.append))) == 4
    return lines


def _trainer_that_reads_by_position(path: str) -> list[str]:
    training.open_training_sources({"mcqa": path}, RuntimeConfig())
    return []


def _trainer_that_reads_a_stream(path: str) -> list[str]:
    rows = open_rows(path, environment=None)
    sources = [training.WeightedSource("mcqa", rows)]
    assert len(list(training.read_rows(sources, training.in_turn(sources)))) == 4
    return []


@pytest.mark.parametrize("read", [_eval, _trainer_that_reads_by_position, _trainer_that_reads_a_stream])
@pytest.mark.parametrize(("answers", "warned"), [("A.C.", True), ("ABCD", False), ("....", True)])
def test_rows_without_their_answer_are_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, read: Read, answers: str, warned: bool
) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [
        {
            "responses_create_params": {"input": f"{n}"},
            **({} if answer == "." else {"expected_answer": answer}),
        }
        for n, answer in enumerate(answers)
    ]
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    lines = read(str(path)) + [record.getMessage() for record in caplog.records]
    assert len(lines) == warned, lines
    for line in lines:
        assert "'expected_answer'" in line
        assert f"{path}:{1 + answers.index('.')}" in line
