"""Descriptions of endpoints, environments, the runtime, stacks and rollout limits. Nothing here does I/O.

Every model is frozen and hashable, so that equal configs name the same stack.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import ipaddress
import math
import os
import re
import reprlib
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
    validate_call,
)

from gymgate.core.addresses import refuse_broken_login, split_login, without_login
from gymgate.core.errors import ConfigError

P = ParamSpec("P")
T = TypeVar("T")
SESSION_HEADER = "X-Session-ID"
"""Request header with the id of a conversation that most routers read."""
Dialect = Literal["responses", "chat", "messages"]
"""The API of a model call: OpenAI Responses, OpenAI chat-completions or Anthropic messages."""

DEFAULT_NEMO_GYM = "0.7.0"
SUPPORTED_NEMO_GYM = ("0.7.0", "0.6.0")
"""Releases that gymgate is tested with, newest first; any other runs with a warning."""

DEFAULT_KEY_VARIABLE = "OPENAI_API_KEY"
"""Environment variable with the key of an endpoint for which a command names none."""
POLICY = "policy_model"
"""Name of the policy's model server in every NeMo Gym config. Any other model server is a judge or a user simulator."""


class Config(BaseModel):
    """Base of every config: frozen, no unknown fields, no infinity or NaN; a field's docstring is its description.

    What it refuses may hold a key or a password, so no error shows it.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
    )


class _FrozenDict(dict[str, Any]):
    """A mapping within a config; nothing changes it, so it can be hashed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


PAIRS = BeforeValidator(lambda value: tuple(value.items()) if isinstance(value, Mapping) else value)
"""Validator of a field of pairs, which may be given as a mapping."""
SORTED = AfterValidator(lambda pairs: tuple(sorted(pairs, key=lambda pair: pair[0])))
"""Validator of a field of pairs whose order means nothing."""


def short_for(field: str) -> BeforeValidator:
    """Return the validator of a config for which a string may stand: the value of this field, with defaults for the others."""
    return BeforeValidator(lambda value: {field: value} if isinstance(value, str) else value)


def _as_several(value: Any) -> Any:
    return (value,) if isinstance(value, str | Mapping | EnvironmentConfig) else value


def _frozen(value: Any) -> Any:
    """Return a JSON value with hashable containers; raises `ValueError` for a value that JSON cannot carry."""
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise ValueError(
                f"the key {wrong[0]!r} is of type {type(wrong[0]).__name__}; keys must be strings"
            )
        return _FrozenDict({key: _frozen(item) for key, item in value.items()})
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, date):  # YAML reads 2026-01-31 as one
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not a finite number, and JSON has only finite ones")
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise ValueError(
        f"a value of type {type(value).__name__} is not JSON; give strings, numbers, booleans, lists or mappings"
    )


def _setting(pair: tuple[str, Any]) -> tuple[str, Any]:
    name, value = pair
    try:
        return name, _frozen(value)
    except ValueError as error:
        raise ValueError(f"{name!r}: {error}") from None


Settings = Annotated[tuple[Annotated[tuple[str, Any], AfterValidator(_setting)], ...], PAIRS, SORTED]
"""Names with JSON values, which may be given as a mapping; hashable at any depth."""


Headers = Annotated[tuple[tuple[str, SecretStr], ...], PAIRS, SORTED]
"""Names and values of HTTP headers, which may be given as a mapping."""


