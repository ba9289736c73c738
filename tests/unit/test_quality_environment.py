"""What a check concludes from a start that fails, and from recordings that are replayed: logs as servers wrote them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gymgate.core.errors import (
    ConfigError,
    EnvironmentServerError,
    GymgateError,
    NeedMissingError,
    RolloutTimeoutError,
    StackStartError,
)
from support.checks import PARIS, message, recorded
from support.faulty import RECORDED_CONFIG, with_recordings
from support.scripted_stack import ScriptedStack, check_on, wanted
from support.upstream import answering, responses_answer, upstream

TRACEBACK = """Traceback (most recent call last):
  File "/g/stack/forkserver/server.py", line 127, in fork
    CHILDREN[order["op"]](order)
    ~~~~~~~~~~~~~~~~~~~~~^^^^^^^
  File "/x/resources_servers/faulty/app.py", line 167, in <module>
    Faulty.run_webserver()
    ~~~~~~~~~~~~~~~~~~~~^^
  File "/v/lib/python3.13/site-packages/nemo_gym/server_utils.py", line 1355, in run_webserver
    app = server.setup_webserver()
  File "/x/resources_servers/faulty/app.py", line 104, in setup_webserver
    """
ENDS = {
    "bug": """raise ZeroDivisionError("of our own")
ZeroDivisionError: of our own""",
    "gpu": """torch.cuda.init()
RuntimeError: Found no NVIDIA driver on your system.""",
    "variable": """self.__dict__["key"] = os.environ["SEARCH_API_KEY"]
                           ~~~~~~~~~~^^^^^^^^^^^^^^^^^^
  File "<frozen os>", line 716, in __getitem__
KeyError: 'SEARCH_API_KEY'""",
    "binary": """subprocess.run(["lean4-that-is-not-here"])
FileNotFoundError: [Errno 2] No such file or directory: 'lean4-that-is-not-here'""",
    "host": """urllib.request.urlopen("https://data.invalid/file.zip", timeout=5)
    raise URLError(err)
urllib.error.URLError: <urlopen error [Errno -2] Name or service not known>""",
}
"""Of what servers of nemo-gym 0.7.0 logged before they ended."""


def not_started(fault: str) -> StackStartError:
    if fault == "hang":
        return StackStartError("environment '/x/faulty.yaml' was not up after 6 s", timed_out=True)
    log = TRACEBACK + ENDS[fault]
    message = (
        f"server 'faulty' of '/x/faulty.yaml' died while starting (exit status 1): {log.splitlines()[-1]}"
    )
    return StackStartError(message, server="faulty", log_tail=log, exit_status=1)


@pytest.mark.parametrize(
    ("fault", "verdict", "detail", "evidence"),
    [
        ("hang", "blocked", "start: ", "not up after 6 s"),
        ("bug", "failed", "StackStartError: server 'faulty'", "ZeroDivisionError: of our own"),
        ("host", "blocked", "download: ", "<urlopen error [Errno -2]"),
        ("gpu", "blocked", "gpu: Found", "RuntimeError"),
        ("variable", "blocked", "key: SEARCH_API_KEY", "KeyError"),
        ("binary", "blocked", "binary: lean4-that-is-not-here", "'lean4-that"),
    ],
)
async def test_why_a_stack_did_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, verdict: str, detail: str, evidence: str
) -> None:
    config = with_recordings(tmp_path, PARIS)
    check, _ = await check_on(monkeypatch, config, failures=(not_started(fault),), start_timeout_s=6.0)
    assert (check.kind, check.environment) == ("config", "faulty")
    assert (check.verdict, check.detail[: len(detail)]) == (verdict, detail)
    assert evidence in check.evidence
    assert not check.rewarded
    assert ("ZeroDivisionError" in check.traceback) == (fault == "bug")


@pytest.mark.parametrize(
    ("error", "verdict", "detail"),
    [
        (NeedMissingError("none", need="sandbox", kind="docker"), "blocked", "docker: sandbox"),
        (ConfigError("override 'x': there is no 'x'"), "incomplete", "config: override 'x'"),
        (
            StackStartError("server 'faulty' ended", server="faulty", log_tail="", exit_status=0),
            "incomplete",
            "'faulty'",
        ),
    ],
)
async def test_a_start_that_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: GymgateError, verdict: str, detail: str
) -> None:
    check, _ = await check_on(monkeypatch, with_recordings(tmp_path, PARIS), failures=(error,))
    assert check.verdict == verdict
    assert detail in check.detail


async def test_rewards_are_compared_and_a_broken_line_costs_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (PARIS, "<PLACEHOLDER>", recorded("of Italy?", "Rome", 0.0))
    check, _ = await check_on(monkeypatch, with_recordings(tmp_path, *lines))
    assert (check.verdict, check.matched, check.compared, check.rewarded) == ("differs", 1, 2, True)
    assert all(row.packaged for row in check.rows)
    assert check.evidence == "example_rollouts:3 recorded 0.0, got 1.0"
    assert [broken.split(" ")[0] for broken in check.broken] == ["example_rollouts.jsonl:2"]


async def test_a_reward_that_comes_out_later_is_reproduced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some scoring depends on time."""
    scored: list[str] = []

    async def once_wrong(stack: ScriptedStack, row: dict[str, Any], text: str) -> float:
        scored.append(text)
        return float(len(scored) > 1)

    check, _ = await check_on(monkeypatch, with_recordings(tmp_path, PARIS), once_wrong)
    assert (check.verdict, len(scored)) == ("match", 2)
    assert "0" in check.rows[0].cause


