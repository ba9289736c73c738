"""index.json: every shipped record in short, for programs, a badge for each environment, and llms.txt for coding agents.

python docs/index.py DIR    # `./dev docs` runs it: it writes index.json, llms.txt and badges/KIND/ENVIRONMENT.json into the site

In the site's pages about all environments, a name becomes a link to the environment's page. In the site's search.json, headings
on what was measured and tried get their page's title and come last: "judges" should lead to the page that says how to use them,
not to what was tested.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import orjson
from environment_pages import described, environment_of, is_undecided, known_as, page_name, reproducing
from pydantic import Field

import gymgate
from gymgate.core.config import Config
from gymgate.quality import CheckResult, Verdict
from gymgate.quality.record.findings import FindingKind, Quote, findings, is_tried, solvable, suspicions
from gymgate.quality.record.storage import shipped_records
from gymgate.quality.sections import FlaggedRow, OracleReason, ProbeKind, ProbeName

LABS = ("benchmarks.html#", "test-matrix.html#", "agreement.html#")
"""Headings of the pages on what was measured and tried."""


class IndexedFinding(Config):
    """A possible problem. Flags of probes are here only if the grader's code was read."""

    kind: FindingKind
    text: str
    command: str
    """Command that shows it again."""
    probe: ProbeName | None = None
    """The probe that flagged it; `null` if it was measured otherwise."""
    file: str | None = None
    """For a probe's flag: the file of the release that shows why, below its packages."""
    line: int | None = None
    reason: str | None = None
    """What the code does there; only where the command also gives counter-witnesses."""
    probe_kind: ProbeKind | None = None
    """What the flag means for a policy."""
    mean: float | None = None
    """Mean reward of the probe's answers."""
    recorded_mean: float | None = None
    """Mean reward of the recorded answers."""
    witness: FlaggedRow | None = None
    """The first row that shows it; `null` if the record has none."""
    documented: Quote | None = None
    """Where the release's authors say that it is meant."""


class IndexedSuspicions(Config):
    """The flags of one kind, of all environments."""

    kind: FindingKind
    flags: int


class IndexedOracle(Config):
    """What the right answer earns, as the rows hold it."""

    reason: OracleReason | None = None
    """Why it was not tried; `null` if it was."""
    rows: int = 0
    """Rows that were tried."""
    solvable: int | None = None
    """How many of them it or a recorded answer solves: a lower bound. `null`: none was shown to be solvable."""
    accepts: str | None = None
    """Phrasing that earns the full reward in most rows; `null` if none does."""
    asked_for: str | None = None
    """Phrasing that the prompts ask for; `null` if no pattern finds it."""


class IndexedPolicy(Config):
    """What a model got: the environment's difficulty."""

    model: str
    sampling: dict[str, Any]
    """Fields of every call."""
    rows: int
    rollouts: int
    """Those with a reward."""
    pass_at_1: float | None
    standard_error: float | None
    """Clustered by row."""


class IndexedEnvironment(Config):
    """An environment of a nemo-gym release. A number that was not measured is `null`."""

    name: str
    kind: str
    """Directory of the release."""
    nemo_gym: str
    description: str | None
    domain: str | None
    licences: tuple[str, ...]
    """Of the datasets that its configs declare."""
    needs: tuple[str, ...]
    """Those of its default config, as `gymgate list` shows them."""
    reward: str | None
    """What the reward is, and the place in the release's files that says so."""
    tools: tuple[str, ...] | None
    """Names of the tools that its packaged rows offer to the policy."""
    turns: float | None
    """Calls to the policy in a recorded rollout, on average."""
    verdict: Verdict
    detail: str
    """Why the verdict is not `match`."""
    reproduced: int
    """Recorded rewards that are reproduced."""
    recorded: int
    """Recorded rewards."""
    oracle: IndexedOracle | None
    rows: int
    """Packaged rows."""
    duplicates: int | None
    """Rows that equal an earlier row of their file."""
    answers_in_prompt: int | None
    """Rows whose prompt says their own answer."""
    splits: tuple[str, ...]
    """Splits of its packaged files; examples are none."""
    shared: int | None
    """Rows that are in several splits."""
    policy: IndexedPolicy | None
    findings: tuple[IndexedFinding, ...]
    page: str | None
    """Its page, relative to the index; `null` if it has none."""
    badge: str
    """Its badge, relative to the index: an endpoint of shields.io."""
    gymgate: str
    """Version that checked it."""
    date: str


