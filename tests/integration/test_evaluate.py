"""`gymgate.evaluate` on real Gym servers: what it returns, on whose event loop, and what failed."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import threading
from pathlib import Path
from typing import Any

import orjson
import pytest
from click.testing import CliRunner

import gymgate
from gymgate.cli import cli
from gymgate.core.errors import ConfigError, GymgateError, PolicyError
from gymgate.results.export import COLUMNS
from support.json_output import read_output
from support.stacks import runtime
from support.upstream import answering, upstream_in_thread

pytestmark = [pytest.mark.gym, pytest.mark.warm]


def answers() -> list[str]:
    return [row.data["expected_answer"] for row in gymgate.open_rows("mcqa", runtime=runtime())]


def first_answer(request: dict[str, Any]) -> str:
    """Right for the rows whose answer is that of the first one."""
    return f"The answer is \\boxed{{{answers()[0]}}}"


def test_a_function_is_evaluated_in_one_call(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    evaluation = gymgate.evaluate("mcqa", policy=first_answer, repeats=2, output=run, runtime=runtime())
    right = [answer == answers()[0] for answer in answers()]
    assert 0 < sum(right) < 5
    assert [rollout.reward for rollout in evaluation.rollouts] == [
        float(each) for each in right for _ in "12"
    ]
    assert evaluation.mean_reward == pytest.approx(sum(right) / 5)
    assert evaluation.failed == []
    assert evaluation.notes == ["5 example rows, not the benchmark"]
    done = CliRunner().invoke(cli, ["aggregate", str(run), "--json"])
    assert evaluation.metrics == read_output("aggregate", done.stdout)["environments"]
    assert (evaluation.model, evaluation.run) == ("first_answer", str(run))
    records = evaluation.records()
    assert [*records[0]] == [*COLUMNS]
    assert [(each["line"], each["repeat"]) for each in records[:3]] == [(1, 0), (1, 1), (2, 0)]
    first, again, second = (each["task"] for each in records[:3])
    assert first == again != second
    assert [each["expected_answer"] for each in records[::2]] == answers()
    assert {each["extracted_answer"] for each in records} == {answers()[0]}
    told = capfd.readouterr().err
    assert "mcqa" in told  # progress
    assert "<table>" in evaluation._repr_html_()
    account = f"10 rollouts: {2 * sum(right)} right, {10 - 2 * sum(right)} wrong"
    for shown in (told, repr(evaluation), evaluation._repr_html_()):
        assert account in shown


async def test_it_can_be_called_where_an_event_loop_runs(capfd: pytest.CaptureFixture[str]) -> None:
    """As in a notebook: the plain call has another loop, `evaluate_async` the caller's."""
    loops = []

    async def policy(request: dict[str, Any]) -> str:
        loops.append((asyncio.get_running_loop(), threading.current_thread()))
        return first_answer(request)

    settings: Any = {"policy": policy, "limit": 1, "progress": False, "runtime": runtime()}
    here = asyncio.get_running_loop(), threading.current_thread()
    assert gymgate.evaluate("mcqa", **settings).mean_reward == 1
    assert (await gymgate.evaluate_async("mcqa", **settings)).mean_reward == 1
    assert [loop == here for loop in loops] == [False, True]
    assert capfd.readouterr().err == ""


def test_what_failed_is_returned_and_told(capfd: pytest.CaptureFixture[str]) -> None:
    def policy(request: dict[str, Any]) -> str:
        raise ValueError("weights are gone")

    evaluation = gymgate.evaluate("mcqa", policy=policy, limit=2, runtime=runtime(), failed_as=0)
    assert evaluation.mean_reward == 0
    assert [record["reward"] for record in evaluation.records()] == [0, 0]
    evaluation = gymgate.evaluate("mcqa", policy=policy, limit=2, runtime=runtime())
    assert evaluation.mean_reward is None
    assert len(evaluation.failed) == len(evaluation.rollouts) == 2
    for told in (*evaluation.notes, capfd.readouterr().err, evaluation.records()[1]["error"]):
        assert "weights are gone" in told
    assert evaluation.metrics[0]["failed"] == 2


def test_failed_attempts_are_counted_though_a_later_one_finished(tmp_path: Path) -> None:
    failures = iter([PolicyError("busy", retryable=True)])

    def policy(request: dict[str, Any]) -> str:
        for error in failures:
            raise error
        return first_answer(request)

    evaluation = gymgate.evaluate("mcqa", policy=policy, limit=2, output=tmp_path, runtime=runtime())
    assert evaluation.failed == []
    assert evaluation.metrics[0]["asked_again"] == 1
    assert evaluation.metrics == gymgate.summarize(tmp_path).environments


