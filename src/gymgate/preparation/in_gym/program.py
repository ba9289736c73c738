"""The whole of it: read the config, get each source's file, write its rows."""

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

from .declared import Declared, Source
from .fetching import Fetcher
from .places import Places
from .rows import RowWriter
from .scripts import scripted
from .stamps import digest_of
from .told import HelpError, LacksError, RefusedError, Told, chain

PR_SET_PDEATHSIG = 1


def main() -> int:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    order = json.load(sys.stdin)
    told = Told(os.fdopen(int(sys.argv[1]), "w"))
    sys.argv = sys.argv[:1]
    os.chdir(order["workspace"])
    try:
        prepare(order, told)
    except LacksError as error:
        told.tell("lacks", requirements=error.requirements)
        return 1
    except HelpError as error:
        told.tell("help", text=str(error))
        return 0
    except RefusedError as error:
        told.tell("refused", error=error.error, message=str(error))
        return 1
    except BaseException as error:
        traceback.print_exc()
        told.tell("failed", doing=told.doing, chain=chain(error))
        return 1
    told.tell("done")
    return 0


def prepare(order: dict[str, Any], told: Told) -> None:
    """Write `TYPE.jsonl` into the order's `stage` for each type of data."""
    told.step("reading the config")
    places, declared = Places(order), Declared(order)
    fetcher, writer = Fetcher(order, places, told), RowWriter(declared, places, told)
    with contextlib.ExitStack() as files:
        opened: dict[str, IO[str]] = {}
        for source in _sources(order, declared, places, told):
            path, origin = fetcher.fetched(source)
            if source.type not in opened:
                staged = Path(order["stage"]) / f"{source.type}.jsonl"
                opened[source.type] = files.enter_context(staged.open("w"))
            writer.write(source, path, origin, opened[source.type])


def _sources(order: dict[str, Any], declared: Declared, places: Places, told: Told) -> Iterable[Source]:
    """A file of the user's, what a script makes, or what the config declares."""
    if given := order["input"]:
        origin = {"kind": "file", "path": given, "sha256": digest_of(Path(given))}
        dataset = {"jsonl_fpath": given, "prompt_config": order["prompt"]}
        return [Source(Path(given).name, order["type"], dataset, made=origin)]
    if order["script"] or order["script_arguments"]:
        told.step(f"running {order['script'] or 'its script'} {' '.join(order['script_arguments'])}".rstrip())
        return scripted(order, places)
    return declared.sources()
