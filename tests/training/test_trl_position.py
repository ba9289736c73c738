"""Where rollouts go on after a checkpoint: at the first row that was not trained on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the callback is one of transformers'")

from gymgate.integrations.trl.async_position import FILE, Position, PositionCallback


def test_groups_that_wait_in_the_queue_are_not_behind_the_position() -> None:
    position = Position()
    position.update([0, 1, 2, 3, 4], {0, 1})
    assert position.first == 2
    position.update([], {0, 1, 2})
    assert position.first == 3


def test_a_group_that_was_passed_over_is_settled() -> None:
    """1 was dropped as stale, 2 gave no sample: the trainer read past them. 4 may still be read."""
    position = Position()
    position.update([0, 1, 2, 3, 4], {0, 3})
    assert position.first == 4


def test_groups_end_in_any_order() -> None:
    position = Position()
    position.update([2, 1], {2, 1})
    assert position.first == 0
    position.update([0], {2, 1})
    assert position.first == 0
    position.update([3], {0, 1, 2})
    assert position.first == 3


class Worker(SimpleNamespace):
    """What the callback asks of a `RolloutWorker`."""

    def newly_delivered(self) -> list[int]:
        new, self.new = self.new, []
        return new

    def update_model_version(self, version: int) -> None:
        self.version = version


def made(position: int = 0) -> tuple[Worker, Any, PositionCallback]:
    worker = Worker(position=position, new=[], version=None)
    trainer = SimpleNamespace(_trained_groups=set(), _groups_before_resume=0, model_version=0)
    return worker, trainer, PositionCallback(worker, trainer)  # type: ignore[arg-type]


def state(step: int) -> Any:
    return SimpleNamespace(global_step=step, is_world_process_zero=True)


def test_a_training_that_resumes_goes_on_where_it_was(tmp_path: Path) -> None:
    """TRL collates a batch ahead: group 1 is marked in the step that trains on group 0."""
    args = SimpleNamespace(output_dir=str(tmp_path))
    worker, trainer, callback = made()
    callback.on_train_begin(args, state(0), None)
    worker.new = [0, 1, 2, 3]
    for step, marked in enumerate(({0, 1}, {0, 1, 2}), 1):
        trainer._trained_groups, trainer.model_version = marked, step + 1
        callback.on_step_end(args, state(step), None)
    (tmp_path / "checkpoint-2").mkdir()
    callback.on_save(args, state(2), None)

    worker, trainer, callback = made()
    callback.on_train_begin(args, state(2), None)
    assert worker.position == trainer._groups_before_resume == 2
    assert trainer.model_version == worker.version == 3
    worker.new, trainer._trained_groups = [0, 1], {0, 1}  # numbered anew
    for step in (3, 4):
        callback.on_step_end(args, state(step), None)
    (tmp_path / "checkpoint-4").mkdir()
    callback.on_save(args, state(4), None)
    assert b'"position":4' in (tmp_path / "checkpoint-4" / FILE).read_bytes()


def test_a_checkpoint_without_a_position_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    worker, trainer, callback = made()
    callback.on_train_begin(SimpleNamespace(output_dir=str(tmp_path)), state(3), None)
    assert "rollouts start with the first row again" in caplog.text
    assert worker.position == trainer.model_version == 0
