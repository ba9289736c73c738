"""Recorded rollouts, as NeMo Gym ships and writes them and as gymgate writes them, cut into the policy's turns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from gymgate.core import codec
from gymgate.core.config import POLICY, Dialect
from gymgate.core.errors import ConfigError, DataError, GymgateError
from gymgate.gateway.dialects import translate_answer, translate_request
from gymgate.gateway.dialects.reading import fault_of
from gymgate.gateway.replay.conversation import Block, Item, blocks_of, is_policy_item, items_of
from gymgate.rollouts.outcome import number
from gymgate.rollouts.rowfile import RowFile

_RUN_FIELDS = {"calls", "result", "status"}
"""Fields of a line of `gymgate run -o`."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One model call: the conversation it was made with and the items it returned."""

    prompt: list[Item]
    """It lacks what the environment said if the agent did not record that."""
    output: list[Item]


@dataclass(frozen=True, slots=True)
class Recording:
    """One recorded rollout. It has no turns if the agent did not record the model's output."""

    path: str
    line: int
    """1-based."""
    index: int
    """0-based, over all files that were read together."""
    raw: dict[str, Any]
    steps: tuple[Turn, ...]

    @property
    def name(self) -> str:
        return f"{Path(self.path).name}:{self.line}"

    @property
    def row(self) -> dict[str, Any]:
        """The record as a row to run: without answer, reward and unset parameters."""
        params = {k: v for k, v in self.raw["responses_create_params"].items() if v is not None}
        rest = {k: v for k, v in self.raw.items() if k not in ("response", "reward")}
        return {**rest, "responses_create_params": params}

    @property
    def turns(self) -> list[list[Item]]:
        """The items that each model call returned."""
        return [step.output for step in self.steps]

    @property
    def tool_calls(self) -> int:
        return sum(item.get("type") == "function_call" for turn in self.turns for item in turn)

    @property
    def reward(self) -> float | None:
        return number(self.raw.get("reward"))

    @property
    def response(self) -> dict[str, Any]:
        response: dict[str, Any] = self.raw["response"]
        return response


def recorded_rollouts(
    paths: Iterable[str | Path],
    *,
    convert: Callable[[Any], Any] = lambda value: value,
    broken: list[DataError] | None = None,
) -> list[Recording]:
    """Read every recorded rollout of JSONL files, in order, of NeMo Gym or of runs of gymgate.

    `convert` is applied to the value of each line. `DataError` names file and line of a malformed one; with a list
    `broken`, it goes there and costs only its line.
    """
    recordings: list[Recording] = []
    for path in map(Path, paths):
        try:
            lines = path.read_bytes().split(b"\n")
        except OSError as error:
            failure = DataError(f"{path} cannot be read: {error.strerror}", path=str(path))
            if broken is None:
                raise failure from error
            broken.append(failure)
            continue
        for line, text in enumerate(lines, 1):
            if not text.strip():
                continue
            try:
                recordings.append(_recording(text, convert, path, line, len(recordings)))
            except DataError as error:
                if broken is None:
                    raise
                broken.append(error)
    return recordings


def recorded_rollout(paths: Sequence[str | Path], index: int) -> Recording:
    """Read one recorded rollout, 0-based over the lines of all files, and no other line.

    Raises `ConfigError` if there are fewer, and `DataError` for a file that is not there or a malformed line.
    """
    position = index
    for file in map(RowFile, paths):
        if 0 <= position < len(file):
            line, value = file.numbered_at(position)
            return _read(value, file.path, line, index)
        position -= len(file)
    choices = f"0 to {index - position - 1}" if position < index else "none"
    raise ConfigError(f"no recorded rollout {index} in {', '.join(map(str, paths))}; available: {choices}")


def _recording(text: bytes, convert: Callable[[Any], Any], path: Path, line: int, index: int) -> Recording:
    try:
        raw = convert(codec.loads(text))
    except ValueError as error:
        reason = f"is not JSON ({error}): {text[:40].decode(errors='replace')!r}"
        raise _form_error(path, line, reason) from None
    return _read(raw, path, line, index)