async def test_a_record_without_a_reward_has_nothing_to_compare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unscored: dict[str, Any] = json.loads(PARIS)
    del unscored["reward"]
    check, _ = await check_on(monkeypatch, with_recordings(tmp_path, json.dumps(unscored)))
    assert (check.verdict, check.rows[0].verdict, check.rows[0].reward) == ("incomplete", "incomplete", 1.0)


async def by_judge(stack: ScriptedStack, row: dict[str, Any], text: str) -> float:
    return float(row["wanted"] in await stack.ask_judge(f"Is this right: {text}"))


async def by_careless_judge(stack: ScriptedStack, row: dict[str, Any], text: str) -> float:
    try:
        return await by_judge(stack, row, text)
    except aiohttp.ClientError:
        return 0.0


async def test_a_recorded_judge_judges_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged = {"judge_evaluations": [{"response": {"output": message("It is Paris.")}}]}
    config = with_recordings(tmp_path, recorded("capital of France?", "Lyon", 1.0, **judged))
    check, _ = await check_on(monkeypatch, config, by_judge)
    assert (check.verdict, check.rows[0].judged_by) == ("match", "recorded")


async def test_a_judge_that_was_not_recorded_is_a_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the environment scores its failure."""
    check, _ = await check_on(monkeypatch, with_recordings(tmp_path, PARIS), by_careless_judge)
    assert (check.verdict, check.rewarded, check.rows[0].reward) == ("blocked", False, 0.0)
    assert check.detail.startswith("judge: ")


async def test_an_endpoint_of_the_users_judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record does not hold what its judge said; with an endpoint it is scored."""
    config = with_recordings(tmp_path, recorded("capital of France?", "Lyon", 1.0))
    async with upstream(answering({"/v1/responses": responses_answer("No, it is Paris.")})) as judge:
        models = (("a_judge", judge.endpoint()),)
        check, _ = await check_on(monkeypatch, config, by_judge, models=models)
    assert [seen.body["input"][0]["content"] for seen in judge.seen] == ["Is this right: Lyon"]
    assert (check.verdict, check.matched, check.compared) == ("match", 1, 1)
    assert check.rows[0].judged_by == "endpoint"


LACKING = "agent 'faulty_agent': HTTP 500: a server that it called failed: wanted: Field required"


async def test_a_field_that_neither_row_nor_record_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def score(stack: ScriptedStack, row: dict[str, Any], text: str) -> float:
        if "wanted" not in row:
            raise EnvironmentServerError(LACKING, server="faulty_agent", status_code=500)
        return await wanted(stack, row, text)

    config = with_recordings(tmp_path, recorded("of Spain?", "Madrid", 1.0))
    check, _ = await check_on(monkeypatch, config, score)
    assert (check.verdict, check.rewarded) == ("incomplete", True)
    assert check.detail.endswith(" wanted")


async def test_an_agent_that_is_gone_is_named_and_its_recording_played_by_the_one_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = recorded("of Italy?", "Rome", 1.0, agent_ref={"type": "responses_api_agents", "name": "retired"})
    check, _ = await check_on(monkeypatch, with_recordings(tmp_path, line))
    assert (check.verdict, check.matched) == ("match", 1)
    (note,) = check.notes
    assert "'retired'" in note


async def test_a_value_that_the_config_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unset = NeedMissingError("the config has no value for 'service_api_key'", need="service_api_key")
    config = with_recordings(tmp_path, recorded("of Italy?", "Rome", 1.0))
    check, configs = await check_on(monkeypatch, config, failures=(unset,))
    assert (check.verdict, check.need, check.detail) == ("blocked", "config", "config: service_api_key")
    assert len(configs) == 1


async def test_the_named_config_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_recordings(tmp_path, PARIS)
    (other := config.with_name("other.yaml")).write_text(RECORDED_CONFIG)
    check, (started,) = await check_on(
        monkeypatch, config, environments={"name": str(config), "config": str(other)}
    )
    assert (check.verdict, check.config) == ("match", str(other))
    assert started.environments[0].config == str(other)


async def test_rows_without_a_prompt_are_said_to_be_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_recordings(tmp_path)
    (config.parents[1] / "data" / "example.jsonl").write_text(
        '{"question": "of France?", "wanted": "Paris"}\n'
    )
    check, configs = await check_on(monkeypatch, config)
    assert (check.verdict, check.rewarded, configs) == ("incomplete", False, [])
    assert check.detail.startswith("no data: ")


async def test_rows_without_recordings_still_get_a_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, _ = await check_on(monkeypatch, with_recordings(tmp_path))
    assert (check.verdict, check.detail, check.rewarded) == ("incomplete", "no recording", True)


async def test_after_two_rollouts_without_an_answer_in_time_the_others_are_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def score(stack: ScriptedStack, row: dict[str, Any], text: str) -> float:
        raise RolloutTimeoutError("Timed out after 3 s")

    check, _ = await check_on(monkeypatch, with_recordings(tmp_path, *[PARIS] * 4), score)
    assert (check.verdict, len(check.rows)) == ("blocked", 2)
    assert check.detail.startswith("time: ")
