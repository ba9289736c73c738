"""The policy of a run before it starts: an endpoint, asked for its models, or recorded rollouts and the rows that they answer."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yarl import URL

from gymgate.core import codec
from gymgate.core.config import (
    DEFAULT_KEY_VARIABLE,
    HTTPEndpoint,
    JudgeEndpoint,
    ReplayEndpoint,
    StackConfig,
    cache_dir,
)
from gymgate.core.errors import ConfigError, DataError, PolicyError
from gymgate.core.files import open_descriptor, replacing
from gymgate.core.http_client import HTTPClient, Response
from gymgate.core.json_server import PROBE_S, listed_models, probe
from gymgate.gateway.backends.http import HTTPBackend, request_headers
from gymgate.gateway.backends.ready import wait_until_ready
from gymgate.gateway.replay.recording import Recording, recorded_rollouts, recorded_rows
from gymgate.gym.row_sources import RowSource
from gymgate.rollouts import Row
from gymgate.rollouts.answers import oracle_rollout
from gymgate.runs.stored.layout import ROLLOUTS, run_directories

if TYPE_CHECKING:
    from gymgate.stack import Policy

Log = Callable[[str], None]
SHOWN_MODELS = 5
"""Models of an endpoint that a message lists."""


async def ask_models(
    stack: StackConfig, policy: Policy | None, wait_s: float, log: Log, *, known: bool = True
) -> tuple[StackConfig, Policy | None]:
    """Ask the endpoints of policy and judges for their models, after waiting up to `wait_s` for each; return stack and policy.

    Endpoints that only another machine may reach are not asked, except for a policy without a model. Those with a known model
    are asked for it, too, unless `known` is false. Raises as `endpoint_with_model`.
    """
    if isinstance(policy, HTTPEndpoint):
        is_asked = policy.model is None or (known and stack.is_local)
        policy = await endpoint_with_model(policy, wait_s, log) if is_asked else policy.resolved()
    if not stack.is_local:
        return stack, policy
    judges = {name: judge for name, judge in stack.models if known or getattr(judge, "model", "") is None}
    models = {**dict(stack.models), **await ask_judges(judges, wait_s, log)}
    return stack.model_copy(update={"models": tuple(sorted(models.items()))}), policy


async def endpoint_with_model(endpoint: HTTPEndpoint, wait_s: float, log: Log) -> HTTPEndpoint:
    """Ask an endpoint for its models, after waiting up to `wait_s` for it; return it with key and model.

    Raises `ConfigError` if the key's variable is not set, and for a wrong address, key or model; `PolicyError` if no
    replica answers in time.
    """
    endpoint = endpoint.resolved()
    answers = await _answers(endpoint, wait_s, log)
    if endpoint.model is None:
        models = {url: _models_in(answer) for url, answer in answers.items()}
        endpoint = endpoint.model_copy(update={"model": _only_model(models, answers)})
    if endpoint.dialect == "responses":
        for url in answers:
            error = await _short_call(url, endpoint)
            if error is not None and error.status_code in (404, 405):
                raise ConfigError(
                    f"{url}/responses answered {error.status_code}; leave out --dialect responses for a server that has only "
                    "/chat/completions"
                )
    return endpoint


async def ask_judges(
    judges: Mapping[str, JudgeEndpoint], wait_s: float, log: Log
) -> dict[str, JudgeEndpoint]:
    """Ask the endpoint of each judge; return all with the model that an endpoint serves, if it is only one and none is given.

    Raises as `endpoint_with_model`, but an endpoint may serve several models: the environment may say which it wants.
    """
    complete = dict(judges)
    for name, judge in judges.items():
        if isinstance(judge, HTTPEndpoint):
            answers = await _answers(judge.resolved(), wait_s, log, judge=name)
            models = {model for answer in answers.values() for model in _models_in(answer) or ()}
            if judge.model is None and len(models) == 1:
                complete[name] = judge.model_copy(update={"model": models.pop()})
    return complete


async def _answers(
    endpoint: HTTPEndpoint, wait_s: float, log: Log, *, judge: str | None = None
) -> dict[str, Response]:
    """Return each replica's answer to the request for its models; raises for a wrong address, key or model."""
    answers = await wait_until_ready(endpoint, wait_s, log, judge=judge)
    for url, answer in answers.items():
        if answer.status == 401 or (answer.status == 403 and not endpoint.model):
            raise ConfigError(
                f"{url}/models answered {answer.status} ({_credentials(endpoint, judge)}): {await _words(url, endpoint, answer)}"
            )
        if answer.status == 404:
            await _refuse_missing_path(url, endpoint, judge)
        if answer.status == 407:
            raise ConfigError(
                f"{url}: the proxy wants a user and a password (407); put them into its address"
            )
    for url, answer in answers.items():
        names = _models_in(answer)
        if endpoint.model and names and endpoint.model not in names:
            await _refuse_unknown_model(url, endpoint, names, judge)
    return answers