def _read(raw: Any, path: Path, line: int, index: int) -> Recording:
    turns: list[Turn] = []
    if isinstance(raw, dict) and raw.keys() >= _RUN_FIELDS:
        try:
            raw, turns = _read_run_line(raw)
        except GymgateError as error:
            raise _form_error(path, line, error.message) from error
        except (AttributeError, KeyError, TypeError) as error:
            raise _form_error(path, line, f"is a damaged line of a run ({error!r})") from error
    record = _check(raw, path, line)
    return Recording(str(path), line, index, record, tuple(turns or _steps(record)))


def _read_run_line(value: Mapping[str, Any]) -> tuple[dict[str, Any], list[Turn]]:
    """Return the rollout as NeMo Gym records it, and the policy's turns if the bodies of its calls were kept.

    A failed rollout of which nothing was kept has no output. Raises `DataError` for another one of which nothing was
    kept, and the errors of a translation.
    """
    record = {**(value["result"] or {}), "reward": value.get("reward")}
    turns: list[Turn] = []
    for call in value["calls"]:
        if call.get("model_server", POLICY) != POLICY or call.get("status_code") != 200:
            continue
        request, answer = call.get("request"), call.get("upstream_response") or call.get("response")
        if request and answer:
            translation = translate_request(request, call["dialect"], "responses")
            dialect: Dialect = "chat" if "choices" in answer else "responses"
            if (fault := fault_of(answer, dialect)) is not None:
                raise DataError(f"the endpoint {fault}")
            record["response"] = translate_answer(answer, translation, dialect, "responses")
            turns.append(Turn(items_of(translation), record["response"]["output"]))
    if turns:
        record.setdefault("responses_create_params", {"input": turns[0].prompt})
    elif value["status"] == "failed":
        record = {"responses_create_params": {}, "response": {"output": []}, **record}
    elif "response" not in record:
        raise DataError("keeps nothing that the policy said; run it with --bodies to replay it")
    return record, turns


def _check(raw: Any, path: Path, line: int) -> dict[str, Any]:
    for key in ("responses_create_params", "response"):
        if not isinstance(raw, dict) or not isinstance(raw.get(key), dict):
            raise _form_error(path, line, f"is not a recorded rollout: it has no {key!r}")
    if not isinstance(raw["response"].get("output"), list):
        raise _form_error(path, line, "is not a recorded rollout: its response has no list 'output'")
    record: dict[str, Any] = raw
    output = record["response"]["output"]
    states = output if _are_states(output) else [output]
    given = items_of(record["responses_create_params"])
    for what, items in (("input", given), *(("output", state) for state in states)):
        if not all(map(_is_item, items)):
            raise _form_error(path, line, f"has an {what} item that is not an object, or of another form")
    return record


