"""`gymgate list`: the environments of a nemo-gym release."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

import click

from gymgate.cli.options import KINDS, gym_option, json_option, kind_option
from gymgate.cli.output import log, print_json, print_table
from gymgate.core.config import RuntimeConfig
from gymgate.core.errors import ConfigError, near
from gymgate.gym.catalog import EnvConfig, Environment
from gymgate.gym.catalog.entries import AGENT_KIND
from gymgate.gym.catalog.needs import Need, NeedKind
from gymgate.gym.runtime import open_catalog

if TYPE_CHECKING:
    from gymgate.quality.sections import ProbeKind

NEEDS = ("data", "self-judged", *get_args(NeedKind))


@dataclass(frozen=True)
class ListedEnvironment:
    """An environment as `gymgate list --json` prints it."""

    environment: str
    """What to type for it."""
    name: str
    kind: str
    """Directory of the release that holds it."""
    domain: str | None
    description: str | None
    config: str
    """The default config, to which agents and needs belong."""
    agents: Sequence[str]
    """Types of its agents."""
    environment_servers: Sequence[str]
    """Types of the environment servers that own its episodes; relays to an agent are left out."""
    needs: Sequence[Need]
    needs_data: bool
    """Whether the release has no rows of it that can be run."""
    is_self_judged: bool
    """Whether the policy's own model is its judge or user."""
    runs_code: bool
    """Whether it is known to run model-written code with your rights, unless its settings confine it."""
    runs_rows: bool
    """Whether it is known to run code of rows with your rights."""
    exploitable: Sequence[str]
    """Lines of its grader, with the reason, that pay for something that needs no understanding of the row. May be intended."""
    strict: Sequence[str]
    """Lines of its grader, with the reason, that reject a right answer in a usual form."""
    data: Sequence[str]
    """Packaged files of rows."""
    recordings: Sequence[str]
    """Packaged files of recorded rollouts."""
    tools: Sequence[str]
    """Names of the tools that its packaged rows offer to the policy."""
    turns: float | None
    """Calls to the policy in a recorded rollout, on average; `None`: none was measured."""


@click.command()
@click.argument("pattern", required=False)
@click.option("--domain", metavar="DOMAIN", help="Only this domain: math, agent, knowledge, ...")
@kind_option
@click.option("--tools", is_flag=True, help="Only environments with tools in their packaged rows.")
@click.option(
    "--multi-turn",
    is_flag=True,
    help="Only environments that ask the policy more than once in a recorded rollout, on average.",
)
@click.option(
    "--needs",
    type=click.Choice(["none", *NEEDS]),
    multiple=True,
    help="Only environments with this need; `none`: they run with the release and a policy alone. Repeatable: with any of them.",
)
@click.option(
    "--without",
    type=click.Choice(NEEDS),
    multiple=True,
    help="Leave out environments with this need. Repeatable.",
)
@gym_option
@json_option
def command(
    pattern: str | None,
    domain: str | None,
    kind: str | None,
    tools: bool,
    multi_turn: bool,
    needs: Sequence[str],
    without: Sequence[str],
    gym: RuntimeConfig,
    as_json: bool,
) -> None:
    """List environments and what each needs.

    PATTERN is part of a name, or a glob. The needs are those of an environment's default config. They are estimated from
    its files; nothing is run. `data`: the release has no rows that run; `self-judged`: the policy is its own judge or user;
    `exploitable`: its grader pays for something that needs no understanding of the row; `strict`: it rejects a right answer in a
    usual form. Either may be intended; `gymgate info` says what was seen. What its authors document has no mark.
    Your own environments are not listed: give `run`, `info` and `check` their path.
    """
    catalog = open_catalog(gym, progress=log)
    environments = catalog.agents() if kind == KINDS[AGENT_KIND] else catalog.environments(progress=log)
    if tools and all(item.tools is None for item in environments):
        raise ConfigError(f"--tools: what rows offer is not known for nemo-gym {catalog.version}")
    if multi_turn and all(_turns(item, catalog.version) is None for item in environments):
        raise ConfigError(f"--multi-turn: no turns were measured for nemo-gym {catalog.version}")
    selection = [
        environment
        for environment in environments
        if matches(environment, pattern)
        and domain in (None, environment.domain)
        and kind in (None, KINDS[environment.kind])
        and fits(environment, needs, without)
        and (not tools or environment.tools)
        and (not multi_turn or (_turns(environment, catalog.version) or 1) > 1)
    ]
    names = short_names(environments)
    if as_json:
        print_json([summary(item, names, catalog.version) for item in selection])
        return
    if not selection:
        guess = _guess(environments, pattern, domain)
        log(f"none of the {len(environments)} environments of nemo-gym {catalog.version} matches{guess}")
        return
    header = ("environment", "kind", "domain", "agents", "data", "needs")
    print_table(header, (_row(item, names, catalog.version) for item in selection))


