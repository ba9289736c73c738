"""Two environments that score with more than Python: a model as the judge, and untrusted code run through Ray."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Any

import pytest

from gymgate.core.config import EnvironmentConfig, RuntimeConfig, StackConfig
from gymgate.gateway.replay.backend import make_response
from gymgate.gym.catalog import Catalog
from gymgate.gym.inside.forkserver import descendants
from gymgate.gym.row_sources import open_rows
from gymgate.gym.runtime import ensure_runtime
from gymgate.quality import CheckRequest, CheckResult, check_all
from gymgate.quality.recorded_models import RecordedJudge, serve_judge
from gymgate.stack import acquire
from support.stacks import LOOPBACK, listening

pytestmark = [pytest.mark.gym, pytest.mark.timeout(900)]  # the first use of a release installs it

MATH = "resources_servers/math_with_judge"
RAY = ("raylet", "gcs_server")
USE_JUDGE = (("math_with_judge.resources_servers.math_with_judge.should_use_judge", True),)


class Judge(RecordedJudge):
    """Holds every answer for right but "wrong"."""

    asked: list[str]

    async def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(str(request["input"]))
        said = "[[A!=B]]" if "wrong" in self.asked[-1] else "[[A=B]]"
        return make_response([{"role": "assistant", "content": said}], request, response_id="resp_1")


def answering(text: str) -> Any:
    async def policy(request: dict[str, Any]) -> dict[str, Any]:
        message = {"role": "assistant", "content": rf"It is \boxed{{\text{{{text}}}}}"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}

    return policy


async def test_a_model_judges_what_the_library_does_not_see() -> None:
    runtime = await asyncio.to_thread(ensure_runtime, RuntimeConfig())
    row = open_rows("example", environment=Catalog(runtime.site, runtime.version).find(MATH))[0].data
    judge = Judge(MATH)
    judge.asked = []
    async with serve_judge(judge) as endpoint:
        config = StackConfig(
            environments=(EnvironmentConfig(name=MATH, overrides=USE_JUDGE),),
            models=(("policy_model_as_judge", endpoint),),
        )
        async with acquire(config) as stack:
            right = await stack.run(row, policy=answering("the same in other words"))
            wrong = await stack.run(row, policy=answering("wrong"))
    assert (right.error, right.reward) == (None, 1.0)
    assert (wrong.error, wrong.reward) == (None, 0.0)
    assert len(right.policy_calls) == len(wrong.policy_calls) == 1
    assert len(judge.asked) >= 3  # both orders, and the first of them alone where it says no


async def test_code_is_run_and_scored_through_ray() -> None:
    """Ray, which runs whatever it is sent, listens on loopback only and asks for a token."""
    checking = asyncio.create_task(check_all([CheckRequest.model_validate({"environments": "code_gen"})]))
    seen: dict[str, set[str]] = {}
    while not checking.done():
        for pid in descendants(os.getpid()):
            with contextlib.suppress(OSError):
                name = Path(f"/proc/{pid}/comm").read_text().strip()  # noqa: ASYNC240
                seen.setdefault(name, set()).update(listening(pid))
                if name in RAY:
                    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")  # noqa: ASYNC240
                    assert b"RAY_AUTH_MODE=token" in variables
        await asyncio.wait([checking], timeout=0.5)  # a look takes a tenth of a second of processor time
    assert all(seen.get(name) for name in RAY), seen
    assert set().union(*seen.values()) <= LOOPBACK, seen
    (outcome,) = await checking
    assert isinstance(outcome, CheckResult), outcome
    assert (outcome.verdict, outcome.matched) == ("match", 5), outcome.detail
    assert {row.reward for row in outcome.rows} == {0.0, 1.0}


@pytest.mark.heavy  # the environment gives a cohort's members so many seconds to meet
async def test_rollouts_that_are_scored_against_each_other_are_run_together() -> None:
    (outcome,) = await check_all([CheckRequest.model_validate({"environments": "genrm_compare"})])
    assert isinstance(outcome, CheckResult), outcome
    assert (outcome.verdict, outcome.rewarded_by_stand_in) == ("blocked", True), outcome.evidence
    assert outcome.detail.startswith("judge: ")
