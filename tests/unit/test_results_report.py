"""The report: what it shows, that only its own script can run, and that it opens in a browser."""

from __future__ import annotations

import base64
import csv
import hashlib
import random
import re
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import orjson
import pytest
from click.testing import CliRunner

from gymgate.cli.report import command
from gymgate.core.errors import ConfigError, DataError
from gymgate.results import page, tables
from gymgate.results.export import COLUMNS, export_dataset
from gymgate.results.page import LONGEST_TEXT
from gymgate.results.report import write_report
from gymgate.results.report_data import SECONDS, ReportData, time_split
from gymgate.rollouts.transcript import Entry, transcript
from gymgate.runs.counted import aggregate
from gymgate.runs.counted.aggregate import read_runs
from gymgate.runs.counted.tasks import CollectedTasks
from gymgate.runs.stored.attempts import Attempt
from gymgate.runs.stored.score import score_of
from gymgate.runs.stored.tokens import StoredCall

HOSTILE = "</pre></style><script>document.title='run'</script><img src=x onerror=alert(1)>\ud800 \"'&"
RESULT: dict[str, Any] = {
    "responses_create_params": {
        "input": [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        ]
    },
    "response": {
        "output": [
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "function_call", "name": "look", "arguments": '{"a": 1}', "call_id": "c"},
            {"type": "function_call_output", "output": "seen", "call_id": "c"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
        ]
    },
}


def data_of(page: Path) -> list[dict[str, Any]]:
    """The parts of a page."""
    [data] = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL
    )
    parts: list[dict[str, Any]] = orjson.loads(data)
    return parts


def parts_of(page: Path, kind: str) -> list[Any]:
    return [part[kind] for part in data_of(page) if kind in part]


def tables_of(page: Path) -> list[list[dict[str, Any]]]:
    tables = parts_of(page, "table")
    return [[dict(zip(table["columns"], row, strict=True)) for row in table["rows"]] for table in tables]


def prompts_of(page: Path) -> list[list[list[str]]]:
    """The prompts of tasks that are shown once."""
    return [task["prompt"] for task in parts_of(page, "task")]


def conversations_of(page: Path) -> list[tuple[str, list[dict[str, Any]]]]:
    """The tasks of a page with their rollouts."""
    tasks: list[tuple[str, list[dict[str, Any]]]] = []
    for part in data_of(page):
        if "task" in part:
            tasks.append((part["task"]["name"], []))
        if "rollout" in part:
            tasks[-1][1].append(part["rollout"])
    return tasks