def _guess(environments: Sequence[Environment], pattern: str | None, domain: str | None) -> str:
    """Return a question with a domain or names near to what was asked for, or nothing."""
    domains = sorted({item.domain for item in environments if item.domain})
    if close := [] if domain in domains else near(domain or pattern or "", domains):
        return f"; did you mean --domain {close[0]}?"
    if domain not in (None, *domains):
        return f"; domains: {', '.join(domains)}"
    close = near(pattern or "", sorted({item.name for item in environments}))
    return f"; near names: {', '.join(close)}" if close and not any(map(str.isspace, pattern or "")) else ""


def matches(environment: Environment, pattern: str | None) -> bool:
    """Whether a pattern is part of `name` or `kind/name`, or a glob that matches one of them; `None` matches all."""
    if pattern is None:
        return True
    if any(character in pattern for character in "*?["):
        return any(fnmatch.fnmatchcase(name, pattern) for name in (environment.name, environment.known_as))
    return pattern in (environment.known_as if "/" in pattern else environment.name)


def fits(environment: Environment, needs: Collection[str], without: Iterable[str]) -> bool:
    """Whether the default config needs one of `needs`, if any are given, and none of `without`."""
    own = set(environment.need_kinds)
    asked_for = not needs or not own.isdisjoint(needs) or ("none" in needs and not own)
    return asked_for and own.isdisjoint(without)


def short_names(environments: Iterable[Environment]) -> dict[str, str]:
    """Return what to type for each `kind/name`: the bare name for the first kind that has it, agents with their kind."""
    first: dict[str, str] = {}
    order = list(KINDS)
    for environment in sorted(environments, key=lambda item: order.index(item.kind)):
        first.setdefault(environment.name, environment.known_as)
    short = {known_as: name for name, known_as in first.items() if not known_as.startswith(AGENT_KIND)}
    return {item.known_as: short.get(item.known_as, item.known_as) for item in environments}


def summary(environment: Environment, names: dict[str, str], release: str) -> ListedEnvironment:
    """Return an environment as `--json` shows it."""
    config = environment.config()
    return ListedEnvironment(
        environment=names[environment.known_as],
        name=environment.name,
        kind=environment.kind,
        domain=environment.domain,
        description=environment.description,
        config=config.name,
        agents=[agent.type for agent in config.agents],
        environment_servers=[server.type for server in config.environment_servers],
        needs=config.needs,
        needs_data=environment.needs_data,
        is_self_judged=config.is_self_judged,
        runs_code=config.runs_code,
        runs_rows=config.runs_rows,
        exploitable=_marked_lines(environment, release, "exploitable"),
        strict=_marked_lines(environment, release, "strict"),
        data=[file.name for file in environment.data if file.kind == "rows"],
        recordings=[file.name for file in environment.recordings()],
        tools=environment.tools or (),
        turns=_turns(environment, release),
    )


def _turns(environment: Environment, release: str) -> float | None:
    from gymgate.quality.record.storage import shipped_record

    record = shipped_record(environment.kind, environment.name, release)
    return None if record is None or record.shape is None else record.shape.turns


def _marked_lines(environment: Environment, release: str, kind: ProbeKind) -> list[str]:
    """Return where the grader's code bears out flags of this kind that the authors do not document."""
    from gymgate.quality.record.findings import proofs
    from gymgate.quality.sections import PROBE_TEXTS

    return [
        proof.place
        for proof in proofs()
        if proof.is_about(environment.known_as, release) and proof.documented is None
        if any(PROBE_TEXTS[probe][1] == kind for probe in proof.probes)
    ]


def _row(environment: Environment, names: dict[str, str], release: str) -> tuple[str, ...]:
    config = environment.config()
    marks = {
        "may run model-written code": config.runs_code,
        "runs code of rows": config.runs_rows,
        "exploitable, may be intended": _marked_lines(environment, release, "exploitable"),
        "strict, may be intended": _marked_lines(environment, release, "strict"),
    }
    marked = ", ".join(mark for mark, holds in marks.items() if holds)
    return (
        names[environment.known_as],
        KINDS[environment.kind],
        environment.domain or "-",
        _agents(config),
        _default_data(environment),
        f"{', '.join(environment.need_kinds) or 'none'}{f' ({marked})' if marked else ''}",
    )


def _agents(config: EnvConfig) -> str:
    """The types of a config's agents, after those of the environment servers that own their episodes."""
    owners, agents = (
        ", ".join(dict.fromkeys(server.type for server in servers))
        for servers in (config.environment_servers, config.agents)
    )
    return f"{owners}: {agents}" if owners else agents or "-"


def _default_data(environment: Environment) -> str:
    """Name of the packaged rows that run by default; `raw` if they need a prompt first; `-` if there are none."""
    try:
        file = environment.data_file()
    except ConfigError:
        return "-"
    return file.name if file.kind == "rows" else file.kind
