"""The token path beside plain chat: what a model call gains in time, and 512 concurrent rollouts with a 50 ms policy.

    ./dev engine python -m benchmarks tokens [calls | rollouts] [--turns 12] [--concurrency 512] [--waves 4] [--rounds 3]

*calls*: one growing conversation against one vLLM server (`benchmarks.engine`), once through `/v1/chat/completions`, where the
server renders the history, and once through `TokenPolicy` and `/inference/v1/generate`.
*rollouts*: a real stack of example_single_tool_call, two policy calls and one tool call per rollout; every policy sleeps 50 ms.
The ideal is calls x 50 ms / concurrency. Bare `/run` over the same servers is what NeMo Gym takes on this machine. Five
rounds of both parts take about six minutes on two cores; a part that takes longer than `--limit-s` ends the program.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from benchmarks.contenders import ENVIRONMENT, bare_agent, bare_run
from benchmarks.delayed_policy import delayed_policy, row_with
from benchmarks.engine.model import real_model
from benchmarks.engine.server import vllm_server
from benchmarks.machine import cpu_s, descendants, describe, print_table, pss_mb
from benchmarks.progress import Steps
from benchmarks.realistic import in_turn
from gymgate.core.config import RuntimeConfig, StackConfig
from gymgate.gym.catalog import Catalog
from gymgate.gym.runtime import ensure_runtime
from gymgate.stack import Stack, acquire
from gymgate.tokens import Sample, TokenPolicy
from gymgate.tokens.conversation import make_renderer
from gymgate.tokens.engines import CallableEngine, VLLMGenerateEngine

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from support.conversations import Story, Turn, renderer, sampled_ids  # noqa: E402

POLICY_S = 0.05
SAMPLED = 8
RESULT = "the calendar holds no such record, so search again in another one."


Result = TypeVar("Result")
Ask = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


@dataclass
class Calls:
    """One path's conversation; seconds of each call, by turn and round."""

    name: str
    seconds: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    shown: dict[int, int] = field(default_factory=dict)
    """Ids of each turn's prompt."""
    messages: list[dict[str, Any]] = field(default_factory=list)

    async def turn(self, number: int, ask: Ask) -> float:
        """Make the next call, and answer it as an agent with a tool would; its seconds."""
        started = time.perf_counter()
        answer = await ask({"messages": self.messages, "max_tokens": SAMPLED, "ignore_eos": True})
        taken = time.perf_counter() - started
        self.seconds[number].append(taken)
        self.shown[number] = answer["usage"]["prompt_tokens"]
        result = {"role": "tool", "tool_call_id": f"call_{number}", "content": RESULT}
        self.messages += [answer["choices"][0]["message"], result]
        return taken


async def measure_calls(url: str, rounds: int, turns: int) -> tuple[Calls, Calls, dict[int, list[float]]]:
    """Both paths over one server, their calls alternating; and what the token path took outside its requests."""
    from transformers import AutoTokenizer

    inner = VLLMGenerateEngine(url)
    steps = Steps(rounds)
    waited = 0.0

    async def timed(ids: list[int], sampling: dict[str, Any]) -> Sample:
        nonlocal waited
        started = time.perf_counter()
        sample = await inner.generate(
            ids, {**sampling, "ignore_eos": True, "stop_token_ids": []}, session="s"
        )
        waited = time.perf_counter() - started
        return sample

    policy = TokenPolicy(CallableEngine(timed), make_renderer(AutoTokenizer.from_pretrained(real_model())))
    chat, tokens, own = Calls("chat"), Calls("tokens"), defaultdict[int, list[float]](list)
    async with aiohttp.ClientSession(url) as session:

        async def plain(request: dict[str, Any]) -> dict[str, Any]:
            async with session.post("/v1/chat/completions", json=request) as response:
                answer: dict[str, Any] = await response.json()
                return answer

        for number in range(rounds):
            steps.begin(f"conversation {number + 1} of {rounds}, {turns} calls on each path")
            conversation = policy.conversation()
            for path in (chat, tokens):
                path.messages = [{"role": "user", "content": "find the record"}]
            for number in range(turns):
                await chat.turn(number, plain)
                own[number].append(await tokens.turn(number, conversation) - waited)
    await inner.close()
    return chat, tokens, own