class HTTPEndpoint(Config):
    """An OpenAI-compatible server that answers model calls."""

    type: Literal["http"] = "http"
    base_url: str
    """Address up to and including `/v1`."""
    replicas: tuple[str, ...] = ()
    """Further base URLs that serve the same model. A rollout stays with one replica while it is healthy."""
    dialect: Literal["responses", "chat"] = "chat"
    """API that the endpoint speaks; calls in another dialect are translated."""
    model: str | None = None
    """Model name sent to the endpoint; `None` keeps the caller's."""
    api_key_env: str | None = None
    """Name of the environment variable with the key; read in the process that calls gymgate."""
    api_key: SecretStr | None = Field(default=None, repr=False)
    """The key itself, for keys that exist only at run time (a rollout's own secret). Prefer `api_key_env`."""
    headers: Headers = ()
    """Extra request headers, as a mapping. Their values may be secrets and are shown nowhere."""
    sampling: Settings = ()
    """Body fields set in every call (temperature, top_p, max tokens, ...); they override the caller's."""
    timeout_s: float = Field(default=3600.0, gt=0)
    """Timeout of one call in seconds, for each try. Long generations are normal."""
    max_retries: int = Field(default=2, ge=0)
    """Retries of a call after a lost connection or status 408, 409, 425 or 5xx. A 429 does not count: it is retried until the
    rollout's deadline, unless the quota is used up. 0: each call is sent once, whatever the answer."""
    logins: Headers = Field(default=(), repr=False)
    """User and password (`user:password`) by base URL. `http://user:password@host/v1` is split into its address and this."""
    session_header: str | None = SESSION_HEADER
    """Request header with the id of the conversation. A router in front of several servers can use it to send all calls of a
    conversation to the server that has it in its cache. `None`: none is sent. A header of the same name in `headers` takes
    precedence."""
    finish_sessions: bool = False
    """Tell the router when a rollout's conversations are over (`POST /finish_session?session_id=ID` next to `/v1`). Routers with
    the policy `sticky_least_loaded` need this."""
    strict_tools: bool = False
    """Pass `strict` of a tool on to a chat endpoint, which may then force arguments to match the schema. NeMo Gym's server for
    vLLM leaves it out. A Responses endpoint always gets it."""
    system_messages: Literal["keep", "join"] = "keep"
    """System and developer messages of a request to a chat endpoint. `keep`: as the agent sends them, as with NeMo Gym's server;
    `join`: as one at the start, for chat templates that refuse any other (Qwen3.5 and 3.6)."""

    @model_validator(mode="after")
    def _joins_chat_messages(self) -> Self:
        if self.system_messages == "join" and self.dialect != "chat":
            raise ValueError("system_messages 'join' is for chat endpoints, and dialect is 'responses'")
        return self

    @model_validator(mode="before")
    @classmethod
    def _logins_are_apart(cls, values: Any) -> Any:
        """What shows an address then shows no password."""
        if not isinstance(values, Mapping):
            return values
        base_url, replicas = values.get("base_url"), values.get("replicas") or ()
        if isinstance(replicas, str) or not all(isinstance(url, str) for url in (base_url, *replicas)):
            return values  # refused by their fields
        for url in (base_url, *replicas):
            refuse_broken_login(url)
        pairs = [split_login(url) for url in (base_url, *replicas)]
        logins = {address.rstrip("/"): login for address, login in pairs if login is not None}
        if not logins:
            return values
        base_url, *replicas = [address for address, _ in pairs]
        return {**values, "base_url": base_url, "replicas": replicas, "logins": logins}

    @model_validator(mode="after")
    def _addresses_are_usable(self) -> Self:
        if wrong := [url for url in (self.base_url, *self.replicas) if not re.match(r"https?://[^/]", url)]:
            raise ValueError(f"{without_login(wrong[0])!r} is not a URL; write http://host:8000/v1")
        if len({*self.base_urls}) != len(self.base_urls):
            raise ValueError(
                f"base_url and replicas contain the same address twice: {', '.join(self.base_urls)}"
            )
        return self

    @model_validator(mode="after")
    def _sampling_is_of_this_api(self) -> Self:
        """Many servers ignore a field that they do not know: answers would be as long as the model likes."""
        limits = {"chat": ("max_tokens", "max_completion_tokens"), "responses": ("max_output_tokens",)}
        own = limits.pop(self.dialect)
        if wrong := [name for names in limits.values() for name in names if name in dict(self.sampling)]:
            raise ValueError(f"sampling: a {self.dialect} endpoint has no {wrong[0]}; write {own[0]}")
        return self

    @property
    def base_urls(self) -> tuple[str, ...]:
        """The base URLs of all replicas, `base_url` first."""
        return tuple(url.rstrip("/") for url in (self.base_url, *self.replicas))

    def resolved(self) -> Self:
        """Return a copy with `api_key` read from `api_key_env`; raises `ConfigError` if that variable is not set."""
        if self.api_key is not None or self.api_key_env is None:
            return self
        value = os.environ.get(self.api_key_env)
        if not value:
            if not self.api_key_env.isidentifier():  # it may be the key itself
                raise ConfigError(
                    f"api_key_env of {self.base_url} is not the name of an environment variable"
                )
            raise ConfigError(
                f"environment variable {self.api_key_env!r} is not set (api_key_env of {self.base_url})"
            )
        return self.model_copy(update={"api_key": SecretStr(value)})


