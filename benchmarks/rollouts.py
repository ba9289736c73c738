"""Rollouts/s without a model's delay: gymgate, with lean servers and stock ones, beside the agent's bare `/run` and NeMo Gym's
own collector; and the processor time of a rollout in each kind of process.

    ./dev python -m benchmarks rollouts [--rollouts 500] [--concurrency 1,20,64,256] [--rounds 3] [--without-stock]

Bare is the ceiling: the same servers, launched the same way, with the scripted policy's process as their model server
and rows posted by a plain aiohttp client. The contenders take turns in every round; Gym's collector is last, over its
own `gym env start`. `--interpreter` takes one that has nemo-gym in place of gymgate's own runtime.

A round of all takes about 2 minutes on two cores; none of a round's rollouts begins later than 60 s after its first.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

import aiohttp

from benchmarks.contenders import ENVIRONMENT, Run, bare_agent, bare_run, rate, stack_run
from benchmarks.gym_collector import stock_stack
from benchmarks.machine import Processors, describe, numbers, print_processors, print_table
from benchmarks.progress import Steps
from benchmarks.scripted_policy import scripted_policy
from gymgate.core.config import HTTPEndpoint, ReplayEndpoint, RuntimeConfig, StackConfig
from gymgate.gym.catalog import Catalog
from gymgate.gym.runtime import ensure_runtime
from gymgate.stack import acquire

STOCK = "NeMo Gym's own collector (`gym eval run`)"
STOCK_WEIGHT = 4
"""About how many rounds of one contender a start of Gym's own command takes, or a run of its collector."""
Rates = dict[tuple[str, int], list[float]]
Used = dict[int, dict[str, dict[str, list[float]]]]
"""Milliseconds of a rollout, by concurrency, contender and kind of process."""


@contextlib.asynccontextmanager
async def contenders(
    runtime_config: RuntimeConfig, url: str
) -> AsyncIterator[tuple[list[Any], dict[str, Run]]]:
    """The environment's rows and everything that can run them, the bare servers first."""
    runtime = await asyncio.to_thread(ensure_runtime, runtime_config)
    environment = Catalog(runtime.site, runtime.version).find(ENVIRONMENT)
    rows = [json.loads(line) for line in environment.data_file().path.read_text().splitlines()]
    replay = ReplayEndpoint(rollouts=tuple(str(file.path) for file in environment.recordings()))
    session = aiohttp.ClientSession(
        cookie_jar=aiohttp.DummyCookieJar(), connector=aiohttp.TCPConnector(limit=0)
    )
    config = StackConfig(environments=(ENVIRONMENT,), runtime=runtime_config)
    stock_config = config.model_copy(update={"stock_servers": True})
    responses, chat = HTTPEndpoint(base_url=url, dialect="responses"), HTTPEndpoint(base_url=url)
    async with (
        bare_agent(runtime, url) as agent,
        acquire(config) as stack,
        acquire(stock_config) as stock,
        session,
    ):
        yield (
            rows,
            {
                "bare": bare_run(session, agent),
                "gymgate --stock-servers, Responses": stack_run(stock, responses),
                "gymgate --stock-servers, chat-completions": stack_run(stock, chat),
                "gymgate, Responses": stack_run(stack, responses),
                "gymgate, chat-completions (translated)": stack_run(stack, chat),
                "gymgate, replay": stack_run(stack, replay),
            },
        )


async def measure(args: argparse.Namespace, url: str, steps: Steps) -> tuple[Rates, Used]:
    """Rates and processor time of every contender and concurrency, a round at a time."""
    rates: Rates = {}
    used: Used = {concurrency: {} for concurrency in args.concurrency}
    async with contenders(RuntimeConfig(interpreter=args.interpreter), url) as (rows, runs):
        for number in range(args.rounds):
            for concurrency in args.concurrency:
                steps.begin(
                    f"round {number + 1} of {args.rounds}: c={concurrency}, {len(runs)} contenders", len(runs)
                )
                for name, run in runs.items():
                    count = args.rollouts if concurrency > 1 else args.rollouts // 4
                    processors = Processors()
                    found = await rate(rows, count, concurrency, run)
                    rates.setdefault((name, concurrency), []).append(found)
                    for kind, seconds in processors.since().items():
                        kinds = used[concurrency].setdefault(name, {})
                        kinds.setdefault(kind, []).append(seconds / (count + len(rows)) * 1000)
    return rates, used


def measure_stock(url: str, args: argparse.Namespace, steps: Steps) -> Rates:
    """NeMo Gym's own launcher and collector, on the same machine right after the others."""
    rates: Rates = {}
    steps.begin("`gym env start`", STOCK_WEIGHT)
    with stock_stack(url) as stock:
        for number in range(args.rounds):
            for concurrency in args.concurrency:
                steps.begin(
                    f"round {number + 1} of {args.rounds}: c={concurrency}, `gym eval run`", STOCK_WEIGHT
                )
                count = args.rollouts if concurrency > 1 else args.rollouts // 4
                rates.setdefault((STOCK, concurrency), []).append(stock.collect(count, concurrency))
    return rates


def report(rates: Rates, concurrencies: Iterable[int]) -> None:
    """Medians per second, and as a part of bare's at the same concurrency."""
    medians = {key: statistics.median(values) for key, values in rates.items()}
    rows = []
    for name in dict.fromkeys(name for name, _ in medians):
        cells = [_cell(medians, name, concurrency) for concurrency in concurrencies]
        rows.append([name, *cells])
    print_table(["rollouts/s (of bare)", *(f"c={concurrency}" for concurrency in concurrencies)], rows)


def _cell(medians: Mapping[tuple[str, int], float], name: str, concurrency: int) -> str:
    found = medians[name, concurrency]
    return f"{found:.0f} ({found / medians['bare', concurrency]:.2f})"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=500, help="a multiple of 20")
    parser.add_argument("--concurrency", type=numbers, default=[1, 20, 64, 256])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--interpreter")
    parser.add_argument("--without-stock", action="store_true", help="leave NeMo Gym's own command out")
    args = parser.parse_args(argv)
    print(describe("aiohttp"), flush=True)
    levels = args.rounds * len(args.concurrency)
    steps = Steps(6 * levels + (0 if args.without_stock else STOCK_WEIGHT * (levels + 1)))
    with scripted_policy() as url:
        rates, used = asyncio.run(measure(args, url, steps))
        if not args.without_stock:
            rates |= measure_stock(url, args, steps)
    report(rates, args.concurrency)
    for concurrency, found in used.items():
        print_processors(f"processor ms a rollout, c={concurrency}", found)


if __name__ == "__main__":
    main()