class Index(Config):
    """The environments of nemo-gym and what `gymgate check` found."""

    schema_version: Literal[1] = 1
    gymgate: str
    """Version that made the index."""
    environments: tuple[IndexedEnvironment, ...]
    """By kind and name."""
    suspicions: tuple[IndexedSuspicions, ...] = ()
    """Flags of probes of which the grader's code was not read."""


class Badge(Config):
    """An endpoint of shields.io."""

    schemaVersion: Literal[1] = 1
    label: Literal["gymgate"] = "gymgate"
    message: str = Field(min_length=1)
    color: Literal["brightgreen", "yellow", "lightgrey"]
    """brightgreen: every recorded reward is reproduced, and probes of right and wrong answers found nothing; yellow: there is a
    finding; lightgrey: it could not be checked or probed, or is undecided."""


def make_index(records: Iterable[CheckResult]) -> Index:
    listed = list(records)
    return Index(
        gymgate=gymgate.__version__,
        environments=tuple(map(indexed, listed)),
        suspicions=tuple(
            IndexedSuspicions(kind=kind, flags=flags)
            for kind, flags in Counter(flag.kind for each in listed for flag in suspicions(each)).items()
        ),
    )


def indexed(record: CheckResult) -> IndexedEnvironment:
    environment = environment_of(record)
    oracle, data, policy, shown = record.oracle, record.data, record.policy, solvable(record)
    answers = record.probes.answers if record.probes else {}
    return IndexedEnvironment(
        name=record.environment,
        kind=record.kind,
        nemo_gym=record.nemo_gym,
        description=described(record),
        domain=environment.domain,
        licences=environment.licences,
        needs=environment.need_kinds,
        reward=environment.reward,
        tools=environment.tools,
        turns=record.shape.turns if record.shape else None,
        verdict=record.verdict,
        detail=record.detail,
        reproduced=record.matched,
        recorded=record.compared,
        oracle=IndexedOracle(
            reason=oracle.reason,
            rows=oracle.rows,
            solvable=shown[0] if shown else None,
            accepts=next(iter(oracle.accepted), None) if is_tried(record) else None,
            asked_for=(oracle.asked_for or None) if is_tried(record) else None,
        )
        if oracle
        else None,
        rows=sum(data.files.values()) if data else 0,
        duplicates=data.duplicates if data else None,
        answers_in_prompt=data.answers_in_prompt if data else None,
        splits=tuple(sorted({*data.splits.values()})) if data else (),
        shared=data.shared if data else None,
        policy=IndexedPolicy(
            model=policy.model,
            sampling=policy.sampling,
            rows=policy.rows,
            rollouts=policy.scored,
            pass_at_1=policy.pass_at_1,
            standard_error=policy.standard_error,
        )
        if policy
        else None,
        findings=tuple(
            IndexedFinding(
                kind=each.kind,
                text=each.text,
                command=reproducing(record, each),
                probe=each.probe if each.proof else None,
                file=each.proof.file if each.proof else None,
                line=each.proof.line if each.proof else None,
                reason=(each.proof.reason or None) if each.proof else None,
                probe_kind=each.probe_kind if each.proof else None,
                mean=answers[each.probe].mean if each.proof and each.probe else None,
                recorded_mean=record.probes.recorded_mean if each.proof and record.probes else None,
                witness=each.witness if each.proof else None,
                documented=each.proof.documented if each.proof else None,
            )
            for each in findings(record)
        ),
        page=page_address(record),
        badge=f"badges/{record.kind}/{record.environment}.json",
        gymgate=record.gymgate,
        date=record.date,
    )