class ReplayEndpoint(Config):
    """Answers from recorded rollouts, matched by the conversation so far. Needs no model and no key."""

    type: Literal["replay"] = "replay"
    rollouts: tuple[str, ...]
    """JSONL files of rollouts that NeMo Gym recorded, or that a run of gymgate wrote."""
    index: int | None = None
    """Answer only from this line (0-based, counted over all files); `None`: from any line that matches."""


class CallableEndpoint(Config):
    """Calls a Python callable in the process that holds the lease."""

    type: Literal["callable"] = "callable"
    name: str
    """Name under which the callable is registered on its connection."""
    dialect: Literal["responses", "chat"] = "chat"
    """API of the request dict that it gets. It may answer in either, or with a string or a message."""
    timeout_s: float = Field(default=3600.0, gt=0)
    """Timeout of one call in seconds."""


Endpoint = Annotated[HTTPEndpoint | ReplayEndpoint | CallableEndpoint, Field(discriminator="type")]
"""Where a model call goes."""

Routing = Literal["url", "metadata", "remote", "body", "process"]
"""How a rollout's key reaches an agent's model calls."""

JudgeEndpoint = Endpoint | Literal["policy", "none"]
"""Where a judge's calls go: an endpoint, the rollout's own policy, or nowhere."""


def _release(value: str) -> str:
    """Return a supported release by its full number: `0.7` means 0.7.0 to package indexes too."""
    return next((release for release in SUPPORTED_NEMO_GYM if value == release.removesuffix(".0")), value)


class RuntimeSettings(Config):
    """The interpreter of NeMo Gym, whatever its release."""

    python: str | None = None
    """Interpreter to build the virtual environment with; `None`: one is found on this machine."""
    interpreter: str | None = None
    """An interpreter that already has nemo-gym (in a container or a checkout), used as it is."""


class RuntimeConfig(RuntimeSettings):
    """The interpreter and virtual environment that NeMo Gym runs in."""

    version: Annotated[str, AfterValidator(_release)] = DEFAULT_NEMO_GYM
    """nemo-gym release."""


class EnvironmentSettings(Config):
    """Settings common to all environments."""

    agent: str | None = None
    """Agent or environment server, by its name in the config, for rows without an `agent_ref`; `None`: the first agent of the
    config."""
    sandbox: str | None = None
    """Sandbox provider: a name (`docker`, `local`, ...) or the path of a YAML file with its settings, as NeMo Gym's own. It
    replaces the provider that the config sets. `None`: the config's own."""
    routing: Routing | None = None
    """How a rollout's key reaches its agents' model calls: `url`, `metadata`, `remote`, `body` or `process`. `None`: as known
    for NeMo Gym's agents, and `url` for all others. Set `process` for your own agent if it drops the key."""


class EnvironmentConfig(EnvironmentSettings):
    """One environment of a stack."""

    name: str
    """A packaged environment (`mcqa`, `resources_servers/mcqa`), or the path of a config file."""
    config: str | tuple[str, ...] | None = None
    """Config of the environment, by file name without `.yaml`; `None`: the default config. It can also be the path of a YAML
    file: your own, or the release's (`responses_api_agents/x/configs/x.yaml`). Several are combined in order."""
    overrides: Settings = ()
    """Settings for NeMo Gym's config parser, by dotted key (`("server.resources_servers.x.key", value)`). A key with a name
    that stands in no code or config is refused when the stack starts, unless a `+` stands before it."""
    scores_without_policy: bool = False
    """Score rollouts without a policy call. By default they fail, because the agent broke down first. Set it for an agent that
    answers by itself (rescoring of stored answers, a reference solution)."""


