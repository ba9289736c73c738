"""Why a rollout gives its SDK no score."""

from __future__ import annotations

from gymgate.rollouts import Rollout, outcome_of


class RolloutFailed(RuntimeError):
    """NeMo Gym gave the rollout no score; the message is one line with the kind of the error."""


def failure_of(rollout: Rollout) -> str | None:
    """Return one line on why the rollout failed; `None` if it did not."""
    if outcome_of(rollout).reason != "failed":
        return None
    error = rollout.error
    why = "gave no result" if error is None else f"{'judge' if error.judge else error.kind}: {error.message}"
    return " ".join(f"[{rollout.environment}] {why}".split())
