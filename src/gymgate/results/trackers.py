"""The process in which a library logs a run: `python -m gymgate.results.trackers LIBRARY`, which `Tracking` starts.

It reads a line of JSON for each message: the run's name and settings first, then metrics, then how the run ended. It
answers `started` with the place where the run is shown, `done` at the end, or `failed` with the reason.
A new library is a class in `LIBRARIES`.
"""

from __future__ import annotations

import itertools
import os
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from gymgate.core import codec
from gymgate.core.errors import described

PROJECT = "gymgate"
"""Project, or experiment, of runs that no variable of the library puts elsewhere."""
END_S = 60.0
"""Seconds that a library has after the run, to start if it has not, and to send what it has not sent."""
MAX_WAITING = 100
"""Messages that wait for the library here; more of them wait in the pipe."""
Values = Mapping[str, Any]


class Tracker(Protocol):
    """A run of a library."""

    where: str
    """Where the run is shown."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log metrics; `step` is the number of rollouts that have ended."""

    def finish(self, summary: Mapping[str, float], *, failed: bool) -> None:
        """Log the final metrics, and return when everything is stored or sent."""


class Wandb:
    """A run of Weights & Biases; `WANDB_PROJECT` is its project."""

    def __init__(self, name: str, settings: Values) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=name,
            config=dict(settings),
            settings=wandb.Settings(console="off"),
        )
        self.where = str(self._run.url or Path(self._run.dir).parent)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self, summary: Mapping[str, float], *, failed: bool) -> None:
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=int(failed))


class MLflow:
    """A run of MLflow, in the experiment `MLFLOW_EXPERIMENT_NAME`. Its names have no `@`: pass@1 is pass_at_1."""

    def __init__(self, name: str, settings: Values) -> None:
        import mlflow

        self._mlflow = mlflow
        self._step = 0
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT)
        run = mlflow.start_run(run_name=name)
        for some in _batches({self._name(key): str(value)[:500] for key, value in settings.items()}):
            mlflow.log_params(some)
        self.where = f"{mlflow.get_tracking_uri()}, run {run.info.run_id}"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._step = step
        for some in _batches({self._name(name): value for name, value in metrics.items()}):
            self._mlflow.log_metrics(some, step=step)

    def finish(self, summary: Mapping[str, float], *, failed: bool) -> None:
        self.log(summary, self._step)
        self._mlflow.end_run("FAILED" if failed else "FINISHED")

    @staticmethod
    def _name(text: str) -> str:
        return re.sub(r"[^\w. :/-]", "_", text.replace("@", "_at_"), flags=re.ASCII)


class Trackio:
    """A run of Trackio."""

    def __init__(self, name: str, settings: Values) -> None:
        import trackio

        self._trackio = trackio
        trackio.init(project=PROJECT, name=name, config=dict(settings), embed=False)
        self.where = f"trackio show --project {PROJECT}"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._trackio.log(dict(metrics), step=step)

    def finish(self, summary: Mapping[str, float], *, failed: bool) -> None:
        self._trackio.log(dict(summary))
        self._trackio.finish()


def _batches(values: Values) -> Iterator[dict[str, Any]]:
    """Yield the values by a hundred, which is what MLflow's servers take at a time."""
    items = iter(values.items())
    while some := dict(itertools.islice(items, 100)):
        yield some


LIBRARIES: Mapping[str, Callable[[str, Values], Tracker]] = {
    "wandb": Wandb,
    "mlflow": MLflow,
    "trackio": Trackio,
}


def main(library: str) -> None:
    """Log the run that stdin describes."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what the library prints is no answer

    def answer(**message: Any) -> None:
        os.write(answers, codec.dumps(message) + b"\n")

    for number in (signal.SIGINT, signal.SIGTERM):  # the end of stdin ends this process, soon
        signal.signal(number, signal.SIG_IGN)
    messages: queue.Queue[dict[str, Any] | None] = queue.Queue(MAX_WAITING)
    threading.Thread(target=_receive, args=(messages,), daemon=True).start()
    try:
        log_run(LIBRARIES[library], messages, answer)
    except BaseException as error:  # some libraries end the process
        answer(failed=described(error))
        sys.exit(1)
    answer(done=True)


def _receive(messages: queue.Queue[dict[str, Any] | None]) -> None:
    for line in sys.stdin.buffer:
        messages.put(codec.loads_object(line))
    messages.put(None)
    time.sleep(END_S)
    os._exit(1)  # a library that hangs, and nobody is there to end it


def log_run(
    start: Callable[[str, Values], Tracker],
    messages: queue.Queue[dict[str, Any] | None],
    answer: Callable[..., None],
) -> None:
    """Log the run that messages describe, until the last one, or until they end (`None`)."""
    first = messages.get() or {}
    tracker = start(first["name"], first["settings"])
    answer(started=tracker.where)
    summary: dict[str, float] = {}
    end = "lost"
    while end == "lost" and (message := messages.get()) is not None:
        summary = message.get("summary", summary)
        if "metrics" in message:
            tracker.log(message["metrics"], message["step"])
        end = message.get("end", end)
    tracker.finish(summary, failed=end != "completed")


if __name__ == "__main__":
    main(sys.argv[1])