class Elements(HTMLParser):
    """Tags (also with their classes: `details.task`), attributes and text; elements must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: Counter[str] = Counter()
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes.update(name for name, _ in attrs)
        self.tags.update(
            f"{tag}.{each}" for name, value in attrs if name == "class" for each in str(value).split()
        )
        if tag not in ("meta", "input"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes.update(name for name, _ in attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def make_run(path: Path, text: str = "hello", tasks: int = 3) -> Path:
    path.mkdir()
    settings = {
        "format": 1,
        "settings": {"policy": {"type": "http", "model": f"org/{text}".replace("\ud800", "")}},
        "extent": {"rollouts": 4 * tasks + 1},
        "created": 1_700_000_000,
    }
    (path / "run.json").write_bytes(orjson.dumps(settings))
    lines = []
    for task in range(tasks):
        for repeat in range(4):
            value: dict[str, Any] = {
                "row_key": f"{task:016x}",
                "occurrence": 0,
                "repeat": repeat,
                "seed": None,
            }
            value |= {
                "task": task,
                "line": task + 1,
                "environment": text,
                "agent": text,
                "status": "completed",
                "reward": float(repeat < task),
            }
            call = {
                "model_server": "policy_model",
                "usage": {"input_tokens": 7, "output_tokens": 10 * repeat},
                "started_s": 0.5,
            }
            call["duration_s"] = 1.0
            timing = {"total_s": 2.0, "model_s": 1.0, "judge_s": 0.5}
            result = {
                **RESULT,
                "response": {
                    "output": [*RESULT["response"]["output"], {"role": "assistant", "content": text}]
                },
            }
            lines.append(
                {**value, "calls": [call], "timing": timing, "result": result, "metrics": {"m": 0.5}}
            )
    (path / "rollouts.jsonl").write_text("".join(f"{_json(line)}\n" for line in lines))
    failure = {
        **lines[0],
        "repeat": 9,
        "result": None,
        "final": True,
        "error": {"kind": "timeout", "type": text, "message": text},
    }
    (path / "failures.jsonl").write_text(f"{_json(failure)}\n")
    return path


def _json(value: Any) -> str:
    import json

    return json.dumps(value)


def test_what_was_said() -> None:
    assert transcript(RESULT) == [
        Entry("developer", "be brief"),
        Entry("user", "hi"),
        Entry("reasoning", "hm"),
        Entry("call look", '{"a": 1}'),
        Entry("output", "seen"),
        Entry("assistant", "so"),
    ]
    assert transcript({"responses_create_params": {"input": "hi"}}) == [Entry("user", "hi")]
    assert transcript(None) == []
    written = {"type": "custom_tool_call", "name": "run", "input": "print(1)"}
    assert transcript({"response": {"output": [written]}}) == [Entry("call run", "print(1)")]
    other = {"response": {"output": [{"type": "point", "at": 2**70}]}}
    assert transcript(other) == [Entry("point", f'{{\n  "at": {2**70}\n}}')]


@pytest.mark.parametrize("start", [[], [{"role": "user", "content": "hi"}]])
def test_of_a_conversation_after_each_step_the_last_is_shown(start: list[dict[str, str]]) -> None:
    """As aviary's agent answers, whose environment begins the conversation unless the row does."""
    states = [
        [{"role": role, "content": role} for role in ("user", "assistant", "user", "assistant")[:n]]
        for n in (2, 4)
    ]
    states = [[*start, *state] for state in states]
    result = {"responses_create_params": {"input": start}, "response": {"output": states}}
    assert transcript(result) == [Entry(item["role"], item["content"]) for item in states[-1]]


@pytest.mark.parametrize(
    "result",
    [
        {"responses_create_params": "hi", "response": "so"},
        {"responses_create_params": [1], "response": {"output": {"text": "so"}}},
        {"response": {"output": [1, None, "so"]}},
    ],
)
def test_an_answer_of_another_form_says_nothing(result: dict[str, Any]) -> None:
    assert transcript(result) == []


def test_an_item_of_another_form_is_shown_as_it_is() -> None:
    assert transcript({"response": {"output": [{"type": 5, "a": 1}]}}) == [Entry("5", '{\n  "a": 1\n}')]


