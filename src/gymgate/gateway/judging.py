"""Which calls to judges and user simulators failed, and which rollouts they were made for.

A judge call fails if its endpoint fails after all retries, if it has no endpoint, or if the server that made it closed
the connection before it had the answer. A later answer to an equal request clears the failure: the server
tried again.

    server ----"is this right?"----> judge ---> HTTP 500     failed
    server ----"is this right?"----> judge ---> an answer    cleared
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from gymgate.core.errors import GymgateError, PolicyError, from_wire
from gymgate.gateway.call import Call
from gymgate.gateway.repeats import RequestKey


class JudgeCalls:
    """One rollout's calls to model servers other than the policy's."""

    def __init__(self) -> None:
        self._open: dict[Call, RequestKey] = {}
        self._failed: dict[RequestKey, GymgateError] = {}
        self._lost_elsewhere: Callable[[], GymgateError | None] = lambda: None

    @property
    def failure(self) -> GymgateError | None:
        """The first failure that no later answer has made up for."""
        own = next(iter(self._failed.values()), None)
        return own or next(
            (lost_call_error(call) for call in self._open if call.connection_lost), self._lost_elsewhere()
        )

    @property
    def under_way(self) -> bool:
        """Whether a call has no end yet."""
        return bool(self._open)

    def watch(self, lost: Callable[[], GymgateError | None]) -> None:
        """Count what `lost` returns as a failure too: of calls that may have been made for this rollout."""
        self._lost_elsewhere = lost

    def note_failure(self, question: RequestKey, error: GymgateError, call: Call | None = None) -> None:
        """Note that the endpoint did not answer a question; `call` asked it, if it was one of these calls."""
        self._failed[question] = error

    def forgive(self, question: RequestKey) -> None:
        """Forget a failure of the same question: it has an answer."""
        self._failed.pop(question, None)

    def note_answer(self, question: RequestKey) -> None:
        """Note an answer to one of these calls: it makes up for a failure, or a lost call, of the same question."""
        self.forgive(question)
        lost = [call for call, other in self._open.items() if other == question and call.connection_lost]
        for call in lost:
            del self._open[call]

    def note_start(self, key: RequestKey, call: Call) -> None:
        """Note a new call."""
        self._open[call] = _question(key)

    def note_end(self, key: RequestKey, call: Call, *, written: bool) -> None:
        """Note the end of a call; `written`: the server that made it got the answer or the error."""
        self._open.pop(call, None)
        question = _question(key)
        if written and call.record.status_code == 200:
            self.note_answer(question)
        elif (
            call.record.status_code is not None
        ):  # without one its rollout was released, which is nobody's failure
            self.note_failure(question, call.failure or lost_call_error(call), call)

    def note_refusal(self, model_server: str, error: GymgateError) -> None:
        """Note a call to a model server that has no endpoint."""
        self.note_failure(RequestKey(model_server, "", b"", None), error)


@dataclass(eq=False)
class _Watcher:
    """A rollout that keyless calls to these model servers may have been made for."""

    judges: JudgeCalls
    model_servers: Collection[str]
    earlier: frozenset[Call] = field(default_factory=frozenset)
    """Calls whose connections were lost before the rollout began."""

    def concerns(self, model_server: str, call: Call | None) -> bool:
        return model_server in self.model_servers and call not in self.earlier


class KeylessJudgeCalls(JudgeCalls):
    """Calls without a rollout's key: a failure counts for every rollout that was running with this judge."""

    def __init__(self) -> None:
        super().__init__()
        self._watchers: list[_Watcher] = []

    @contextmanager
    def shared_with(self, judges: JudgeCalls, model_servers: Collection[str]) -> Iterator[None]:
        """Count failures of keyless calls to `model_servers` as failures of this rollout, for as long as it runs."""
        # What was lost before was lost for an earlier rollout.
        watcher = _Watcher(
            judges, model_servers, frozenset(call for call in self._open if call.connection_lost)
        )
        self._watchers.append(watcher)
        judges.watch(lambda: self._lost_call(watcher))
        try:
            yield
        finally:
            self._watchers.remove(watcher)

    def _lost_call(self, watcher: _Watcher) -> GymgateError | None:
        for call in self._open:
            if call.connection_lost and watcher.concerns(call.record.model_server, call):
                return _shared_error(lost_call_error(call))
        return None

    def note_answer(self, question: RequestKey) -> None:
        super().note_answer(question)
        for watcher in self._watchers:
            watcher.judges.forgive(_without_key(question))

    def note_failure(self, question: RequestKey, error: GymgateError, call: Call | None = None) -> None:
        for watcher in self._watchers:
            if watcher.concerns(question.model_server, call):
                watcher.judges.note_failure(_without_key(question), _shared_error(error))


def lost_call_error(call: Call) -> PolicyError:
    """The error for a call whose connection was closed before its answer was written."""
    return PolicyError(
        f"model server {call.record.model_server!r} had not answered when the server that asked it closed the connection",
        retryable=True,
    )


def _shared_error(error: GymgateError) -> GymgateError:
    message = (
        f"{error.message} (the failed call carried no rollout key and cannot be attributed to one rollout, so that "
        "every rollout running with this judge failed)"
    )
    return from_wire({**error.to_wire(), "message": message})


def _without_key(question: RequestKey) -> RequestKey:
    """Tell a question that was asked without a rollout's key from an equal one of a rollout: it may be another's."""
    return question._replace(idempotency_key="none")


def _question(key: RequestKey) -> RequestKey:
    """The same for equal requests, marked as retries or not."""
    return key._replace(idempotency_key=None)