def _is_item(value: Any) -> bool:
    """Whether a value has the form of an item: texts where they are needed, and parts that are texts or objects."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("type"), str | None)
        and isinstance(value.get("call_id"), str | int | None)
        and all(_is_content(value.get(name)) for name in ("content", "output"))
    )


def _is_content(value: Any) -> bool:
    parts = value if isinstance(value, list) else [value or ""]
    return all(isinstance(part, str | dict) for part in parts)


def _are_states(output: list[Any]) -> bool:
    """Whether an agent returned the conversation after each step (aviary)."""
    return bool(output) and all(isinstance(part, list) for part in output)


def _form_error(path: str | Path, line: int, what: str) -> DataError:
    return DataError(f"{path}:{line} {what}", path=str(path), line=line)


def _steps(raw: dict[str, Any]) -> Iterator[Turn]:
    prompt, output = items_of(raw["responses_create_params"]), raw["response"]["output"]
    return _transitions(prompt, output) if _are_states(output) else _flat(prompt, output)


def _transitions(start: list[Item], states: list[list[Item]]) -> Iterator[Turn]:
    """Turns of agents that return the conversation after each step: a prompt is the state before."""
    unchanged = len(start) if states[0][: len(start)] == start else 0
    prompt = states[0][: unchanged + _environment_items(states[0][unchanged:])]
    for state in states:
        rest = state[len(prompt) :]
        taken = next((n for n, item in enumerate(rest) if not is_policy_item(item)), len(rest))
        yield Turn(prompt, rest[:taken])
        prompt = state


def _flat(prompt: list[Item], output: list[Item]) -> Iterator[Turn]:
    """Turns of agents that return all items of all turns in one list."""
    own = bool(output) and output[0].get("role") in ("system", "developer")
    before: list[Item] = [] if own else prompt
    answered = {item.get("call_id") for item in output if item.get("type") == "function_call_output"}
    start = 0
    while start < len(output):
        end = _end_of_turn(output, start, answered)
        if end > start:
            yield Turn(before + output[:start], output[start:end])
        start = end + _environment_items(output[end:])


def _environment_items(items: Sequence[Item]) -> int:
    return next((n for n, item in enumerate(items) if is_policy_item(item)), len(items))


def _end_of_turn(output: Sequence[Item], start: int, answered: set[Any]) -> int:
    """Find where a turn ends: where the environment speaks, or must have spoken without being recorded.

    That is before any item after a call without an output, and before reasoning after a message.
    """
    for position in range(start, len(output)):
        item, last = output[position], output[position - 1] if position > start else {}
        if not is_policy_item(item):
            return position
        unanswered = last.get("type") == "function_call" and last.get("call_id") not in answered
        if unanswered and item.get("type") != "function_call":
            return position
        if item.get("type") == "reasoning" and last.get("type") == "message":
            return position
    return len(output)


RowT = TypeVar("RowT")


def pair_rows(recordings: Iterable[Recording], rows: Iterable[RowT]) -> list[RowT | None]:
    """Find for each recording the row that it was recorded for; `None` for one whose row is not there.

    The row's input is the recording's input or its beginning (agents append the first observation). Among such rows the
    one with most equal fields is chosen, then the one at the same position. Rows are dicts or have their dict as `.data`.
    """
    candidates = list(rows)
    by_input = _RowsByInput(candidates)
    pairs: list[RowT | None] = []
    for recording in recordings:
        likeness = {
            position: _likeness(recording, depth, _data(candidates[position]), position)
            for position, depth in by_input.begun_by(recording)
        }
        best = max(likeness, key=lambda position: (likeness[position], -position), default=None)
        pairs.append(None if best is None else candidates[best])
    return pairs


def recorded_rows(recordings: Iterable[Recording], rows: Iterable[RowT]) -> list[RowT]:
    """Return the rows whose input some recording begins with; unlike in `pair_rows`, rows may share a recording."""
    candidates = list(rows)
    by_input = _RowsByInput(candidates)
    recorded = {position for recording in recordings for position, _ in by_input.begun_by(recording)}
    return [row for position, row in enumerate(candidates) if position in recorded]


class _RowsByInput:
    """Rows by what their input says, so that finding a recording's rows takes no look at the others."""

    def __init__(self, rows: Iterable[Any]) -> None:
        self._positions: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        self._lengths: set[tuple[int, int, int]] = set()
        """Of the rows' inputs: blocks, and texts and media of the last block."""
        for position, row in enumerate(rows):
            blocks = blocks_of(items_of(_data(row).get("responses_create_params") or {}))
            self._positions[tuple(block.compared_parts() for block in blocks)].append(position)
            last = blocks[-1] if blocks else Block("user")
            self._lengths.add((len(blocks), len(last.texts), len(last.media)))

    def begun_by(self, recording: Recording) -> Iterator[tuple[int, int]]:
        """Yield position and number of blocks of each row whose input the recording begins with.

        The recording may go on in the input's last block. An empty input is that of an empty recording alone.
        """
        blocks = blocks_of(items_of(recording.raw["responses_create_params"]))
        parts = [block.compared_parts() for block in blocks]
        for count, texts, media in self._lengths:
            if count > len(blocks) or bool(count) != bool(blocks):
                continue
            begun = parts[:count]
            if count:
                last = blocks[count - 1]
                last = replace(last, texts=last.texts[:texts], media=last.media[:media])
                begun[-1] = last.compared_parts()
            for position in self._positions.get(tuple(begun), ()):
                yield position, count


def _likeness(recording: Recording, depth: int, data: Mapping[str, Any], position: int) -> tuple[int, ...]:
    """Rate how well a row fits a recording that begins with its input of `depth` blocks, greater is better."""
    task = recording.raw.get("_ng_task_index", recording.line - 1)
    shared = [k for k in data if k in recording.raw and k != "responses_create_params"]
    equal = sum(data[k] == recording.raw[k] for k in shared)
    return depth, equal - (len(shared) - equal), int(task == position)


def _data(row: Any) -> Mapping[str, Any]:
    data: Mapping[str, Any] = row if isinstance(row, Mapping) else row.data
    return data