def test_a_report_that_is_passed_on_holds_no_key(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    described = orjson.loads((run / "run.json").read_bytes())
    overrides = [["search.api_key", "sk-secret"], ["search.max_tokens", 8]]
    described["settings"]["environments"] = [{"name": "hello", "overrides": overrides}]
    (run / "run.json").write_bytes(orjson.dumps(described))
    done = CliRunner().invoke(command, [str(run)])
    assert done.exit_code == 0, done.output
    page = run / "report.html"
    assert "sk-secret" not in page.read_text()
    assert {"setting": "environments.0.overrides.search.max_tokens", "value": "8"} in tables_of(page)[-1]


def test_a_report_shows_it_all(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    done = CliRunner().invoke(command, [str(run)])
    assert done.exit_code == 0, done.output
    assert done.stdout.strip() == str(run / "report.html")
    assert done.stderr.startswith("next: ")
    page = run / "report.html"
    assert "<title>org/hello on hello, 2023-11-14</title>" in page.read_text()
    [headline] = parts_of(page, "headline")
    for said in ("0.250 ± 0.144", "0.231 to 0.308", "13 rollouts: 3 right, 9 wrong; 1 failed (1 by timeout)"):
        assert said in headline
    assert parts_of(page, "account") == []
    environments, whole, tokens, failures, tasks, settings = tables_of(page)
    assert [*environments[0]] == [
        *(
            "environment",
            "mean reward",
            "± se",
            "pass@1",
            "pass@2",
            "pass@4",
            "tasks",
            "rollouts",
            "failed",
        )
    ]
    assert {*environments[0]} < {*whole[0]}
    assert tokens == [
        {
            "environment": "hello",
            "model server": "policy_model",
            "rollouts": 13,
            "counted": 13,
            "calls": 13,
            "input tokens": 91,
            "cached tokens": None,
            "cached share": None,
            "output tokens": 180,
            "reasoning tokens": None,
        }
    ]
    assert failures == [{"class": "timeout", "error": "hello", "count": 1, "first message": "hello"}]
    assert [(task["task"], task["rewards"]) for task in tasks] == [
        ("hello:1 hi", "0, 0, 0, 0, failed"),
        ("hello:2 hi", "1, 0, 0, 0"),
        ("hello:3 hi", "1, 1, 0, 0"),
    ]
    assert {"setting": "policy.model", "value": "org/hello"} in settings
    charts = {chart["title"]: chart["bars"] for chart in parts_of(page, "histogram")}
    assert charts["Reward"] == [[0.0, 0.0, 9], [1.0, 1.0, 3]]
    assert "Seconds per rollout" not in charts, "a constant needs no chart"
    [shares] = parts_of(page, "shares")
    assert ["policy", 12.0] in shares["parts"]
    names, conversations = zip(*conversations_of(page), strict=True)
    assert [len(rollouts) for rollouts in conversations] == [5, 4, 4]
    assert names[1] == "hello:2 hi: 1, 0, 0, 0"
    assert conversations[0][4]["turns"] == [["error", "hello: hello"]]
    assert prompts_of(page) == [[["developer", "be brief"], ["user", "hi"]]] * 3
    assert conversations[2][0]["turns"] == [
        ["reasoning", "hm"],
        ["call look", '{"a": 1}'],
        ["output", "seen"],
        ["assistant", "so"],
        ["assistant", "hello"],
    ]


def test_a_report_says_what_checks_a_server_and_that_a_judge_failed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    lines = [orjson.loads(line) for line in (run / "rollouts.jsonl").read_bytes().splitlines()]
    kept = [line for line in lines if line["task"] and (line["task"], line["repeat"]) != (1, 3)]
    (run / "rollouts.jsonl").write_text("".join(f"{_json(line)}\n" for line in kept))
    errors = (
        {"kind": "environment", "type": "EnvironmentServerError", "message": "KeyError"},
        {"kind": "policy", "type": "PolicyError", "message": "429", "judge": True},
    )
    failures = [
        {**lines[0], "repeat": repeat, "result": None, "final": True, "error": error}
        for repeat, error in enumerate(errors)
    ]
    (run / "failures.jsonl").write_text("".join(f"{_json(line)}\n" for line in failures))
    write_report([run], tmp_path / "r.html")
    environments, _, _, failed, *_ = tables_of(tmp_path / "r.html")
    assert (environments[0]["tasks"], environments[0]["scored tasks"]) == (3, 2)
    assert [line["class"] for line in failed] == ["environment", "judge"]
    assert "pass@3" in environments[0], "a task has three scored rollouts"
    assert any("k = 3" in note for note in parts_of(tmp_path / "r.html", "note"))
    [note] = [note for note in parts_of(tmp_path / "r.html", "note") if "gymgate check" in note]
    assert note.endswith(": hello")
    (run / "rollouts.jsonl").write_text("")
    write_report([run], tmp_path / "r.html")
    charts = [kind for kind in ("histogram", "shares", "curve") if parts_of(tmp_path / "r.html", kind)]
    assert not charts, "a run without a score has nothing to draw"


@pytest.mark.parametrize("seed", range(5))
def test_conversations_are_in_the_order_of_tasks_and_repeats(tmp_path: Path, seed: int) -> None:
    """Whatever finished first, and so are the ones that are left out."""
    run = make_run(tmp_path / "run", tasks=6)
    lines = (run / "rollouts.jsonl").read_bytes().splitlines()
    failed = [
        {**orjson.loads(lines[0]), "row_key": f"{key:016x}", "task": key, "line": key + 1} for key in (7, 2)
    ]
    error = {"kind": "timeout", "type": "T", "message": "m"}
    failures = [
        orjson.dumps({**each, "repeat": repeat, "result": None, "final": True, "error": error})
        for each in failed
        for repeat in (9, 8, 7)
    ]
    for file, content in (("rollouts.jsonl", lines), ("failures.jsonl", failures)):
        random.Random(seed).shuffle(content)
        (run / file).write_bytes(b"".join(each + b"\n" for each in content))
    write_report([run], tmp_path / "r.html", tasks=3, per_task=2)
    shown = [
        (name.partition(" ")[0], [each["label"] for each in rollouts])
        for name, rollouts in conversations_of(tmp_path / "r.html")
    ]
    first = ["repeat 0", "repeat 1"]
    assert shown == [("hello:1", first), ("hello:2", first), ("hello:3", [*first, "repeat 7", "repeat 8"])]
    write_report([run], tmp_path / "r.html", tasks=0)
    assert conversations_of(tmp_path / "r.html") == []


def test_every_environment_has_conversations_of_its_first_rows(tmp_path: Path) -> None:
    for name in ("b", "a"):
        make_run(tmp_path / name, name, tasks=4)
        described = orjson.loads((tmp_path / name / "run.json").read_bytes())
        described["settings"]["policy"]["model"] = "m"
        (tmp_path / name / "run.json").write_bytes(orjson.dumps(described))
    write_report([tmp_path / "b", tmp_path / "a"], tmp_path / "r.html", tasks=4)
    names = [name.partition(" ")[0] for name, _ in conversations_of(tmp_path / "r.html")]
    assert names == ["a:1", "a:2", "b:1", "b:2"]


def test_a_report_says_what_was_expected_and_what_the_verifier_took(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tasks=2)
    lines = [orjson.loads(line) for line in (run / "rollouts.jsonl").read_bytes().splitlines()]
    for line in lines:
        line["result"] |= {"expected_answer": "B", "extracted_answer": "AB"[line["repeat"] % 2]}
    (run / "rollouts.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    write_report([run], tmp_path / "r.html", command="gymgate report run")
    [(_, rollouts), _] = conversations_of(tmp_path / "r.html")
    assert [(each["expected"], each["extracted"]) for each in rollouts[:2]] == [("B", "A"), ("B", "B")]
    tasks, settings = tables_of(tmp_path / "r.html")[-2:]
    assert (tasks[0]["expected"], tasks[0]["extracted"]) == ("B", "A, B")
    assert {"setting": "this page", "value": "gymgate report run"} in settings


def test_a_report_begins_with_the_result_and_says_that_example_rows_are_none(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tasks=2)
    described = orjson.loads((run / "run.json").read_bytes())
    described["settings"]["sources"] = ["example"]
    (run / "run.json").write_bytes(orjson.dumps(described))
    write_report([run], tmp_path / "r.html", per_task=9)
    assert not any("--per-task" in note for note in parts_of(tmp_path / "r.html", "note"))
    [headline] = parts_of(tmp_path / "r.html", "headline")
    assert all(
        word in headline for word in ("org/hello on hello", "2 example rows", "0.125 ± 0.125", "benchmark")
    )


def test_tasks_are_named_by_what_differs_between_their_prompts() -> None:
    data, collected = ReportData(tasks=9, per_task=1), CollectedTasks()
    for key, (environment, text) in enumerate(
        [
            ("e", "Answer in one word. Which?"),
            ("e", "Answer in one word. What else?"),
            ("e", ""),
            ("f", "Alone."),
        ]
    ):
        fields = {"environment": environment, "row_key": f"{key:016x}", "line": key, "repeat": 0}
        attempt = Attempt.model_validate({**fields, "result": {"responses_create_params": {"input": text}}})
        data.add(attempt, score_of(attempt))
        collected.add(score_of(attempt))
    names = [*data.task_names(collected.tasks.values()).values()]
    assert names == ["e:0 …Which?", "e:1 …What else?", "e:2", "f:3 Alone."]


def test_a_report_reads_without_its_script(tmp_path: Path) -> None:
    """Its sentences, tables and conversations are there as text, hostile ones too."""
    write_report([make_run(tmp_path / "run", HOSTILE)], tmp_path / "r.html")
    [static] = re.findall(r"<noscript>(.*)</noscript>", (tmp_path / "r.html").read_text(), re.DOTALL)
    page = Elements(static)
    assert page.tags["script"] == page.tags["img"] == 0
    assert page.tags["table"] == 6
    assert page.text.count(HOSTILE.replace("\ud800", "")[:20]) > 12
    assert "mean reward" in page.text
    assert {*page.attributes} == {"class"}


def test_a_task_has_the_first_words_of_any_of_its_rollouts() -> None:
    """Without markup."""
    data = ReportData(tasks=1, per_task=1)
    place = {"environment": "e", "row_key": "0" * 16, "status": "completed", "calls": []}
    for repeat, words in enumerate((None, "## **Which?**\n<b id='x'>`Other`", "Other")):
        result = None if words is None else {"responses_create_params": {"input": words}}
        attempt = Attempt.model_validate({**place, "repeat": repeat, "result": result})
        data.add(attempt, score_of(attempt))
    assert [*data.openings.values()] == ["Which? Other"]


def test_runs_that_overlap_are_counted_once_everywhere_and_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, page = make_run(tmp_path / "run"), tmp_path / "r.html"
    passes: list[int] = []
    read = aggregate._read

    def counted(runs: Any, **options: Any) -> Any:
        passes.append(len(runs))
        return read(runs, **options)

    monkeypatch.setattr(aggregate, "_read", counted)
    done = CliRunner().invoke(command, [str(run), str(run), "--overlap", "first", "-o", str(page)])
    assert done.exit_code == 0, done.output
    assert passes.count(2) == 1
    assert tables_of(page)[0][0]["rollouts"] == 13
    assert {chart["count"] for chart in parts_of(page, "histogram")} == {12}
    assert [len(rollouts) for _, rollouts in conversations_of(page)] == [5, 4, 4]


def test_a_report_of_hostile_rollouts_holds_them_as_data(tmp_path: Path) -> None:
    run, path = make_run(tmp_path / "run", HOSTILE), tmp_path / "r.html"
    write_report([run], path)
    text = path.read_text()
    page = Elements(text)
    assert (page.tags["script"], page.tags["img"]) == (2, 0)
    [script] = re.findall(r"<script>(.*)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'\"" in text
    assert "alert" not in script
    assert not [name for name in page.attributes if name.startswith("on") or name in ("src", "href")]
    assert "default-src 'none'" in text
    [(_, [rollout, *_]), *_] = conversations_of(path)
    assert "<script>" in rollout["turns"][-1][1]
    assert "innerHTML" not in script


def test_long_texts_and_many_tasks_are_bounded(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "x" * 50_000, tasks=5)
    write_report([run], tmp_path / "r.html", tasks=1, per_task=2)
    [(_, rollouts)] = conversations_of(tmp_path / "r.html")
    assert len(rollouts) == 3
    assert any("--per-task" in note for note in parts_of(tmp_path / "r.html", "note"))
    assert rollouts[0]["turns"][-1][1].endswith(f"... and {50_000 - LONGEST_TEXT} more characters")


def test_a_flat_table_can_be_joined_with_others(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tasks=2)
    lines = [orjson.loads(line) for line in (run / "rollouts.jsonl").read_bytes().splitlines()]
    for line in lines:
        line["result"] |= {"expected_answer": ["B"], "extracted_answer": "A"}
        line["reward_parts"] = {"form": 0.5} if line["repeat"] else {}
    (run / "rollouts.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    export_dataset(read_runs([run]), tmp_path / "t.csv")
    with (tmp_path / "t.csv").open(newline="") as file:
        first, second, *_ = csv.DictReader(file)
    assert [*first] == [*COLUMNS, "reward_parts.form"]
    about = {"model": "org/hello", "run": str(run), "environment": "hello", "line": "1"}
    about["task"] = f"hello/{first['row_key']}"
    assert first.items() >= about.items()
    assert (first["expected_answer"], first["extracted_answer"]) == ("B", "A")
    assert (first["reward_parts.form"], second["reward_parts.form"]) == ("", "0.5")
    assert orjson.loads(first["messages"])[0] == {"role": "developer", "content": "be brief"}


def test_a_flat_table_has_no_reward_that_does_not_count(tmp_path: Path) -> None:
    """Of a file of rollouts the run is the file."""
    run = make_run(tmp_path / "run", tasks=1)
    lines = [orjson.loads(line) for line in (run / "rollouts.jsonl").read_bytes().splitlines()]
    for line in lines:
        line |= {"reward": 1.0, "reward_parts": {"form": 0.5}}
    lines[0]["status"] = "masked"
    (tmp_path / "kept.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    assert export_dataset(read_runs([tmp_path / "kept.jsonl"]), tmp_path / "t.csv") == 4
    with (tmp_path / "t.csv").open(newline="") as file:
        rows = [*csv.DictReader(file)]
    assert [row["reward"] for row in rows] == ["", "1.0", "1.0", "1.0"]
    assert [row["reward_parts.form"] for row in rows] == ["", "0.5", "0.5", "0.5"]
    assert {row["run"] for row in rows} == {str(tmp_path / "kept.jsonl")}


def test_a_flat_table_of_nemo_gyms_rollouts_has_their_parts(tmp_path: Path) -> None:
    common = {
        "_ng_rollout_index": 0,
        "agent_ref": {"name": "a"},
        "reward": 1.0,
        "reward_components": {"form": 0.5},
    }
    broken = {"_ng_failure_class": "crash", "reward": 0.0}
    lines = [{**common, "_ng_task_index": 0}, {**common, **broken, "_ng_task_index": 1}]
    (tmp_path / "gym.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    assert export_dataset(read_runs([tmp_path / "gym.jsonl"]), tmp_path / "t.jsonl") == 2
    rows = [orjson.loads(line) for line in (tmp_path / "t.jsonl").read_bytes().splitlines()]
    assert [(row["reward"], row["reward_parts.form"]) for row in rows] == [(1.0, 0.5), (None, None)]


def test_a_table_in_batches_has_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    monkeypatch.setattr(tables, "BATCH", 5)
    assert export_dataset(read_runs([make_run(tmp_path / "run")]), tmp_path / "t.parquet") == 13
    assert tables.columns_of([{"a": 1}, {"b": 1, "a": 2}]) == ["b", "a"]


def test_what_is_not_known_is_not_shown(tmp_path: Path) -> None:
    """Settings that are not set, and the length of a rollout."""
    run = make_run(tmp_path / "run")
    described = orjson.loads((run / "run.json").read_bytes())
    described["settings"] |= {"limits": {"timeout_s": 5, "max_calls": None}}
    (run / "run.json").write_bytes(orjson.dumps(described))
    write_report([run], tmp_path / "r.html")
    names = {row["setting"] for row in tables_of(tmp_path / "r.html")[-1]}
    assert "limits.timeout_s" in names
    assert "limits.max_calls" not in names
    data = ReportData(1, 1)
    line = orjson.loads((run / "rollouts.jsonl").read_bytes().splitlines()[0])
    attempt = Attempt.read({**line, "timing": {"total_s": 0.0}}, run, 1)
    data.add(attempt, score_of(attempt))
    assert not data.charts[SECONDS]


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_a_dataset_of_rollouts(tmp_path: Path, ending: str) -> None:
    datasets = pytest.importorskip("datasets")
    run = make_run(tmp_path / "run")
    path = tmp_path / f"rollouts{ending}"
    assert export_dataset(read_runs([run]), path) == 13
    loader = "parquet" if ending == ".parquet" else "json"
    loaded = datasets.load_dataset(
        loader, data_files=str(path), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert loaded.num_rows == 13
    assert loaded[0]["messages"][:2] == [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]
    assert loaded["status"][-1] == "failed"
    assert sum(filter(None, loaded["reward"])) == 3.0
    with pytest.raises(ConfigError, match=r"rollouts\.txt"):
        export_dataset(read_runs([run]), tmp_path / "rollouts.txt")


def test_a_report_of_replayed_answers_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    described = orjson.loads((run / "run.json").read_bytes())
    described["settings"]["policy"] = {"type": "replay"}
    (run / "run.json").write_bytes(orjson.dumps(described))
    write_report([run], tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert " on hello, 2023-11-14</title>" in text
    assert "replayed" in text


def test_where_the_time_goes() -> None:
    """Two policy calls with a tool between them, an overlapping one, then a judge; 10 s in all."""
    calls = [
        {"model_server": "policy_model", "started_s": 4.0, "duration_s": 1.0},
        {"model_server": "policy_model", "started_s": 1.0, "duration_s": 2.0},
        {"model_server": "policy_model", "started_s": 4.5, "duration_s": 1.5},
        {"model_server": "judge", "started_s": 7.0, "duration_s": 2.0},
    ]
    split = time_split(10.0, map(StoredCall.model_validate, calls))
    assert split == {
        "waiting and set-up": 1.0,
        "policy": 4.0,
        "tools and agent": 2.0,
        "judges": 2.0,
        "scoring": 1.0,
    }
    assert time_split(3.0, []) == {**dict.fromkeys(split, 0.0), "waiting and set-up": 3.0}
    late = time_split(2.0, [StoredCall(started_s=1.0, duration_s=5.0)])
    assert sum(late.values()) == 2.0


def test_charts_of_little() -> None:
    assert page.histogram("t", [0.25, 0.25])["histogram"] == {
        "title": "t",
        "bars": [[0.25, 0.25, 2]],
        "count": 2,
        "mean": 0.25,
    }
    assert [bar[2] for bar in page.histogram("t", [1, 3, 3])["histogram"]["bars"]] == [1, 0, 2]
    twentieths = page.histogram("t", [place / 20 for place in range(21)])["histogram"]["bars"]
    assert [bar[2] for bar in twentieths] == [1] * 19 + [2], "the last range has the highest value, too"
    bars = page.histogram("t", [0.0, 0.5, 10.0])["histogram"]["bars"]
    assert (len(bars), bars[0][0], bars[-1][1]) == (page.BINS, 0.0, 10.0)
    assert page.curve("t", [[1.0, 0.0], [0.25]])["curve"]["points"] == [(0.25, 0.25, 0.25), (0.5, 0.0, 1.0)]


def chromium(tmp_path: Path) -> list[str]:
    """The command of a browser without a window."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("no chromium on PATH")
    return [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]


def dumped(browser: list[str], path: Path) -> str:
    """The document that a browser makes of a page."""
    return subprocess.run(
        [*browser, "--dump-dom", f"file://{path}"], capture_output=True, text=True, timeout=100, check=True
    ).stdout


ACTIONS = """
document.forms[0].elements.outcome.value = "failed";
document.forms[0].dispatchEvent(new Event("input"));
document.querySelector("th").click();
"""


@pytest.mark.heavy
def test_a_report_opens_in_a_browser_filters_and_sorts(tmp_path: Path) -> None:
    browser, path = chromium(tmp_path), tmp_path / "r.html"
    write_report([make_run(tmp_path / "run", HOSTILE)], path)
    text = dumped(browser, path)
    assert "<title>run</title>" not in text
    shown = Elements(text)
    assert shown.tags["details.task"] == 3
    assert shown.tags["script"] == 2
    assert shown.tags["img"] == 0
    assert shown.tags["figure"] == 4
    turns = {name: shown.tags[f"div.{name}"] for name in ("system", "user", "assistant", "reasoning", "tool")}
    assert turns == {"system": 3, "user": 3, "assistant": 24, "reasoning": 12, "tool": 24}, (
        "a prompt once a task"
    )
    assert "13 conversations" in shown.text
    for width in (1300, 400):
        shot = tmp_path / f"{width}.png"
        size = f"--window-size={width},2000"
        subprocess.run(
            [*browser, size, f"--screenshot={shot}", f"file://{path}"],
            capture_output=True,
            timeout=100,
            check=True,
        )
        assert shot.stat().st_size > 5000
    allowed = re.sub("<meta http-equiv[^>]*>", "", path.read_text())
    path.write_text(allowed.replace("</body>", f"<script>{ACTIONS}</script></body>"))
    text = dumped(browser, path)
    assert ">1 conversations<" in text
    assert len(re.findall(r'<details class="task"[^>]* hidden', text)) == 2
    assert len(re.findall(r"<div class=.rollout[^>]* hidden", text)) == 12
    assert 'aria-sort="descending"' in text


WIDTHS = """
document.title = [...document.querySelectorAll(".scroll")].map(it => it.scrollWidth - it.clientWidth).join();
"""


@pytest.mark.heavy
def test_at_1280_pixels_the_tables_of_scores_and_tokens_need_no_scrolling(tmp_path: Path) -> None:
    browser, path = chromium(tmp_path), tmp_path / "r.html"
    write_report([make_run(tmp_path / "run")], path)
    allowed = re.sub("<meta http-equiv[^>]*>", "", path.read_text())
    path.write_text(allowed.replace("</body>", f"<script>{WIDTHS}</script></body>"))
    [beyond] = re.findall("<title>([-0-9,]+)</title>", dumped([*browser, "--window-size=1280,900"], path))
    scores, _, tokens, *_ = map(int, beyond.split(","))
    assert scores <= 0 >= tokens


@pytest.mark.heavy
def test_no_role_and_no_number_of_tasks_stops_a_page(tmp_path: Path) -> None:
    """A role may be called as what each object of JavaScript has, and a call takes a bounded number of arguments."""
    browser, path = chromium(tmp_path), tmp_path / "r.html"
    turns = [["constructor", "first"], ["__proto__", "second"]]
    rollout = {"label": "l", "outcome": "completed", "reward": 1.0, "numbers": {}, "turns": turns}
    rollout |= {"expected": None, "extracted": None}
    parts: list[page.Part] = [
        page.curve("c", [[1.0]] * 200_000),
        {"filters": {}},
        {"task": {"environment": "e", "name": "n", "prompt": []}},
        {"rollout": rollout},
    ]
    page.write_page(path, "t", parts)
    text = Elements(dumped(browser, path)).text
    assert "firstsecond" in text.replace("constructor", "").replace("__proto__", "")
    assert "1 conversations" in text


def test_a_report_of_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rollouts.jsonl").touch()
    with pytest.raises(DataError, match="no rollouts"):
        write_report([tmp_path / "rollouts.jsonl"], tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()