class RayCluster(Config):
    """An existing Ray cluster whose nodes run stacks. Every node needs gymgate with the `ray` extra."""

    address: str = "auto"
    """`HOST:PORT` of the cluster, or `auto` for the one of this machine. A process that is connected to a cluster uses that."""
    cpus_per_stack: float | None = Field(default=None, gt=0)
    """CPUs that Ray reserves for each stack; a node gets as many stacks as it has room for. `None`: one stack on each node,
    and nothing is reserved."""
    rollouts_per_stack: int = Field(default=256, ge=1)
    """Concurrent rollouts of this process on a stack. More of them wait, within their timeout."""

    def __init__(self, address: str = "auto", **fields: Any) -> None:
        super().__init__(**{"address": address, **fields})


def _own_address(value: str) -> str:
    address = ipaddress.ip_address(value)
    if address.is_unspecified or address.is_loopback:
        raise ValueError(f"{value} must be one address of this machine that sandboxes can reach")
    return value


class StackSettings(Config):
    """How the servers of a stack run, whatever its environments."""

    agent_processes: int = Field(default=4, ge=1)
    """Concurrent rollouts for agents that cannot forward the rollout key. Each runs in its own process; the rest queue."""
    gateway_host: Annotated[str, AfterValidator(_own_address)] | None = None
    """IP address of this machine at which agents in sandboxes with a separate network reach the policy, e.g. that of
    Docker's bridge (`172.17.0.1`). Requests there need a rollout's key. `None`: loopback only."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds until every server must listen (installing the runtime is not counted)."""
    linger_s: float = Field(default=0.0, ge=0)
    """Seconds that the stack stays up after its last lease has ended: the longest that one of its users asked for."""
    max_restarts: int = Field(default=3, ge=0)
    """Restarts of an environment's servers within `restart_window_s` after one of them died. After one more death the
    environment stays down. The first restart is immediate, later ones wait 0.5 s, 1 s, 2 s, up to 30 s."""
    restart_window_s: float = Field(default=600.0, gt=0)
    """Seconds for which a restart counts towards `max_restarts`."""
    hang_timeout_s: float | None = Field(default=900.0, gt=0)
    """Restart a server that has been unresponsive and idle for this many seconds while rollouts wait; `None`: never. Raise it
    for servers that block for longer, e.g. while they wait for a container."""
    stock_servers: bool = False
    """Run NeMo Gym's servers exactly as they are, without gymgate's middlewares, which do the same for less CPU time."""
    share: Literal["process", "machine"] = "process"
    """Who may share the stack: this process, or all processes of this user on this machine (a container with its own PID
    namespace counts as a machine). They share it if config, gymgate, the values of `env_vars`, judges' keys and the directory
    that relative paths start from are equal."""


class StackConfig(StackSettings):
    """One stack: the servers of one or more environments and the gateway in front of their models."""

    environments: Annotated[
        tuple[Annotated[EnvironmentConfig, short_for("name")], ...], BeforeValidator(_as_several)
    ] = Field(min_length=1)
    """Names or `EnvironmentConfig`s, or only one."""
    runtime: RuntimeConfig = RuntimeConfig()
    """nemo-gym release and its interpreter."""
    models: Annotated[tuple[tuple[str, JudgeEndpoint], ...], PAIRS, SORTED] = ()
    """Endpoint of each judge or user simulator that a config names, by instance name; `"*"` is for all others. `"policy"`
    sends its calls to the rollout's own policy endpoint; `"none"` starts the stack without an endpoint, and a rollout that
    calls it fails. An environment is refused if its judge has no entry here."""
    env_vars: tuple[str, ...] = ()
    """Environment variables, by name, to pass through to NeMo Gym's servers in addition to those that all get."""
    component_roots: tuple[str, ...] = ()
    """Directories searched for your own servers, in addition to the installed nemo-gym."""
    ray: Annotated[RayCluster | None, short_for("address")] = None
    """Ray cluster to run on: several stacks on its nodes, used as one. An address, or a `RayCluster`. `None`: this machine."""
    server: str | None = None
    """Path of the socket of a running stack to join, which may lead to another machine (`ssh -L`). The stack must have these
    environments, this release of NeMo Gym, and every other setting that differs from its default here. `None`: a stack of
    this machine, or `ray`."""
    state_dir: str | None = None
    """Directory for logs of at most 8 MiB each; `None`: one under the user's runtime or temporary directory, deleted when the
    stack stops."""

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [environment.name for environment in self.environments]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"environments contains {', '.join(twice)} more than once")
        return self

    @property
    def is_local(self) -> bool:
        """Whether the servers surely run on this machine. Another one may reach an endpoint that this one cannot."""
        return self.ray is None and self.server is None


