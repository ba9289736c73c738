"""`gymgate data prepare`: NeMo Gym's own preparation against a hub on this machine, and rows that then run."""

from __future__ import annotations

import importlib
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from gymgate.core.config import EnvironmentConfig, RuntimeConfig, cache_dir
from gymgate.core.errors import ConfigError, DataError, GymgateError, NeedMissingError, SetupError
from gymgate.gym.preparation import Manifest, PrepareConfig, ScriptHelp, prepare_data
from gymgate.gym.row_sources import open_rows
from gymgate.gym.runtime import ensure_runtime, open_catalog
from gymgate.trl import NeMoGymSpec
from nemo_gym_env import load_environment
from support.hub import Hub, serving
from support.upstream import answering, scripted_chat, upstream_in_thread

# The first use of a release installs it.
pytestmark = [pytest.mark.gym, pytest.mark.warm, pytest.mark.timeout(900)]

AIME = "HuggingFaceH4/aime_2024"
CALENDAR = "nvidia/Nemotron-RL-agent-calendar_scheduling"
MATH = "nvidia/Nemotron-RL-math-OpenMathReasoning"
GPQA = "Idavidrein/gpqa"
SUMS = [
    {
        "id": i,
        "problem": f"What is {i} + {i}?",
        "solution": "Add.",
        "answer": str(2 * i),
        "url": "",
        "year": "2024",
    }
    for i in range(1, 7)
]


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def parquet(rows: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file.getvalue()


def math_row(number: int) -> dict[str, Any]:
    question = {"role": "user", "content": f"What is {number} * 2? Answer in \\boxed{{}}."}
    return {
        "question": question["content"],
        "expected_answer": str(2 * number),
        "responses_create_params": {"input": [question]},
        "agent_ref": {"type": "responses_api_agents", "name": "an_agent_of_long_ago"},
    }


def packaged(environment: str) -> list[dict[str, Any]]:
    path = open_catalog().find(environment).data_file().path
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the runtimes made before; the catalog of a release is read into it once."""
    ensure_runtime(RuntimeConfig())
    path = tmp_path_factory.mktemp("cache")
    (path / "runtimes").symlink_to(cache_dir() / "runtimes")
    return path


@pytest.fixture
def hub(shared_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub, and a cache without data."""
    shutil.rmtree(shared_cache / "data", ignore_errors=True)
    with serving(Hub()) as hub:
        monkeypatch.setenv("GYMGATE_CACHE", str(shared_cache))
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
        for name in ("HF_TOKEN", "HF_HUB_CACHE", "HF_DATASETS_CACHE"):
            monkeypatch.delenv(name, raising=False)
        yield hub


def prepared(
    name: str, output: Path, progress: Callable[[str], None] = lambda _: None, **settings: Any
) -> Manifest:
    agent = settings.pop("agent", None)
    config = PrepareConfig(environment=EnvironmentConfig(name=name, agent=agent), **settings)
    return prepare_data(config, output, progress=progress)


def gymgate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gymgate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_a_benchmark_is_put_to_its_prompt_and_runs(hub: Hub, tmp_path: Path) -> None:
    hub.repositories[AIME] = {"README.md": b"", "data/train-00000-of-00001.parquet": parquet(SUMS)}
    manifest = prepared("aime24", tmp_path / "out")
    note = manifest.files["benchmark.jsonl"]
    (source,) = note.sources
    assert (note.rows, note.distinct, source.repeats) == (6, 6, 32)
    assert note.agents == {"aime24_math_with_judge_simple_agent": 6}
    assert source.origin["script"] == "benchmarks/aime24/prepare.py"
    rows = open_rows(str(tmp_path / "out" / "benchmark.jsonl"), environment=None)
    content = rows[2].data["responses_create_params"]["input"][-1]["content"]
    assert content.endswith("What is 3 + 3?")
    assert "\\boxed{}" in content
    assert rows[2].data["expected_answer"] == "6"
    release = ensure_runtime(RuntimeConfig()).site / "benchmarks" / "aime24" / "data"
    assert not [*release.glob("*.jsonl")], "the release was written to"

    def policy(conversation: str) -> str:
        number = int(conversation.rpartition("What is ")[2].split()[0])
        return f"\\boxed{{{number + 3}}}"  # right for 3 + 3 alone

    with scripted_chat(policy) as url:
        data = str(tmp_path / "out" / "benchmark.jsonl")
        done = gymgate("run", "aime24", "--data", data, "-b", url, "-m", "any", "--json")
    report = json.loads(done.stdout)["environments"]["aime24"]
    assert (done.returncode, report["rollouts"], round(6 * report["mean_reward"])) == (0, 6, 1), done.stderr


@pytest.mark.heavy
def test_the_second_time_needs_no_network_and_a_change_upstream_is_told(
    hub: Hub, shared_cache: Path, tmp_path: Path
) -> None:
    rows = packaged("calendar")
    hub.repositories[CALENDAR] = {"train.jsonl": jsonl(rows[:4]), "validation.jsonl": jsonl(rows[4:])}
    first = prepared("calendar", tmp_path / "out")
    assert {name: note.rows for name, note in first.files.items()} == {
        "train.jsonl": 4,
        "validation.jsonl": 1,
    }
    origin = first.files["train.jsonl"].sources[0].origin
    assert (origin["repository"], origin["commit"]) == (CALENDAR, hub.commit(CALENDAR))
    assert json.loads((tmp_path / "out" / "manifest.json").read_text()) == first.model_dump(mode="json")

    told: list[str] = []
    hub.requests.clear()
    hub.repositories[CALENDAR]["train.jsonl"] = jsonl(rows[:3])
    assert prepared("calendar", tmp_path / "out", told.append) == first
    assert hub.requests == []
    assert [line for line in told if line.startswith("calendar: train: ") and "earlier" in line]
    (shared_cache / "data" / "nemo-gym-0.7.0" / "resources_servers/calendar/data/train.jsonl").write_text("{")
    third = prepared("calendar", tmp_path / "out", told.append)
    assert third.files["train.jsonl"].rows == 3, "a damaged file is fetched again"
    assert [request for request in hub.requests if "validation" in request] == []
    assert any("train: differs" in line for line in told)

    done = gymgate("run", "calendar", "--data", str(tmp_path / "out" / "train.jsonl"), "--json")
    report = json.loads(done.stdout)["environments"]["calendar"]
    assert (done.returncode, report["rollouts"]) == (0, 3), done.stderr


def test_bad_rows_are_named_and_left_out_only_if_told(hub: Hub, tmp_path: Path) -> None:
    wrong: dict[str, Any] = {"responses_create_params": {"input": [], "no_such_setting": 1}}
    lines = [jsonl([math_row(1)]), b"{broken\n", jsonl([wrong, {"question": "raw"}, math_row(2)])]
    hub.repositories[MATH] = {"train.jsonl": b"".join(lines), "validation.jsonl": jsonl([math_row(3)])}
    told: list[str] = []
    with pytest.raises(DataError, match=r"(?s)\b3 rows .*_train\.jsonl:2: .*JSON.*--skip-bad"):
        prepared("math_with_judge", tmp_path / "out", told.append)
    assert not (tmp_path / "out").exists()
    bad = [line for line in told if line.startswith("bad row")]
    assert "_train.jsonl:3: responses_create_params.no_such_setting: Extra inputs are not permitted" in bad[0]
    assert "_train.jsonl:4: " in bad[1]
    assert "('question')" in bad[1]
    hub.requests.clear()
    manifest = prepared("math_with_judge", tmp_path / "out", skip_bad=True)
    assert [request for request in hub.requests if "/train.jsonl" in request] == []
    note = manifest.files["train.jsonl"]
    assert (note.rows, note.sources[0].bad) == (2, 3)
    assert note.agents == {"math_with_judge_simple_agent": 2}, "the declared agent, not what the file says"


def test_own_questions_become_rows_by_a_prompt_and_new_names(tmp_path: Path) -> None:
    """A bad row is an error with file, line, field and the option that mends it; nothing is written."""
    (tmp_path / "prompt.yaml").write_text('user: "{question} Answer in a box."\n')
    texts = {"q.csv": 'question,answer\n"2, times 2?",4\n3 + 3?,6\n', "q.jsonl": ""}
    texts["q.jsonl"] = '{"question": "2, times 2?", "answer": "4"}\n{"question": "3 + 3?", "answer": "6"}\n'
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        own: dict[str, Any] = {"input": str(tmp_path / name), "prompt": str(tmp_path / "prompt.yaml")}
        own["splits"] = ("train",)
        with pytest.raises(DataError) as refused:
            prepared("math_with_judge", tmp_path / "out", **own)
        assert str(refused.value) == (
            f"math_with_judge: 2 rows cannot run, the first: {tmp_path / name}:{2 if name == 'q.csv' else 1}: lacks "
            "'expected_answer', and has 'question', 'answer'; --rename answer=expected_answer makes it of what is there "
            "(2 rows); --skip-bad leaves such rows out"
        )
        assert not (tmp_path / "out").exists()
        own["rename"] = (("answer", "expected_answer"),)
        prepared("math_with_judge", tmp_path, **own)
        rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
        assert [row["expected_answer"] for row in rows] == ["4", "6"]
        assert "2, times 2? Answer in a box." in json.dumps(rows[0]["responses_create_params"])
        own["rename"] = (("reply", "expected_answer"),)
        with pytest.raises(DataError, match="--rename reply=expected_answer: it has 'question', 'answer'"):
            prepared("math_with_judge", tmp_path / "out", **own)
    own["input"], own["rename"] = str(tmp_path / "odd.csv"), ()
    for odd, said in {
        "question,expected_answer\nWhat is 1,234 + 1?,1235\n": r"odd\.csv:2: has more cells",
        "question,expected_answer\n3 + 3?\n": r"odd\.csv:2: lacks 'expected_answer'",
        "question,answer,answer\n3 + 3?,6,7\n": "more than one column 'answer'",
    }.items():
        (tmp_path / "odd.csv").write_text(odd)
        with pytest.raises(GymgateError, match=said):
            prepared("math_with_judge", tmp_path / "out", **own)
    (tmp_path / "odd.csv").write_text(",question,expected_answer,\n0,3 + 3?,6,\n")
    assert prepared("math_with_judge", tmp_path / "index", **own).files["train.jsonl"].rows == 1, (
        "columns without a name"
    )
    with pytest.raises(ValidationError, match="renamed twice"):
        prepared("math_with_judge", tmp_path / "out", **own | {"rename": (("a", "b"), ("a", "c"))})


@pytest.mark.heavy
def test_a_gated_dataset_names_the_variable(
    hub: Hub, shared_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = b"---\nconfigs:\n- config_name: gpqa_diamond\n  data_files: gpqa_diamond.csv\n---\n"
    columns = (
        "Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer 3,Subdomain,Record ID"
    )
    csv = "\n".join([columns, *(f"Q{i}?,right,wrong a,wrong b,wrong c,Physics,rec{i}" for i in range(3))])
    hub.repositories[GPQA] = {"README.md": card, "gpqa_diamond.csv": csv.encode()}
    hub.gated[GPQA] = "hf_good"
    with pytest.raises(NeedMissingError, match=r"gated .*HF_TOKEN") as error:
        prepared("gpqa", tmp_path / "out")
    assert error.value.need == "HF_TOKEN"
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="'MY_TOKEN'"):
        prepared("gpqa", tmp_path / "out", token_env="MY_TOKEN")
    monkeypatch.setenv("MY_TOKEN", "hf_bad")
    with pytest.raises(NeedMissingError, match="MY_TOKEN"):
        prepared("gpqa", tmp_path / "out", token_env="MY_TOKEN")
    monkeypatch.setenv("MY_TOKEN", "hf_good")
    assert prepared("gpqa", tmp_path / "out", token_env="MY_TOKEN").files["benchmark.jsonl"].rows == 3
    found = subprocess.run(
        ["grep", "-rl", "hf_good", str(tmp_path), str(shared_cache)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert found.stdout == "", "the token is written nowhere"


def test_what_is_not_there_is_one_line(hub: Hub, tmp_path: Path) -> None:
    hub.repositories[CALENDAR] = {"train.jsonl": jsonl(packaged("calendar"))}
    with pytest.raises(
        DataError, match=r"validation: downloading validation\.jsonl of .*: not there"
    ) as error:
        prepared("calendar", tmp_path / "out")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()
    manifest = prepared("calendar", tmp_path / "out", splits=("train",))
    assert [*manifest.files] == ["train.jsonl"]
    with pytest.raises(ConfigError, match=r"of .*calendar, not of .*mcqa"):
        prepared("mcqa", tmp_path / "out", splits=("train",))
    prepared("resources_servers/calendar", tmp_path / "out", splits=("train",))  # the same by another name


def test_a_benchmark_that_shares_its_servers_name(hub: Hub, tmp_path: Path) -> None:
    """Its rows are made of what the release holds."""
    told: list[str] = []
    manifest = prepared("aegis_v4_safety", tmp_path / "out", told.append)
    assert (manifest.environment, manifest.files["benchmark.jsonl"].rows) == ("benchmarks/aegis_v4_safety", 5)
    assert told[0].endswith(" benchmarks/aegis_v4_safety")
    with pytest.raises(ConfigError, match=r"prepare_toolsandbox\.py.* benchmarks/toolsandbox$"):
        prepared("toolsandbox", tmp_path / "other")


def test_an_unreachable_hub_is_a_need(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(NeedMissingError, match=r"train: .*train\.jsonl .*network") as error:
        prepared("calendar", tmp_path / "out")
    assert error.value.need == "download"


def test_packages_that_stay_missing_are_an_error(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("gymgate.gym.preparation.prepare")
    lacks = {"event": "lacks", "requirements": ["no-such-package"]}
    monkeypatch.setattr(module, "run_program", lambda *args: iter([lacks]))
    monkeypatch.setattr(module, "_runtime_with", lambda config, *args: ensure_runtime(config.runtime))
    with pytest.raises(SetupError, match="no-such-package"):
        prepared("aime24", tmp_path / "out")


def test_what_came_before_a_missing_package_is_counted_once(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first dataset of a config is there when the script of the second one lacks a package, and is written again."""
    module = importlib.import_module("gymgate.gym.preparation.prepare")
    run_program = module.run_program
    lacks = [{"event": "lacks", "requirements": ["a-package"]}]

    def lacking_once(*args: Any) -> Iterator[dict[str, Any]]:
        for event in run_program(*args):
            yield lacks.pop() if event["event"] == "done" and lacks else event

    monkeypatch.setattr(module, "run_program", lacking_once)
    monkeypatch.setattr(module, "_runtime_with", lambda config, *args: ensure_runtime(config.runtime))
    hub.repositories[AIME] = {"README.md": b"", "data/train-00000-of-00001.parquet": parquet(SUMS)}
    [note] = prepared("aime24", tmp_path / "out").files.values()
    assert [source.rows for source in note.sources] == [note.rows]


@pytest.mark.heavy  # a minute: it installs reasoning_gym
def test_reasoning_gyms_generator_makes_rows(hub: Hub, tmp_path: Path) -> None:
    generator = ("--task", "chain_sum", "--size", "7", "--seed", "3")
    first = prepared("reasoning_gym", tmp_path / "one", script_arguments=generator)
    note = first.files["train.jsonl"]
    assert (note.rows, note.agents) == (7, {"reasoning_gym_simple_agent": 7})
    assert note.sources[0].origin["arguments"] == [*generator]
    prepared("reasoning_gym", tmp_path / "one", script_arguments=generator, splits=("validation",))
    manifest = json.loads((tmp_path / "one" / "manifest.json").read_text())
    assert [*manifest["files"]] == ["train.jsonl", "validation.jsonl"]
    with pytest.raises(DataError, match=r"status 2: .* --task .* required"):
        prepared("reasoning_gym", tmp_path / "three", script_arguments=("--no-such-option",))


def test_a_scripts_help_is_shown_and_nothing_is_written(tmp_path: Path) -> None:
    options = ("--script", "dataset_preprocess.py", "-o", str(tmp_path / "out"))
    done = gymgate("data", "prepare", "workplace_assistant", *options, "--", "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: dataset_preprocess.py")
    assert not (tmp_path / "out").exists()


def test_a_checkout_runs_its_own_scripts(hub: Hub, tmp_path: Path) -> None:
    """Also after the packaged release, which has the same version, has run its scripts."""
    base, checkout, edited = ensure_runtime(RuntimeConfig()), tmp_path / "checkout", "workplace_assistant"
    checkout.mkdir()
    (checkout / "nemo_gym").symlink_to(base.site / "nemo_gym")
    for kind in ("benchmarks", "environments", "responses_api_agents", "responses_api_models"):
        (checkout / kind).symlink_to(base.site / kind)
    shutil.copytree(base.site / "resources_servers" / edited, checkout / "resources_servers" / edited)
    subprocess.run([base.python, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True, timeout=60)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (packages / "paths.pth").write_text(f"{checkout}\n{base.site}\n")
    own = RuntimeConfig(interpreter=str(tmp_path / "venv" / "bin" / "python"))

    def usage(runtime: RuntimeConfig) -> str:
        script = {"script": "dataset_preprocess.py", "script_arguments": ("--help",)}
        with pytest.raises(ScriptHelp) as told:
            prepared(edited, tmp_path / "out", runtime=runtime, **script)
        return str(told.value).split()[1]

    assert usage(RuntimeConfig()) == "dataset_preprocess.py"
    script = checkout / "resources_servers" / edited / "dataset_preprocess.py"
    script.write_text("print('usage: mine')")
    assert usage(own) == "mine"


def test_raw_rows_of_ones_own(hub: Hub, tmp_path: Path) -> None:
    raw, prompt = tmp_path / "raw.jsonl", tmp_path / "prompt.yaml"
    raw.write_text('{"question": "1 + 1?", "expected_answer": "2"}\n\n{"problem": "2 + 2?"}\n')
    prompt.write_text("system: Be brief.\nuser: 'Solve: {question}'\n")
    with upstream_in_thread(answering({"/v1/models": {"data": [{"id": "any"}]}})) as policy:
        refused = gymgate("run", "math_with_judge", "--data", str(raw), "-b", policy.url, "-m", "any")
    assert refused.returncode == 1
    assert f"{raw}:1: has no responses_create_params" in refused.stderr
    assert "gymgate data prepare" in refused.stderr
    out = tmp_path / "out"
    command = (
        "data",
        "prepare",
        "math_with_judge",
        "--input",
        str(raw),
        "--prompt",
        str(prompt),
        "-o",
        str(out),
    )
    done = gymgate(*command)
    assert done.returncode == 1
    assert "raw.jsonl:3: " in done.stderr
    assert "'question'" in done.stderr
    done = gymgate(*command, "--skip-bad", "--split", "validation")
    assert done.returncode == 0, done.stderr
    (row,) = open_rows(str(out / "validation.jsonl"), environment=None)
    messages = [
        (message["role"], message["content"]) for message in row.data["responses_create_params"]["input"]
    ]
    assert messages == [("system", "Be brief."), ("user", "Solve: 1 + 1?")]
    assert row.agent == "math_with_judge_simple_agent"


def test_what_is_prepared_is_what_the_taskset_and_trl_read(hub: Hub, tmp_path: Path) -> None:
    hub.repositories[MATH] = {
        "train.jsonl": jsonl([math_row(n) for n in range(3)]),
        "validation.jsonl": jsonl([math_row(7)]),
    }
    prepared("math_with_judge", tmp_path)
    train, validation = (str(tmp_path / f"{split}.jsonl") for split in ("train", "validation"))
    rows = [row.data for row in open_rows(train, environment=None)]
    tasks = list(load_environment(env="math_with_judge", data=train).taskset)
    assert [task.data.row for task in tasks] == rows
    assert {row["agent_ref"]["name"] for row in rows} == {"math_with_judge_simple_agent"}
    assert [row["expected_answer"] for row in rows] == ["0", "2", "4"]
    spec = NeMoGymSpec("math_with_judge", data=train, eval_data=validation)
    datasets = spec.train_dataset, spec.eval_dataset
    assert datasets[1] is not None
    train_rows, (held_out,) = ([spec.row(item["prompt"]) for item in each] for each in datasets)
    assert sorted(row["expected_answer"] for _, row in train_rows) == ["0", "2", "4"]
    assert (held_out[0], held_out[1]["expected_answer"]) == ("math_with_judge", "14")


def test_the_older_release_prepares_the_same_rows(hub: Hub, tmp_path: Path) -> None:
    hub.repositories[AIME] = {"README.md": b"", "data/train-00000-of-00001.parquet": parquet(SUMS)}
    manifest = prepared("aime24", tmp_path / "out", runtime=RuntimeConfig(version="0.6.0"))
    assert (manifest.nemo_gym, manifest.files["benchmark.jsonl"].rows) == ("0.6.0", 6)
