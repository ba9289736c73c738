"""A rollout as text: its conversation, the right answer, what the environment took for the answer, and the reward."""

from __future__ import annotations

from gymgate.rollouts import outcome_of
from gymgate.rollouts.transcript import cut, text_of, transcript
from gymgate.runs.stored.attempts import task_name
from gymgate.runs.stored.record import CollectedRollout
from gymgate.runs.stored.score import expected_answer, extracted_answer

LONGEST_TEXT = 2000
"""Characters of a text that are shown."""


def conversation_text(rollout: CollectedRollout) -> str:
    """Return the lines that `gymgate run --show` prints of a rollout; texts that are too long are cut, and say so."""
    seed = "" if rollout.seed is None else f", seed {rollout.seed}"
    lines = [
        f"--- {task_name(rollout.environment, rollout.line, rollout.occurrence)}, repeat {rollout.repeat}{seed}"
    ]
    lines += (f"[{entry.role}] {cut(entry.text, LONGEST_TEXT)}" for entry in transcript(rollout.result))
    answers = {
        "expected answer": expected_answer(rollout.result),
        "extracted answer": extracted_answer(rollout.result, rollout.answer_found),
    }
    lines += (
        f"{name}: {cut(text_of(answer), LONGEST_TEXT)}"
        for name, answer in answers.items()
        if answer is not None
    )
    outcome = outcome_of(rollout)
    reward = f"none ({outcome.reason})" if outcome.reward is None else f"{outcome.reward:g}"
    error = "" if rollout.error is None else f"; {rollout.error.type}: {rollout.error.message}"
    return "\n".join([*lines, f"reward: {reward}{error}"])