DEFAULT_MAX_CALLS = 1000


class RolloutLimits(Config):
    """Bounds on one rollout."""

    timeout_s: float = Field(default=3600.0, gt=0)
    """Seconds per rollout, including the wait for a free agent process, model calls and verification."""
    max_calls: int | None = Field(default=DEFAULT_MAX_CALLS, ge=1)
    """Policy calls per rollout. Further calls are refused and the rollout counts as truncated. The default exceeds every
    packaged agent's own limit and ends agents that loop. `None`: no bound."""
    context_overflow: Literal["answer", "refuse"] = "answer"
    """What the agent gets if a policy call exceeds the context of a chat-completions endpoint. `answer`: an empty, incomplete
    message, as from NeMo Gym's vLLM model server; the rollout is scored and truncated. `refuse`: HTTP 400; most such rollouts
    then have no score. With functions and SDKs' own models it is always HTTP 400."""


def validation_message(error: ValidationError) -> str:
    """Return what is wrong with which setting, on one line."""
    return "; ".join(
        ": ".join(filter(None, (".".join(map(str, item["loc"])), item["msg"].removeprefix("Value error, "))))
        for item in error.errors()
    )


def refused_by_config(error: BaseException) -> str | None:
    """Return one line on a value that a config refuses; `None` for any other error."""

    def names(cls: type) -> set[str]:
        return {cls.__name__}.union(*map(names, cls.__subclasses__()))

    if not isinstance(error, ValidationError) or error.title not in names(Config):
        return None
    return validation_message(error)


def checked(function: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Return an async function that raises `ConfigError`, one line, for arguments that do not fit its annotations."""
    validated = validate_call(config=ConfigDict(arbitrary_types_allowed=True))(function)
    parameters = [*inspect.signature(function).parameters]

    @functools.wraps(function)
    async def call(*args: P.args, **settings: P.kwargs) -> T:
        if unknown := next((name for name in settings if name not in parameters), None):
            close = difflib.get_close_matches(unknown, parameters)
            hint = f"near names: {', '.join(close)}" if close else f"there are {', '.join(parameters)}"
            raise ConfigError(f"no setting {unknown!r}; {hint}")
        try:
            return await validated(*args, **settings)
        except ValidationError as error:
            line = refused_by_config(error)
            if error.title == function.__name__:
                first = error.errors()[0]
                place, value = first["loc"][0], reprlib.repr(first["input"])
                line = f"{parameters[place] if isinstance(place, int) else place}={value}: {first['msg']}"
            if line is None:
                raise
            raise ConfigError(line) from None

    return call


def dotted(
    value: Mapping[Any, Any], *, whole: Collection[str] = (), prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings by dotted key. A mapping that is empty, or whose key is in `whole`, is a leaf."""
    for name, item in value.items():
        key = f"{prefix}{name}"
        if isinstance(item, Mapping) and item and key not in whole:
            yield from dotted(item, whole=whole, prefix=f"{key}.")
        else:
            yield key, item


def cache_dir() -> Path:
    """Return `$GYMGATE_CACHE`, else `$XDG_CACHE_HOME/gymgate`, else `~/.cache/gymgate`."""
    if path := os.environ.get("GYMGATE_CACHE"):
        return Path(path).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "gymgate"
