"""How often a client that keeps text and renders the history anew shows a policy other ids than it sampled.

    .venv-train/bin/python -m benchmarks.tokens_drift [--stories 100]

Conversations of six calls with reasoning and tools; the policy's ids are scripted: once as encoding its text gives them, once
with a boundary where encoding puts none every 60 characters or so, as sampling does. No model, nothing is downloaded.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from pathlib import Path

from benchmarks.machine import describe, print_table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.conversations import CONFIGS, Story, Turn, drifted, plain_prompts, play

WORDS = (
    "the",
    "calendar",
    "holds",
    "no such",
    "record",
    "so",
    "I will",
    "search again",
    "and update what was found",
)
TURNS = 6


def story(family: str, randomness: random.Random, *, split: bool) -> Story:
    """A user's question, tool calls, and now and then an answer that the user comes back to."""

    def text(count: int) -> str:
        return " ".join(randomness.choices(WORDS, k=count))

    turns = []
    for _ in range(TURNS):
        calls = ((("search", "update")[randomness.randrange(2)], text(3), randomness.randrange(50)),)
        pieces = tuple(randomness.randint(40, 80) for _ in range(5)) if split else (10**6,)
        asks = randomness.random() < 0.8
        turns.append(Turn(text(12), text(6), calls if asks else (), pieces, text(20)))
    return Story(family, "all", text(8), text(12), tuple(turns))


def measure(family: str, stories: int, *, split: bool) -> tuple[int, int, int]:
    """Prompts after a rollout's first; of those, how many drift for the plain client, and for gymgate."""
    randomness = random.Random(0)
    plain = ours = 0
    for _ in range(stories):
        told = story(family, randomness, split=split)
        played = asyncio.run(play(told))
        plain += drifted(plain_prompts(told, played), played.sampled)
        ours += drifted([turn.prompt_ids for turn in played.conversation.turns], played.sampled)
    return stories * (TURNS - 1), plain, ours


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stories", type=int, default=100)
    args = parser.parse_args()
    print(describe("renderers", "transformers"), flush=True)
    rows = []
    for family in CONFIGS:
        cells = [family]
        for split in (False, True):
            count, plain, ours = measure(family, args.stories, split=split)
            cells += [f"{plain / count:.0%}", f"{ours / count:.0%}"]
        rows.append(cells)
    head = [
        "renderer",
        "encoding's own ids: rendered anew",
        "gymgate",
        "one other boundary in 60 characters: rendered anew",
        "gymgate",
    ]
    print_table(head, rows)


if __name__ == "__main__":
    main()