def print_calls(chat: Calls, tokens: Calls, own: dict[int, list[float]]) -> None:
    """Medians over the rounds."""
    rows = []
    for turn in sorted({0, len(chat.shown) // 2, len(chat.shown) - 1}):
        plain, ours, outside = (
            statistics.median(of[turn]) * 1000 for of in (chat.seconds, tokens.seconds, own)
        )
        ratio = statistics.median(
            mine / theirs for mine, theirs in zip(tokens.seconds[turn], chat.seconds[turn], strict=True)
        )
        rows.append(
            [
                f"call {turn + 1}",
                f"{chat.shown[turn]}, {tokens.shown[turn]}",
                f"{plain:.1f}",
                f"{ours:.1f}",
                f"{ratio:.2f}",
                f"{outside:.2f}",
            ]
        )
    print_table(
        ["", "ids shown: chat, token path", "chat, ms", "token path, ms", "ratio", "outside its request, ms"],
        rows,
    )


@dataclass
class Wave:
    """What one contender showed with all rollouts live at once."""

    name: str
    wall_s: list[float] = field(default_factory=list)
    caller_ms: list[float] = field(default_factory=list)
    """CPU per rollout of the process that asks for rollouts, where the token path is."""
    daemon_ms: list[float] = field(default_factory=list)
    kb_each: float | None = None
    """Of memory per live rollout, in the caller and the daemon."""
    servers_kb_each: float | None = None
    """The same in NeMo Gym's servers."""


async def measure_rollouts(args: argparse.Namespace, url: str) -> list[Wave]:
    """Every contender in turn, `rounds` times."""
    runtime = await asyncio.to_thread(ensure_runtime, RuntimeConfig())
    path = Catalog(runtime.site, runtime.version).find(ENVIRONMENT).data_file().path
    row = row_with([POLICY_S, POLICY_S], json.loads(path.read_text().splitlines()[0]))
    rows = [row] * (args.waves * args.concurrency)
    session = aiohttp.ClientSession(
        cookie_jar=aiohttp.DummyCookieJar(), connector=aiohttp.TCPConnector(limit=0)
    )
    policy = make_policy()
    steps = Steps(args.rounds)
    waves = [Wave("bare"), Wave("gymgate, chat-completions"), Wave("gymgate, token path")]
    async with (
        bare_agent(runtime, url) as agent,
        acquire(StackConfig(environments=(ENVIRONMENT,))) as stack,
        session,
    ):
        bare = bare_run(session, agent)
        for number in range(args.rounds):
            steps.begin(f"round {number + 1} of {args.rounds}: {len(rows):,} rollouts on each of three paths")
            waves[0].wall_s.append(await in_turn(rows, args.concurrency, lambda _: bare(row)))
            await through_stack(waves[1], rows, args.concurrency, stack, lambda: chat_policy)
            await through_stack(waves[2], rows, args.concurrency, stack, policy.conversation)
    return waves


async def through_stack(
    wave: Wave, rows: list[Any], concurrency: int, stack: Stack, policy: Callable[[], Any]
) -> None:
    async def run(number: int) -> None:
        used = policy()
        rollout = await stack.run(rows[number], policy=used, record_bodies=False)
        assert rollout.error is None, rollout.error
        assert len(rollout.calls) == 2, rollout.calls
        assert used is chat_policy or len(used.segments) == 1

    daemon = (await stack.status())["pid"]
    before = memory_mb(daemon)
    used = [cpu_s(os.getpid()), cpu_s(daemon)]
    peak = asyncio.ensure_future(peak_mb(daemon))
    wave.wall_s.append(await in_turn(rows, concurrency, run))
    wave.caller_ms.append((cpu_s(os.getpid()) - used[0]) * 1000 / len(rows))
    wave.daemon_ms.append((cpu_s(daemon) - used[1]) * 1000 / len(rows))
    peak.cancel()
    highest = await peak
    if wave.kb_each is None:  # later rounds reuse what the first one took
        wave.kb_each, wave.servers_kb_each = (
            max(0.0, after - earlier) * 1024 / concurrency
            for earlier, after in zip(before, highest, strict=True)
        )


def memory_mb(daemon: int) -> tuple[float, float]:
    """Proportional set sizes: of this process and the daemon, and of everything below the daemon."""
    return pss_mb(os.getpid()) + pss_mb(daemon), sum(map(pss_mb, descendants(daemon)))


async def peak_mb(daemon: int) -> tuple[float, float]:
    """The largest seen of each, until cancelled."""
    peak = (0.0, 0.0)
    try:
        while True:
            now = memory_mb(daemon)
            peak = (max(peak[0], now[0]), max(peak[1], now[1]))
            await asyncio.sleep(0.5)
    except asyncio.CancelledError:
        return peak


async def chat_policy(request: dict[str, Any]) -> dict[str, Any]:
    """Text after 50 ms: the tool first, then an answer."""
    await asyncio.sleep(POLICY_S)
    message: dict[str, Any] = {"role": "assistant", "content": "It is cold in San Francisco."}
    if request["messages"][-1]["role"] != "tool":
        function = {"name": "get_weather", "arguments": '{"city": "San Francisco"}'}
        message["tool_calls"] = [{"id": "call_1", "type": "function", "function": function}]
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 0,
        "model": "policy",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }


def make_policy() -> TokenPolicy:
    """The same as ids, through Qwen3's renderer."""
    family = "qwen3"
    chosen = renderer(family)
    line = Turn("", "It is cold in San Francisco.", (), (10**6,), "")
    answer = sampled_ids(Story(family, None, None, "x", ()), line)
    call = [*answer[:-1], *_tool_call(), answer[-1]]
    closing = chosen._tokenizer.convert_tokens_to_ids("</tool_response>")

    async def engine(prompt_ids: list[int], sampling: dict[str, Any]) -> Sample:
        await asyncio.sleep(POLICY_S)
        ids = answer if closing in prompt_ids[-12:] else call
        return Sample(list(ids), [-0.5] * len(ids), "stop", (0, 0))

    return TokenPolicy(CallableEngine(engine), chosen, sampling={"temperature": 1.0})


def _tool_call() -> list[int]:
    from support.conversations import tokenizer

    said = '\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "San Francisco"}}\n</tool_call>'
    return list(tokenizer().encode(said, add_special_tokens=False))


def print_rollouts(waves: list[Wave], args: argparse.Namespace) -> None:
    """Medians over the rounds."""
    ideal = 2 * args.waves * POLICY_S
    rows = []
    for wave in waves:
        wall = statistics.median(wave.wall_s)
        rows.append(
            [
                wave.name,
                f"{args.waves * args.concurrency / wall:.0f}",
                f"{wall / ideal:.1f}",
                f"{wall / statistics.median(waves[0].wall_s):.2f}",
                _median(wave.caller_ms),
                _median(wave.daemon_ms),
                "-" if wave.kb_each is None else f"{wave.kb_each:.0f}",
                "-" if wave.servers_kb_each is None else f"{wave.servers_kb_each:.0f}",
            ]
        )
    print_table(
        [
            f"{args.waves * args.concurrency} rollouts, {args.concurrency} at once",
            "rollouts/s",
            "wall / ideal",
            "wall / bare",
            "CPU ms per rollout, caller",
            "daemon",
            "KB per live rollout, caller and daemon",
            "KB, NeMo Gym's servers",
        ],
        rows,
    )


def _median(values: list[float]) -> str:
    return f"{statistics.median(values):.2f}" if values else "-"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", choices=["calls", "rollouts", "all"], default="all")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--concurrency", type=int, default=512)
    parser.add_argument("--waves", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit-s", type=float, default=900, help="of each part")
    parser.add_argument("--url", help="a vLLM server that runs already, for the calls; else one is started")
    args = parser.parse_args(argv)
    print(describe("aiohttp", "renderers", "transformers"), flush=True)
    if args.part in ("calls", "all"):
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as servers:
            url = args.url or servers.enter_context(vllm_server(Path(folder) / "vllm.log"))
            print_calls(*run(measure_calls(url, args.rounds, args.turns), args.limit_s))
    if args.part in ("rollouts", "all"):
        with delayed_policy() as url:
            print_rollouts(run(measure_rollouts(args, url), args.limit_s), args)


def run(part: Coroutine[Any, Any, Result], limit_s: float) -> Result:
    """What a part of the program found, in time."""
    try:
        return asyncio.run(asyncio.wait_for(part, limit_s))
    except TimeoutError:
        raise SystemExit(f"benchmarks: not at an end after {limit_s:g} s") from None


if __name__ == "__main__":
    main()
