"""Look for races: run the scenes in universes that a seed decides, and check what gymgate promises.

    ./dev simulate                              200 universes a scene (slow ones fewer), and the seeds of bugs found before
    ./dev simulate --universes 5000             more of them, with other seeds: --from 1000
    ./dev simulate --scene collect --seed 3     one universe again, with the error's traceback
    ./dev simulate --mutants --universes 2000   does a scene find each of the deliberate races in tests/mutants/races?

Scenes are modules in `tests/simulate/scenes`. A universe in which a promise does not hold is printed with its scene and seed.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import time
import traceback

import simloom

simloom.pin_hashseed()  # else another process would order sets in another way, and a seed would be another universe

from scenes import SCENES  # noqa: E402
from universes import Scene, quiet, run_many, run_one  # noqa: E402

from mutants import try_mutants  # noqa: E402

ENOUGH = 50
"""Universes in which each fault of a scene must have happened."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="./dev simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--universes",
        type=int,
        default=200,
        metavar="N",
        help="universes a scene (200; world a quarter, restarts half of them)",
    )
    parser.add_argument(
        "--from", type=int, default=0, dest="first", metavar="SEED", help="the first seed (0)"
    )
    parser.add_argument(
        "--seconds", type=float, metavar="N", help="stop a scene after so many seconds of CPU time"
    )
    parser.add_argument(
        "--scene",
        action="append",
        choices=sorted(SCENES),
        metavar="NAME",
        help=f"one of {', '.join(SCENES)}; may be repeated",
    )
    parser.add_argument(
        "--seed", type=int, metavar="N", help="run this universe alone and show what it raises"
    )
    parser.add_argument(
        "--twice", action="store_true", help="check that each universe is the same when it is run again"
    )
    parser.add_argument(
        "--until-found",
        action="store_true",
        help="run as many universes of each scene, up to the first violation",
    )
    parser.add_argument(
        "--mutants", nargs="*", metavar="WORD", help="try deliberate races, all or those described by a WORD"
    )
    asked = parser.parse_args()
    if asked.mutants is not None:
        return try_mutants(asked.universes, asked.mutants)
    quiet()
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        del os.environ[name]
    gc.freeze()  # each universe ends with a collection, which need not look at what was imported
    scenes = [SCENES[name] for name in asked.scene or SCENES]
    if asked.seed is not None:
        return max(replay(scene, asked.seed) for scene in scenes)
    if asked.twice:
        return max(compare(scene, asked.first, asked.universes) for scene in scenes)
    print(f"{'scene':<12}{'universes':>10}{'CPU s':>9}{'per CPU s':>12}  faults that happened")
    return max(explore(scene, asked) for scene in scenes)


def explore(scene: Scene, asked: argparse.Namespace) -> int:
    """Run a scene's universes, print a line about them, and return 1 if a promise did not hold."""
    first, universes = asked.first, asked.universes
    if not asked.until_found:
        universes = max(1, round(universes * scene.share))
    seeds = [*scene.seeds, *(seed for seed in range(first, first + universes) if seed not in scene.seeds)]
    result = run_many(scene, seeds, seconds=asked.seconds, most_failures=1 if asked.until_found else 5)
    faults = ", ".join(f"{name} {count}" for name, count in sorted(result.faults.items()))
    rate = result.universes / result.seconds
    print(f"{scene.name:<12}{result.universes:>10}{result.seconds:>9.1f}{rate:>12.1f}  {faults}", flush=True)
    for seed, error in result.failures.items():
        print(f"  VIOLATION in {scene.name}, seed {seed}: {type(error).__name__}: {error}")
        print(f"    ./dev simulate --scene {scene.name} --seed {seed}", flush=True)
    missing = [name for name in scene.faults if not result.faults[name]]
    if missing and not result.failures and result.universes >= ENOUGH:
        print(f"  VIOLATION: in {scene.name} these faults never happened: {', '.join(missing)}")
        return 1
    return int(bool(result.failures))


def replay(scene: Scene, seed: int) -> int:
    """Run one universe, and print what it raised."""
    universe = run_one(scene, seed)
    print(
        f"{scene.name}, seed {seed}: {universe.outcome}, {universe.digest[:12]}; {dict(sorted(universe.coverage.items()))}"
    )
    if universe.error is not None:
        traceback.print_exception(universe.error)
    return int(universe.error is not None)


def compare(scene: Scene, first: int, universes: int) -> int:
    """Return 1 if a universe differs from itself."""
    began = time.monotonic()
    other = [
        seed
        for seed in range(first, first + universes)
        if run_one(scene, seed).digest != run_one(scene, seed).digest
    ]
    print(
        f"{scene.name:<12}{universes:>10} universes twice in {time.monotonic() - began:.1f} s; not the same: {other[:20]}",
        flush=True,
    )
    return int(bool(other))


if __name__ == "__main__":
    random.seed(0)
    sys.exit(main())
