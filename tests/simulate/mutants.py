"""Whether the scenes find deliberate races: each of `tests/mutants/races` is tried in a copy of the source."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests/mutants"))

from listed import Mutant, read_mutants  # noqa: E402

LEAST = 0.9
"""Share of the races that has to be found."""
LIMIT_S = 900.0
"""For the universes of one scene."""


def try_mutants(universes: int, words: list[str]) -> int:
    """Print for each race the scene and seed that find it. Return 1 if too many are not found.

    Those of which it is known why no scene finds them are not tried, and count as not found.
    """
    mutants = [
        mutant
        for mutant in read_mutants(ROOT / "tests/mutants/races")
        if not words or any(word in f"{mutant} {mutant.at}" for word in words)
    ]
    found = 0
    for mutant in mutants:
        if mutant.survives is not None:
            print(f"{'not tried':<44}{mutant}\n  {mutant.survives}", flush=True)
            continue
        began = time.monotonic()
        seen = find(mutant, universes)
        found += seen is not None
        took = f"{time.monotonic() - began:6.1f} s"
        print(f"{'found by ' + seen if seen else 'NOT FOUND':<34}{took}  {mutant}", flush=True)
    print(f"{found} of {len(mutants)} races found within {universes} universes of a scene")
    return int(found < LEAST * len(mutants))


def find(mutant: Mutant, universes: int) -> str | None:
    """Return the scene and seed that find a race."""
    with tempfile.TemporaryDirectory(prefix="gymgate-races-") as directory:
        source = Path(directory) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        path, text = mutant.applied(ROOT)
        (source / path.relative_to(ROOT / "src")).write_text(text)
        for scene in mutant.tests:
            command = [sys.executable, str(ROOT / "tests/simulate"), "--scene", Path(scene).stem]
            command += ["--universes", str(universes), "--until-found"]
            environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
            try:
                ended = subprocess.run(
                    command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
                )
            except subprocess.TimeoutExpired:
                continue
            if said := re.search(r"VIOLATION in (\w+), seed (\d+)", ended.stdout):
                return f"{said[1]}, seed {said[2]}"
            if ended.returncode:
                sys.exit(f"{mutant}: {ended.stdout}{ended.stderr}")
    return None