@pytest.mark.parametrize("progress", [True, False])
def test_what_is_wrong_with_rows_is_noted_and_told_once(
    progress: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    row = dict(gymgate.open_rows("mcqa", runtime=runtime())[0].data)
    del row["expected_answer"]
    (tmp_path / "rows.jsonl").write_bytes(orjson.dumps(row) + b"\n{\n")
    evaluation = gymgate.evaluate(
        "mcqa", tmp_path / "rows.jsonl", policy=first_answer, progress=progress, runtime=runtime()
    )
    unread, unanswered = evaluation.notes
    assert f"{tmp_path / 'rows.jsonl'}:2" in unread
    assert "'expected_answer'" in unanswered
    told = capfd.readouterr().err
    assert [told.count(note) for note in evaluation.notes] == [int(progress)] * 2


def test_a_number_of_rows_is_refused_with_the_name_of_the_limit() -> None:
    rows: Any = 5
    with pytest.raises(ConfigError, match="limit=5"):
        gymgate.evaluate("mcqa", rows, policy=first_answer, runtime=runtime())


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"policy": "http://h/v1"}, "HTTPEndpoint(base_url='http://h/v1')"),
        ({"policy": None}, "NoneType"),
        ({"repeat": 2}, "repeats"),
        ({"repeats": "x"}, "repeats='x'"),
        ({"limit": 0}, "limit=0"),
        ({"ks": 4}, "ks=[4]"),
        ({"concurrency": 0}, "concurrency=0"),
        ({"rows": None}, "rows"),
        ({"rows": [1]}, "rows:1"),
        ({"environments": 5}, "environments"),
    ],
)
def test_a_wrong_argument_is_refused_in_one_line(settings: dict[str, Any], word: str) -> None:
    given: dict[str, Any] = {"environments": "mcqa", "policy": first_answer, "runtime": runtime(), **settings}
    with pytest.raises(GymgateError) as raised:
        gymgate.evaluate(**given, progress=False)
    assert word in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_string_is_neither_a_stack_nor_its_policy() -> None:
    wrong: Any = "mcqa"
    with pytest.raises(ConfigError) as raised, gymgate.acquire_sync(wrong):
        pass
    assert "config='mcqa'" in str(raised.value)


def test_one_name_of_an_environment_is_enough_everywhere() -> None:
    assert gymgate.StackConfig(environments="mcqa") == gymgate.StackConfig(environments=("mcqa",))
    spec = {"environments": "mcqa", "runtime": runtime()}
    assert [each.name for each in gymgate.RunSpec(**spec).stack.environments] == ["mcqa"]
    for environments in ("mcqa", ["mcqa"], gymgate.StackConfig(environments="mcqa", runtime=runtime())):
        settings = {} if isinstance(environments, gymgate.StackConfig) else {"runtime": runtime()}
        evaluation = gymgate.evaluate(environments, policy=first_answer, limit=1, progress=False, **settings)
        assert evaluation.mean_reward == 1


async def test_the_recipes_run_as_they_stand(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
    programs = re.findall(r"```python\n(.*?)```", page.partition("## Reference")[0], re.DOTALL)
    message = {"role": "assistant", "content": "\\boxed{C}"}
    completion = {
        "id": "c",
        "object": "chat.completion",
        "created": 0,
        "model": "MODEL",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
    }
    routes = {"/v1/models": {"data": [{"id": "MODEL"}]}, "/v1/chat/completions": completion}
    printed = []
    with upstream_in_thread(answering(routes)) as model:
        for program in programs:
            text = program.replace("https://HOST/v1", model.url)
            code = compile(text, "docs/python.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            variables: dict[str, Any] = {}
            if inspect.CO_COROUTINE & code.co_flags:
                await eval(code, variables)
                await variables["client"].close()  # as the notebook's end does
            else:
                exec(code, variables)
            printed.append(capsys.readouterr().out)
            if evaluation := variables.get("evaluation"):
                assert evaluation.failed == []
    assert len(programs) == 5
    shown = re.search(r"# (<Evaluation.*>)", programs[0])
    assert shown is not None
    assert shown[1] in printed[0]
    assert printed[4].splitlines()[1].startswith("1 ")
