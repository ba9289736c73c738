"""What the cache holds, by files written by hand; who uses it is said by locks of this process."""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from gymgate.cli import cli
from gymgate.cli.cache import age_text
from gymgate.cli.output import size_text
from gymgate.core.config import RuntimeConfig
from gymgate.gym.runtime import ensure, locks
from gymgate.gym.runtime.cache import CacheEntry, cache_entries, clean, gym_cache, measure
from gymgate.gym.runtime.venv import MARKER

DAY = 86400.0


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GYMGATE_CACHE", str(tmp_path))
    monkeypatch.setattr(locks, "_held", {})
    return tmp_path


def written(path: Path, content: str = "x" * 5000, *, days: float = 0.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    age(path, days)
    return path


def age(path: Path, days: float) -> None:
    os.utime(path, (time.time() - days * DAY,) * 2)


def runtime(
    cache: Path, name: str = "nemo-gym-0.7.0-py3.13.0-abc", *requirements: str, days: float = 0.0
) -> Path:
    place = cache / "runtimes" / name
    written(place / "lib" / "big.py")
    noted = {"nemo_gym": "0.7.0", "python": "3.13.0", "requirements": requirements}
    written(place / MARKER, json.dumps(noted), days=days)
    return place


@contextmanager
def used(file: Path) -> Iterator[None]:
    """As by another process: a lock of another opening of the file."""
    with file.open() as handle:
        fcntl.flock(handle, fcntl.LOCK_SH)
        yield


def names(found: list[CacheEntry]) -> dict[str, str]:
    return {part.path.name: part.kind for part in found}


def test_what_lies_in_the_cache(cache: Path) -> None:
    runtime(cache, "nemo-gym-a", "Numpy>=2", "math-verify[antlr]==0.8")
    written(cache / "runtimes" / "nemo-gym-b.tmp-1" / "x")
    written(cache / "runtimes" / ".lock", "")
    written(cache / "npm" / "codex-1" / MARKER, '{"package": "@openai/codex@1"}')
    for name in (
        "gym/hub/a",
        "data/nemo-gym-0.7.0/b",
        "data/.nemo-gym-0.7.0.lock",
        "rows/c.index",
        "run/e",
        "odd",
    ):
        written(cache / name)
    written(cache / "gym.tmp-2" / "old" / "x")
    found = cache_entries()
    assert names(found) == {
        "nemo-gym-a": "runtime",
        "nemo-gym-b.tmp-1": "leftover",
        "codex-1": "command",
        "gym.tmp-2": "leftover",
        "nemo-gym-0.7.0": "downloads",
        "gym": "downloads",
        "rows": "index",
    }
    assert [part.packages for part in found if part.kind == "runtime"] == [["numpy", "math-verify"]]


def test_what_was_not_used_for_long_goes(cache: Path) -> None:
    old, new = runtime(cache, "old", days=31), runtime(cache, "new", days=29)
    rows = written(cache / "rows" / "a.index").parent
    age(rows, 31)
    left = written(cache / "npm" / "codex.tmp-1" / "x").parent
    logs = written(cache / "run" / "log", days=99)
    told = {removal.entry.path: removal.reason for removal in clean(30 * DAY)}
    assert told == {old: "", rows: "", left: ""}
    assert [path.exists() for path in (old, new, rows, left, logs)] == [False, True, False, False, True]


def test_all_is_what_nobody_uses(cache: Path) -> None:
    mine, free = runtime(cache, "mine"), runtime(cache, "free")
    data = written(cache / "data" / "nemo-gym-0.7.0" / "rows.jsonl").parent
    busy = written(cache / "data" / "nemo-gym-0.6.0" / "rows.jsonl").parent
    fetched = written(gym_cache() / "hub" / "weights").parent
    with used(mine / MARKER), locks.locked(cache / "data" / ".nemo-gym-0.6.0.lock", "preparing"):
        told = {removal.entry.path: removal.reason for removal in clean(None)}
    assert f" {os.getpid()}" in told[mine]
    assert (told[free], told[data]) == ("", "")
    assert told[cache / "gym"]  # held since `gym_cache`
    assert [path.exists() for path in (mine, free, data, busy, fetched)] == [True, False, False, True, True]


def test_a_dry_run_removes_nothing_and_waits_for_nobody(cache: Path) -> None:
    place, left = runtime(cache), written(cache / "runtimes" / "a.tmp-1" / "x").parent
    lock = written(cache / "runtimes" / ".lock", "7, which is making a")
    with lock.open() as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        told = {removal.entry.path: not removal.reason for removal in clean(None, dry_run=True)}
    assert told == {place: True, left: False}
    assert place.exists()


def test_use_is_noted_and_keeps(cache: Path) -> None:
    place = runtime(cache, days=90)
    assert locks.hold(place / MARKER)
    [part] = cache_entries()
    assert time.time() - part.last_used < 60
    assert part.users() == [os.getpid()]
    age(place / MARKER, 90)
    assert locks.hold(place / MARKER)  # again, without another descriptor
    assert time.time() - cache_entries()[0].last_used < 60
    assert all(removal.reason for removal in clean(None))
    assert place.exists()


def test_what_is_gone_or_was_made_anew_is_not_held(cache: Path) -> None:
    place = runtime(cache)
    assert locks.hold(place / MARKER)
    (place / MARKER).unlink()
    assert not locks.hold(place / MARKER)
    runtime(cache)
    with locks.try_exclusive(place / MARKER) as unused:
        assert unused
    assert locks.hold(place / MARKER)
    with locks.try_exclusive(place / MARKER) as unused:
        assert not unused


def test_a_file_with_several_links_counts_once(tmp_path: Path) -> None:
    one, two = written(tmp_path / "one" / "a", "x" * 100_000), written(tmp_path / "two" / "b", "x" * 50_000)
    os.link(one, two.with_name("a"))
    sizes = [path.lstat().st_blocks * 512 for path in (one, two, one.parent, two.parent, tmp_path)]
    assert measure(tmp_path) == sum(sizes)


def test_a_file_system_that_refuses_is_told(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = runtime(cache)

    def refuse(descriptor: int, operation: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().name == MARKER:
            raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert locks.hold(place / MARKER)
    [removal] = clean(None)
    assert (removal.reason, place.exists()) == ("Function not implemented", True)


def test_the_command_lists_and_cleans(cache: Path) -> None:
    runtime(cache, "nemo-gym-old", "numpy", days=40)
    new = runtime(cache, "nemo-gym-new", days=2)
    written(cache / "rows" / "0.index")
    listed = CliRunner().invoke(cli, ["cache"])
    assert listed.exit_code == 0, listed.output
    lines = {line.split()[1]: line.split() for line in listed.output.splitlines()[1:-1]}
    assert lines["nemo-gym-old"][-3:] == ["40", "d", "ago"]
    assert "numpy" in lines["nemo-gym-old"]
    assert lines["rows"][0] == "index"
    assert str(cache) in listed.output.splitlines()[-1]
    told = json.loads(CliRunner().invoke(cli, ["cache", "--json"]).output)
    assert {Path(part["path"]).name: part["requirements"] for part in told["entries"]} == {
        "nemo-gym-old": ["numpy"],
        "nemo-gym-new": [],
        "rows": [],
    }
    dry = CliRunner().invoke(cli, ["cache", "clean", "--dry-run"])
    assert re.search("would remove .*nemo-gym-old", dry.output)
    with used(new / MARKER):
        done = CliRunner().invoke(cli, ["cache", "clean", "--unused-for", "1d"])
        assert done.exit_code == 0, done.output
        assert "removed runtime nemo-gym-old" in done.output
        assert re.search(rf"kept runtime nemo-gym-new: .* {os.getpid()}\b", done.output)
    done = CliRunner().invoke(cli, ["cache", "clean", "--all", "--json"])
    assert [removal["removed"] for removal in json.loads(done.output)] == [True] * 2


def test_an_interpreter_that_was_named_keeps_its_runtime(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = runtime(cache)
    monkeypatch.setattr(ensure, "inspect_runtime", lambda python, requirements: python)
    ensure.find_runtime(RuntimeConfig(interpreter=str(place / "bin" / "python")))
    assert [removal.reason for removal in clean(None, dry_run=True)] == [f"in use by process {os.getpid()}"]


def test_files_that_runtimes_share_are_removed_once(cache: Path) -> None:
    first = written(runtime(cache, "nemo-gym-a") / "lib" / "shared.bin", "x" * 4_000_000)
    os.link(first, runtime(cache, "nemo-gym-b") / "lib" / "shared.bin")
    totals = [
        CliRunner().invoke(cli, ["cache", "clean", "--all", *options]).output.splitlines()[-1]
        for options in (["--dry-run"], [])
    ]
    assert [total.rpartition(" 4")[0] for total in totals] == ["would remove at most", "removed"]


def test_an_empty_cache(cache: Path) -> None:
    assert CliRunner().invoke(cli, ["cache"]).output == f"nothing in {cache}\n"
    assert CliRunner().invoke(cli, ["cache", "clean", "--all"]).output == "removed 0 B\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--unused-for", "30"], "'30'"),
        (["--unused-for", "-1d"], "'-1d'"),
        (["--everything"], "--everything"),
    ],
)
def test_wrong_words(cache: Path, words: list[str], told: str) -> None:
    done = CliRunner().invoke(cli, ["cache", "clean", *words])
    assert done.exit_code == 2
    assert told in done.output


def test_sizes_and_ages_for_people() -> None:
    assert [size_text(size) for size in (0, 999, 12_300, 5e6, 1.25e9, 3e12)] == [
        "0 B",
        "999 B",
        "12 kB",
        "5 MB",
        "1.2 GB",
        "3000.0 GB",
    ]
    assert [age_text(seconds) for seconds in (5, 60, 7200, 3 * DAY)] == [
        "now",
        "1 min ago",
        "2 h ago",
        "3 d ago",
    ]