async def _words(url: str, endpoint: HTTPEndpoint, answer: Response) -> str:
    """Return what a replica says of a request that it refused."""
    async with HTTPClient() as client:
        return HTTPBackend(_replica(url, endpoint), client).reason(answer)


def _replica(url: str, endpoint: HTTPEndpoint) -> HTTPEndpoint:
    """One replica of an endpoint, to be asked once."""
    return endpoint.model_copy(
        update={"base_url": url, "replicas": (), "max_retries": 0, "timeout_s": PROBE_S}
    )


def _credentials(endpoint: HTTPEndpoint, judge: str | None) -> str:
    option = "--api-key-var" if judge is None else f"--judge-key-var {judge}=VAR"
    if endpoint.api_key_env is not None:
        return f"wrong key in environment variable {endpoint.api_key_env!r}? {option} chooses another"
    another = f"{option} NAME" if judge is None else option
    return f"no key was sent; give it in {DEFAULT_KEY_VARIABLE}, or in another variable with {another}"


async def _refuse_missing_path(url: str, endpoint: HTTPEndpoint, judge: str | None) -> None:
    """Raise `ConfigError` for an address without its `/v1`: one that answers 404 where another of this server does not."""
    others = dict.fromkeys((f"{url}/v1", str(URL(url).origin() / "v1")))
    option = "-b " if judge is None else f"--judge {judge}={endpoint.model or 'MODEL'}@"
    async with HTTPClient() as client:
        for other in others:
            answer = await probe(f"{other}/models", client, request_headers(endpoint, url))
            if isinstance(answer, Response) and answer.status in (200, 401, 403):
                raise ConfigError(f"{url}/models answered 404; did you mean {option}{other}?")


async def _refuse_unknown_model(
    url: str, endpoint: HTTPEndpoint, names: Sequence[str], judge: str | None
) -> None:
    """Raise `ConfigError` for a model that is not listed and not answered for: some servers know more than they list."""
    error = await _short_call(url, endpoint)
    if error is not None and error.status_code == 404:
        whose = "" if judge is None else f"judge {judge!r}: "
        raise ConfigError(
            f"{whose}{url} has no model {endpoint.model!r}; it serves {_listed(names)}"
        ) from None


async def _short_call(url: str, endpoint: HTTPEndpoint) -> PolicyError | None:
    """Ask one replica for one token; return how it failed."""
    one = _replica(url, endpoint)
    limit, prompt = (
        ("max_tokens", {"messages": [{"role": "user", "content": "."}]})
        if endpoint.dialect == "chat"
        else ("max_output_tokens", {"input": "."})
    )
    async with HTTPClient() as client:
        try:
            await HTTPBackend(one, client).call({"model": endpoint.model, limit: 1, **prompt})
        except PolicyError as error:
            return error
    return None


def _only_model(models: Mapping[str, list[str] | None], answers: Mapping[str, Response]) -> str:
    """Return the model that every replica with a list serves. Raises `ConfigError` if it is not exactly one."""
    lists = {url: names for url, names in models.items() if names is not None}
    if not lists:
        last, answer = [*answers.items()][-1]
        reply = "did not return a list of models" if answer.status == 200 else f"answered {answer.status}"
        raise ConfigError(f"give the model with -m (`model` in Python): {last}/models {reply}")
    common = set.intersection(*map(set, lists.values()))
    if len(common) != 1:
        served = "; ".join(f"{url} serves {_listed(names)}" for url, names in lists.items())
        raise ConfigError(f"give the model with -m (`model` in Python); {served}")
    return common.pop()