def badge(entry: IndexedEnvironment) -> Badge:
    """What a reader should know first: reproduced rewards, rows that can be solved, findings."""
    parts = [f"{entry.reproduced}/{entry.recorded} rewards" if entry.recorded else entry.verdict]
    if entry.oracle is not None and entry.oracle.solvable:
        parts.append(f"≥ {entry.oracle.solvable}/{entry.oracle.rows} solvable")
    undecided = sum(is_undecided(each.text) for each in entry.findings)
    parts += ["undecided"] * bool(undecided)
    if count := len(entry.findings) - undecided:
        parts.append(f"{count} finding{'s' if count > 1 else ''}")
    is_probed = entry.oracle is not None and entry.oracle.solvable is not None
    parts += ["not probed"] * (entry.verdict == "match" and not is_probed)
    color = "yellow" if count else "brightgreen" if entry.verdict == "match" and is_probed else "lightgrey"
    return Badge(message=", ".join(parts), color=color)


def schema() -> str:
    return orjson.dumps(Index.model_json_schema(), option=orjson.OPT_INDENT_2).decode() + "\n"


def lower(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items of the site's search, those of a heading in `LABS` last, with their page's title in front."""
    others = [item for item in items if not item["location"].startswith(LABS)]
    labs = [item for item in items if item["location"].startswith(LABS)]
    for item in labs:
        page = f"{item['path'][-1]}: "
        item["title"] = page + item["title"].removeprefix(page)
    return [*others, *labs]


def link_names(page: str, records: Iterable[CheckResult]) -> str:
    """The HTML of a page about all environments, in which each name leads to the environment's page."""
    links = {
        f"<code>{known_as(record)}</code>": f'<a href="{address}"><code>{known_as(record)}</code></a>'
        for record in records
        if (address := page_address(record))
    }
    return re.sub(r"<code>[^<]*</code>", lambda name: links.get(name[0], name[0]), page)


def page_address(record: CheckResult) -> str | None:
    return f"environments/{page_name(record)}.html" if record.measured else None


def llms() -> str:
    """The pages of the site by the groups of its navigation, each with its first sentence, as llmstxt.org describes it."""
    docs = Path(__file__).parent
    lines = [
        "# gymgate",
        "",
        "> Runs NVIDIA NeMo Gym environments from any eval or RL SDK. `gymgate --help` lists the commands.",
    ]
    for line in (docs.parent / "mkdocs.yml").read_text().partition("\nnav:\n")[2].splitlines():
        title, _, page = line.strip(" -").rpartition(":")
        if not page:
            lines += ["", f"## {title}", ""]
        else:
            path = page.strip()
            address = path.replace(".md", ".html")
            lines.append(
                f"- [{title.strip(chr(34))}]({address}): {_first_sentence((docs / path).read_text())}"
            )
    return "\n".join([*lines, "- [All environments as JSON](index.json)", ""])


def _first_sentence(page: str) -> str:
    paragraphs = re.split(r"\n\s*\n", re.sub(r"<!--.*?-->|```.*?```", "", page, flags=re.DOTALL))
    opening = next((text for text in paragraphs if re.match(r"[\w`*\[]", text.strip())), "")
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(opening.split()))
    return re.split(r"(?<=[.?])\s", words)[0]


def write(directory: Path) -> None:
    records = shipped_records()
    index = make_index(records)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "index.json").write_bytes(
        orjson.dumps(index.model_dump(mode="json"), option=orjson.OPT_APPEND_NEWLINE)
    )
    (directory / "llms.txt").write_text(llms())
    for entry in index.environments:
        path = directory / entry.badge
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(orjson.dumps(badge(entry).model_dump(mode="json"), option=orjson.OPT_APPEND_NEWLINE))
    for path in (directory / "findings.html", directory / "environments-status.html"):
        if path.exists():
            path.write_text(link_names(path.read_text(), records))
    path = directory / "search.json"
    if path.exists():
        search = orjson.loads(path.read_bytes())
        path.write_bytes(orjson.dumps({**search, "items": lower(search["items"])}))
    print(f"{len(index.environments)} environments in {directory / 'index.json'}")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
