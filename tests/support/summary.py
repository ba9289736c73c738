"""The end of `./dev test`: how each part ended, what its files cost, and the counts in the last line.

    python summary.py DIRECTORY NOT_RUN...

`NOT_RUN` says what is left; `{}` in it is the number of tests that were not selected. The directory has `parts` (a line for
each: number, exit status, seconds, title) and the reports of `accounting` as NUMBER.json.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

MOST_CPU_S = 20
SHOWN = 30


def main(directory: Path, not_run: str) -> None:
    counts: Counter[str] = Counter()
    files: dict[str, dict[str, float]] = {}
    deselected = 0
    print("\nPart                                        Result                                Time")
    for line in (directory / "parts").read_text().splitlines():
        number, status, seconds, title = line.split("\t")
        path = directory / f"{number}.json"
        report: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        found = Counter(report.get("counts", {}))
        if status != "0" and not found["failed"]:
            found["failed"] = 1  # a check without tests, or a part that ended before its tests did
        counts += found
        files |= report.get("files", {})
        deselected += report.get("deselected", 0)
        result = f"{closing(found)}" if report else "passed" if status == "0" else f"failed (exit {status})"
        print(f"{title:<43} {result:<34} {int(seconds) // 60:>4}:{int(seconds) % 60:02}")
    dearest = sorted(files.items(), key=lambda item: -item[1]["cpu"])
    print(f"\nFiles with the most CPU time (of {len(files)}):\n   CPU s       s")
    for name, cost in dearest[:SHOWN]:
        print(f"{cost['cpu']:8.1f}{cost['seconds']:8.1f}  {name}")
    over = [name for name, cost in dearest if cost["cpu"] > MOST_CPU_S]
    print(f"Above {MOST_CPU_S} s of CPU time: {', '.join(over) or 'none'}")
    print(not_run.format(deselected))
    print(closing(counts))


def closing(counts: Counter[str]) -> str:
    """Return the counts as CI reads them."""
    text = f"{counts['passed']} passed, {counts['failed']} failed"
    return f"{text}, {counts['skipped']} skipped" if counts["skipped"] else text


if __name__ == "__main__":
    main(Path(sys.argv[1]), " ".join(sys.argv[2:]))
