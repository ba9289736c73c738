"""The quality record on real servers: a sound environment, and one that is wrong in each respect, which is noticed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import web

from gymgate.gateway.serving_process import FILES_PER_ROLLOUT
from gymgate.quality import CheckResult
from gymgate.quality.record.storage import load_record
from support.checks import PARIS, message, recorded
from support.faulty import with_recordings
from support.upstream import Seen, answering, chat_answer, scripted_chat, upstream_in_thread

pytestmark = [pytest.mark.gym, pytest.mark.timeout(600)]  # the first use of a release installs it

ROME = recorded("of Italy?", "Milan", 0.0)
CALL = {"type": "function_call", "name": "look_up", "arguments": "{}", "call_id": "c", "id": "f"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": '"Paris"'}


def with_tool() -> str:
    """The recording of Paris, with a call of the server's tool before the answer."""
    record = json.loads(PARIS)
    record["response"]["output"] = [CALL, OUTPUT, *message("Paris")]
    return json.dumps(record)


def measured(config: Path, fault: str, *options: str) -> tuple[subprocess.CompletedProcess[str], CheckResult]:
    """Check with every threshold; the command, and the record that it wrote."""
    store = config.parents[3] / "records"
    command = [
        sys.executable, "-m", "gymgate", "check", str(config), "--record", str(store), "--set",
        f"faulty.resources_servers.faulty.fault={fault}", "--max-constant-reward", "0.05", "--deterministic", "--honest",
    ]  # fmt: skip
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=550, check=False)
    record = load_record(store / "config" / "faulty-0.7.0.json")
    assert record is not None, done.stderr
    return done, record


def missed(done: subprocess.CompletedProcess[str]) -> list[str]:
    lines = [line.partition("threshold not met: ")[2] for line in done.stderr.splitlines()]
    assert done.returncode == int(any(lines)), done.stderr
    return [line for line in lines if line]


def test_a_sound_environment_meets_every_threshold(tmp_path: Path) -> None:
    config = with_recordings(tmp_path, PARIS, ROME, with_tool())

    def answer(asked: str) -> str:
        return "Paris" if "France" in asked else "Milan"

    with scripted_chat(answer) as url:
        done, record = measured(config, "none", "--reproducible", "-b", url, "-m", "scripted")
    assert missed(done) == []
    assert "scripted: 0.500 ± 0.500 over 2 rollouts of 2 rows" in done.stdout
    assert (record.verdict, record.matched) == ("match", 3)
    assert record.missing == {}
    again, trivial, cost, shape = record.deterministic, record.probes, record.cost, record.shape
    assert again
    assert trivial
    assert cost
    assert shape
    assert record.failures
    assert record.policy
    assert (again.rollouts, again.failed, again.at_once, again.changed) == (3, 0, 8, ())
    assert again.scored >= 3 + 3 + 8
    assert trivial.recorded_mean == pytest.approx(2 / 3)
    assert {name: each.mean for name, each in trivial.answers.items()} == {
        "empty": 0.0, "fixed sentence": 0.0, "the prompt": 0.0, "another row's best": 0.0,
    }  # fmt: skip
    cases = record.failures.cases
    assert cases["tool_timeout"].outcomes == {"error": 1}
    assert cases["cut_off"].outcomes == {"truncated": 3}
    assert cases["long_answer"].outcomes == {"number": 3}
    assert [*record.failures.missing] == ["judge_down"]
    for figure in (
        cost.ready_s, cost.verification_ms, cost.verification_p99_ms, cost.tool_call_ms, cost.rest_mb, cost.busy_mb,
        cost.rollouts_per_core_s, cost.most_rollouts_s, cost.rollout_files,
    ):  # fmt: skip
        assert figure is not None
        assert figure > 0
    assert cost.rollout_files <= FILES_PER_ROLLOUT
    assert cost.rollout_mb is not None
    assert cost.limited_by
    assert cost.most_rollouts_s <= cost.rollouts_per_core_s * (os.cpu_count() or 1)
    assert (cost.verifications, cost.tool_calls, cost.missing) == (30, 10, {})
    assert (shape.rows, shape.recordings, shape.most_turns) == (2, 3, 2)
    assert shape.rewards == {"0": 1, "1": 2}
    assert {*shape.missing} == {"input_tokens", "output_tokens"}
    assert (record.policy.model, record.policy.rows, record.policy.pass_at_1) == ("scripted", 2, 0.5)


def test_an_environment_that_is_wrong_in_every_respect_is_caught(tmp_path: Path) -> None:
    """It rewards the empty answer, gives random rewards, and crashes on a long answer."""
    done, record = measured(with_recordings(tmp_path, PARIS, ROME), "empty random long")
    found = missed(done)
    for option, what in (
        ("--max-constant-reward", " 2 of 2 rows"),
        ("--deterministic", "example_rollouts:1: 0."),
        ("--honest", "no reward"),
    ):
        assert any(line.startswith(option) and what in line for line in found), found
    assert record.deterministic
    assert len(record.deterministic.changed) == 2


def test_the_model_gets_the_key_and_the_headers_of_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They cross to the process of the check, and neither is shown."""
    seen: list[Seen] = []

    async def script(call: Seen) -> web.StreamResponse:
        seen.append(call)
        return await answering(
            {"/v1/models": {"data": [{"id": "m"}]}, "/v1/chat/completions": chat_answer("Paris")}
        )(call)

    monkeypatch.setenv("CHECK_KEY", "key-of-mine")
    with upstream_in_thread(script) as model:
        done, _ = measured(
            with_recordings(tmp_path, PARIS),
            "none",
            *("--section", "policy", "-b", model.url, "-m", "m", "--api-key-var", "CHECK_KEY"),
            *("--header", "X-Tenant=header-of-mine"),
        )
    calls = [call.headers for call in seen if call.path == "/v1/chat/completions"]
    assert calls
    assert {call.get("X-Tenant") for call in calls} == {"header-of-mine"}
    assert {call.get("Authorization") for call in calls} == {"Bearer key-of-mine"}
    assert "of-mine" not in done.stdout + done.stderr
