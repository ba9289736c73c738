"""The whole program: read the config, get each source's file, write its rows."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from .directories import Directories, sha256_of
from .events import EndedError, Events, chain
from .fetching import Fetcher
from .row_writer import RowWriter
from .scripts import run_script
from .sources import DeclaredData, RawSource

PR_SET_PDEATHSIG = 1


def main() -> int:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    order = json.load(sys.stdin)
    events = Events(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)  # what scripts and NeMo Gym print is for the log
    os.chdir(order["workspace"])
    try:
        prepare(order, events)
    except EndedError as end:
        events.send(end.event, **end.values)
    except BaseException as error:
        traceback.print_exc()
        events.send("failed", doing=events.doing, chain=chain(error))
    else:
        events.send("done")
    return 0


def prepare(order: dict[str, Any], events: Events) -> None:
    """Write `TYPE.jsonl` into the order's `stage` for each type of data."""
    events.step("reading the config")
    directories, declared = Directories(order), DeclaredData(order)
    fetcher, writer = Fetcher(order, directories, events), RowWriter(declared, directories, events)
    with contextlib.ExitStack() as files:
        opened: dict[str, IO[str]] = {}
        for source in _sources(order, declared, directories, events):
            path, origin = fetcher.fetch(source)
            if source.type not in opened:
                staged = Path(order["stage"]) / f"{source.type}.jsonl"
                opened[source.type] = files.enter_context(staged.open("w"))
            writer.write(source, path, origin, opened[source.type])


def _sources(
    order: dict[str, Any], declared: DeclaredData, directories: Directories, events: Events
) -> Iterable[RawSource]:
    """A file of the user's, the files that a script writes, or what the config declares."""
    if file := order["input"]:
        origin = {"kind": "file", "path": file, "sha256": sha256_of(Path(file))}
        dataset = {"jsonl_fpath": file, "prompt_config": order["prompt"]}
        return [RawSource(Path(file).name, order["type"], dataset, origin=origin)]
    if order["script"] or order["script_arguments"]:
        arguments = " ".join(order["script_arguments"])
        events.step(f"running {order['script'] or 'its script'} {arguments}".rstrip())
        return run_script(order, directories)
    return declared.sources()
