"""Where rollouts go on after a checkpoint: at the first row that was not trained on."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the callback is one of transformers'")

from gymgate.integrations.trl.async_position import FILE, Position, PositionCallback, TrainedGroups


def groups(*numbers: int, samples: int = 4) -> list[tuple[int, int]]:
    return [(number, samples) for number in numbers]


def whole(*numbers: int) -> dict[int, int]:
    return dict.fromkeys(numbers, 4)


def test_groups_that_wait_in_the_queue_are_not_behind_the_position() -> None:
    position = Position()
    position.update(groups(0, 1, 2, 3, 4), whole(0, 1))
    assert position.first == 2
    position.update([], whole(0, 1, 2))
    assert position.first == 3


def test_a_group_that_was_passed_over_is_settled() -> None:
    """1 was dropped as stale, 2 gave no sample: the trainer read past them. 4 may still be read."""
    position = Position()
    position.update([*groups(0, 1), (2, 0), *groups(3, 4)], whole(0, 3))
    assert position.first == 4


def test_a_group_of_which_only_some_samples_were_trained_on_is_run_again() -> None:
    """The rest waits in the queue, or was dropped as stale; only the next group's samples tell that."""
    position = Position()
    position.update(groups(0, 1, 2), {**whole(0), 1: 3})
    assert position.first == 1
    position.update([], {**whole(0), 1: 3, 2: 1})
    assert position.first == 2


def test_groups_end_in_any_order() -> None:
    position = Position()
    position.update(groups(2, 1), whole(2, 1))
    assert position.first == 0
    position.update(groups(0), whole(2, 1))
    assert position.first == 0
    position.update(groups(3), whole(0, 1, 2))
    assert position.first == 3


class Worker(SimpleNamespace):
    """What the callback asks of a `RolloutWorker`."""

    def newly_delivered(self) -> list[tuple[int, int]]:
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
    """TRL collates a batch ahead: group 1 is marked in the step that trains on group 0. Half of group 2 is trained on."""
    args = SimpleNamespace(output_dir=str(tmp_path))
    worker, trainer, callback = made()
    callback.on_train_begin(args, state(0), None)
    worker.new = groups(0, 1, 2, 3, samples=2)
    for step, collated in enumerate(([0, 0, 1, 1], [2], []), 1):
        trainer._trained_groups.update(collated)
        trainer.model_version = step + 1
        callback.on_step_end(args, state(step), None)
    (tmp_path / "checkpoint-3").mkdir()
    callback.on_save(args, state(3), None)

    worker, trainer, callback = made()
    callback.on_train_begin(args, state(3), None)
    assert worker.position == trainer._groups_before_resume == 2
    assert trainer.model_version == worker.version == 4
    worker.new = groups(0, 1, samples=2)  # numbered anew
    trainer._trained_groups.update([0, 0, 1, 1])
    for step in (4, 5):
        callback.on_step_end(args, state(step), None)
    (tmp_path / "checkpoint-5").mkdir()
    callback.on_save(args, state(5), None)
    assert b'"position":4' in (tmp_path / "checkpoint-5" / FILE).read_bytes()


def test_a_checkpoint_without_a_position_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    worker, trainer, callback = made()
    callback.on_train_begin(SimpleNamespace(output_dir=str(tmp_path)), state(3), None)
    assert "first row" in caplog.text
    assert worker.position == trainer.model_version == 0


def test_trls_own_collator_tells_the_samples_of_a_group() -> None:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # its import warns
    numpy = pytest.importorskip("numpy")
    module = pytest.importorskip("trl.experimental.async_grpo.async_grpo_trainer")
    groups, samples = TrainedGroups(), []
    for group in (3, 3, 5):
        ids = numpy.asarray([1, 2, 10 + group])
        mask = numpy.asarray([0, 0, 1])
        values = {
            "old_log_probs": -1.0 * mask,
            "advantage": 1.0,
            "group_id": group,
            "metrics": {"reward": 1.0},
        }
        samples.append({"input_ids": ids, "completion_mask": mask, **values})
    [rows] = module.FixedCountBatcher(samples, num_processes=1, microbatch_size=3)
    module.DataCollatorForRollout(0, groups_trained=groups).torch_call([rows])
    assert (groups, groups.samples) == ({3, 5}, {3: 2, 5: 1})