def _models_in(answer: Response) -> list[str] | None:
    """Return the names of the models that an answer lists, or `None` if the answer is not a model list."""
    models = listed_models(answer)
    return None if models is None else [model["id"] for model in models]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN_MODELS} more" if len(names) > SHOWN_MODELS else ""
    return f"{', '.join(names[:SHOWN_MODELS]) or 'none'}{more}"


def replay_files(files: Iterable[str]) -> tuple[str, ...]:
    """The files that `--replay-file` gives; a directory of `gymgate run` stands for its rollouts, shards included.

    Raises `ConfigError` for what is not there.
    """
    paths: list[str] = []
    for file in files:
        if not Path(file).exists():
            raise ConfigError(f"--replay-file {file!r}: there is no such file")
        if not Path(file).is_dir():
            paths.append(file)
        elif runs := [run / ROLLOUTS for run in run_directories(Path(file)) if (run / ROLLOUTS).exists()]:
            for path in runs:
                _refuse_link(path)
            paths += map(str, runs)
        else:
            raise ConfigError(f"--replay-file {file!r}: this directory holds no run")
    return tuple(paths)


def _refuse_link(path: Path) -> None:
    """Raise `ConfigError` for a file of a run that leads elsewhere."""
    try:
        os.close(open_descriptor(path, os.O_RDONLY))
    except OSError as error:
        raise ConfigError(f"--replay-file: cannot read {path}: {error.strerror}") from error


def recordings_of(endpoint: ReplayEndpoint) -> list[Recording]:
    """Return the rollouts that can be replayed. Raises `DataError` for a recording that cannot be read."""
    return [recording for recording in recorded_rollouts(endpoint.rollouts) if recording.steps]


def only_recorded(sources: Sequence[RowSource], recordings: Sequence[Recording], log: Log) -> list[RowSource]:
    """Return the sources without the rows that no recording answers: NeMo Gym ships rollouts of other rows, too.

    Rows that cannot be read stay, to be reported. Raises `ConfigError` for a source without any recorded row.
    """
    return [_recorded_rows(source, recordings, log) for source in sources]


def with_oracles(endpoint: ReplayEndpoint, sources: Sequence[RowSource], log: Log) -> ReplayEndpoint:
    """Return the endpoint with the calls that rows list as their answer, for sources without any recorded row.

    Raises `DataError` for a recording that cannot be read.
    """
    recordings = recordings_of(endpoint)
    files = []
    for source in sources:
        rows = [row for _, row in replace(source, limit=None).readable() if isinstance(row, Row)]
        rollouts = [] if [*recorded_rows(recordings, rows)] else [oracle_rollout(row.data) for row in rows]
        if lines := [codec.dumps(rollout) for rollout in rollouts if rollout is not None]:
            name = source.environment or "rows"
            log(
                f"{name}: no row has a recorded rollout; the calls that rows list as their answer are played (oracle)"
            )
            text = b"\n".join(lines)
            file_name = f"oracle-{Path(name).stem}-{hashlib.sha256(text).hexdigest()[:12]}.jsonl"
            path = cache_dir() / "rows" / file_name
            with replacing(path) as file:
                file.write(text)
            files.append(str(path))
    return endpoint.model_copy(update={"rollouts": (*endpoint.rollouts, *files)})


def _recorded_rows(source: RowSource, recordings: Sequence[Recording], log: Log) -> RowSource:
    source.refuse_empty()
    whole = list(replace(source, limit=None).readable())
    rows = [row for _, row in whole if isinstance(row, Row)]
    recorded = {id(row) for row in recorded_rows(recordings, rows)}
    if not recorded and rows:
        raise ConfigError(
            f"none of the {len(whole)} rows of {source.environment or source.name} has a recorded rollout to replay; give a "
            "policy endpoint: -b http://host:8000/v1, or recordings of these rows: --replay-file FILE"
        )
    if len(recorded) < len(rows):
        name = source.environment or source.name
        log(f"{name}: {len(rows) - len(recorded)} of {len(whole)} rows have no recorded rollout")
    positions = [position for position, row in whole if isinstance(row, DataError) or id(row) in recorded]
    return replace(source, rows=_SelectedRows(source, positions))


class _SelectedRows(Sequence[Row]):
    """Some of the rows of a source, by their positions there."""

    def __init__(self, source: RowSource, positions: Sequence[int]) -> None:
        self.source = source.name
        self._rows = source.rows
        self._positions = positions

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, position: Any) -> Any:
        return self._rows[self._positions[position]]
