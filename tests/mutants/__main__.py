"""Mutation testing of the parts where a mistake costs most: `./dev mutants [OPTIONS] [WORD ...]`.

Each mutant is one deliberate mistake, listed in a TOML file beside this program: the symbol and the piece of code it is in, what
stands there instead, what a user would see, and the tests that should fail. They run in copies of the working tree. With WORDs
only mutants are tried whose file, symbol or description contains one of them.

A mutant that the tests let pass survives. Either write the test, or give it `survives = "REASON"` if nothing observable
changes. The exit status is 1 if a mutant cannot be located any more (then adapt it to the code's new shape), if one survives
without a reason, or if more than 5% survive. A test that hangs counts as failed.

General tools (mutmut, cosmic-ray) make mutants of every line: 65 for `gateway/repeats.py` alone, most of them harmless, and
they give no place to a reason that stays with a mutant when the code changes.
"""

from __future__ import annotations

import argparse
import difflib
import queue
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from listed import Mutant, read_mutants
from locate import NotLocatedError
from trial import Copy, Outcome

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = 0.05
BASELINE_LIMIT_S = 1800.0


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options = _options()
    mutants = [
        mutant
        for mutant in read_mutants()
        if not (options.no_gym and mutant.needs_gym)
        and (not options.words or any(word in f"{mutant} {mutant.at}" for word in options.words))
    ]
    lost = _lost(mutants)
    if options.list or lost or not mutants:
        for mutant in mutants if options.list else ():
            print(mutant)
        print(f"{len(mutants)} mutants, {len(lost)} of them cannot be located")
        return 1 if lost or not mutants else 0
    with tempfile.TemporaryDirectory(prefix="gm-", ignore_cleanup_errors=True) as directory:
        made = [Copy(ROOT, Path(directory) / str(number)) for number in range(options.jobs)]
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for copy in made:
            copies.put(copy)
        if not options.no_baseline and not _passes_unchanged(copies, mutants):
            return 1
        began = time.monotonic()
        with ThreadPoolExecutor(options.jobs) as pool:
            try:
                survivors = [each for each in pool.map(lambda each: _try(each, copies), mutants) if each]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for copy in made:
                    copy.stop()
                raise
        return _report(mutants, survivors, time.monotonic() - began)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="./dev mutants", description="Try whether tests notice deliberate mistakes."
    )
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="only mutants with one of these in their description"
    )
    parser.add_argument("--list", action="store_true", help="list them, try none")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (2)")
    parser.add_argument(
        "--no-gym", action="store_true", help="leave out those whose tests run real Gym servers"
    )
    parser.add_argument(
        "--no-baseline", action="store_true", help="do not run the tests without a mutation first"
    )
    return parser.parse_args()


def _lost(mutants: list[Mutant]) -> list[Mutant]:
    """Those that cannot be located, reported."""
    lost = []
    for mutant in mutants:
        try:
            mutant.applied(ROOT)
        except NotLocatedError as error:
            lost.append(mutant)
            print(f"NOT LOCATED  {mutant}\n  {error}\n  Adapt the entry in tests/mutants/{mutant.room}.toml.")
    return lost


def _passes_unchanged(copies: queue.SimpleQueue[Copy], mutants: list[Mutant]) -> bool:
    """Whether the tests pass without a mutation; otherwise they would say nothing of one."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    copy = copies.get()
    outcome = copy.run(["-n", "2", "--dist", "loadfile", *tests], BASELINE_LIMIT_S)
    copies.put(copy)
    if outcome.code == 0:
        print(f"unchanged: {len(tests)} files or cases of tests pass ({outcome.seconds:.0f} s)", flush=True)
    else:
        print(f"{outcome.output}\nThe tests fail without a mutation: {outcome.reason}")
    return outcome.code == 0


def _try(mutant: Mutant, copies: queue.SimpleQueue[Copy]) -> Mutant | None:
    """Try one; return it if it survives."""
    copy = copies.get()
    try:
        path, text = mutant.applied(copy.root)
        original = path.read_text()
        outcome = copy.try_mutation(path, text, mutant.tests, mutant.limit_s)
    finally:
        copies.put(copy)
    diff = difflib.unified_diff(original.splitlines(), text.splitlines(), lineterm="", n=1)
    _say(mutant, outcome, [line for line in diff if not line.startswith(("---", "+++", "@@"))])
    return None if outcome.noticed else mutant


def _say(mutant: Mutant, outcome: Outcome, diff: list[str]) -> None:
    if outcome.noticed:
        late = "; its entry says that it survives: remove that" if mutant.survives else ""
        print(f"killed    {outcome.seconds:5.1f} s  {mutant}  [{outcome.reason}]{late}", flush=True)
        return
    lines = [f"SURVIVED  {outcome.seconds:5.1f} s  {mutant}"]
    if mutant.survives:
        lines.append(f"  as expected: {mutant.survives}")
    lines += [f"  {line}" for line in diff]
    print("\n".join([*lines, f"  tests: {' '.join(mutant.tests)}"]), flush=True)


def _report(mutants: list[Mutant], survivors: list[Mutant], seconds: float) -> int:
    share = len(survivors) / len(mutants)
    unexplained = [mutant for mutant in survivors if not mutant.survives]
    print(
        f"{len(mutants) - len(survivors)} of {len(mutants)} mutants killed, {len(survivors)} survived ({share:.1%}), "
        f"{len(unexplained)} of them without a reason; {seconds:.0f} s"
    )
    for mutant in unexplained:
        print(f"  survived without a reason: {mutant}")
    return 1 if unexplained or share > ALLOWED else 0


if __name__ == "__main__":
    sys.exit(main())
