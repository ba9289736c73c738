"""Every published figure, by name: `python -m benchmarks [NAME [OPTIONS]]`."""

from __future__ import annotations

import importlib
import signal
import sys

NAMES = {
    "startup": "time to the first rollout and memory, 1 to 8 environments, beside `gym env start` and verifiers' own taskset",
    "rollouts": "rollouts/s with an instant policy, beside bare `/run` and NeMo Gym's collector",
    "verifiers": "rollouts/s through verifiers, beside an empty harness and verifiers' own taskset",
    "early-start": "wall time of `gymgate eval run`, its stack started during verifiers' import and after it",
    "realistic": "a slow, uneven policy at hundreds of concurrent rollouts: wall time over the ideal, what is added",
    "gateway": "latency and calls/s of the gateway, beside a minimal proxy and LiteLLM",
    "conversation": "CPU time of a call at turns 1, 10 and 100 of a long conversation, beside a minimal proxy",
    "tokens": "the token path beside plain chat; 512 concurrent rollouts with a 50 ms policy",
    "growth": "routes, environments and dataset rows: what grows, and how",
    "reading": "reading a run of a million rollouts, and starting a replay of ten thousand recordings",
    "scaling": "what a node, ten and a thousand carry, from measured costs, and where the next wall is",
    "workers": "calls/s of one environment whose servers have several workers, and the limit of each kind of process",
    "ray": "rollouts/s on 1, 2 and 4 nodes of a Ray cluster on this machine, with a slow policy (in .venv-train)",
    "soak": "mixed environments under random faults for half an hour: what is lost, what grows",
    "agreement": "same rows, same vLLM server or script: gymgate beside NeMo Gym's own collector (in .venv-engine)",
    "sessions": "hits in the prefix caches of two vLLM replicas, by a router with and without sessions (in .venv-engine)",
    "engines": "same rows, seeds and weights through each engine that samples token ids, on real vLLM (in .venv-engine)",
    "curve": "a real model learns a packaged environment with TRL on a CPU: held-out scores before and after (in .venv-engine)",
    "sandboxes": "what a rollout costs in a sandbox of the providers local and docker",
    "hops": "where one rollout at a time spends its time: before, between and after its model calls, and in which process",
    "pairs": "this checkout beside another commit's: start, rollouts/s, an eval, import, in alternated pairs",
    "calls": "functions of gymgate that one rollout runs through, and its JSON parsing and writing",
}
MODULES = {"verifiers": "verifiers_ceiling", "ray": "ray_nodes", "early-start": "early_start"}


def main() -> None:
    """Run one, or list them."""
    if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
        unknown = sys.argv[1:2] and sys.argv[1] not in ("-h", "--help")
        print(__doc__, *(f"  {name:10}  {text}" for name, text in NAMES.items()), sep="\n")
        sys.exit(f"benchmarks: there is no {sys.argv[1]!r}" if unknown else 0)
    name = sys.argv.pop(1)
    sys.argv[0] = f"python -m benchmarks {name}"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is stopped on the way out
    importlib.import_module(f"benchmarks.{MODULES.get(name, name)}").main()


if __name__ == "__main__":
    main()
