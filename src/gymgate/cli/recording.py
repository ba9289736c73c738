"""Options of `gymgate check` for quality records: where they go, a real model, and thresholds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gymgate.cli.environments import writable_path
from gymgate.cli.options import EndpointOptions, Finite, add_options, endpoint_options
from gymgate.cli.output import log
from gymgate.cli.policies import policy_endpoint, refuse_without_endpoint
from gymgate.errors import ConfigError, DataError

if TYPE_CHECKING:
    from gymgate.check import CheckResult

_OPTIONS = (
    click.option(
        "--own",
        multiple=True,
        metavar="PATH",
        help="The config of an environment of your own; the same as PATH as ENV. Repeatable.",
    ),
    click.option(
        "--record",
        "target",
        type=click.Path(path_type=Path),
        metavar="FILE.json|DIR",
        help="Write the quality record of each environment: a file, or one for each in a directory. An environment with a "
        "record of the same settings is not checked again.",
    ),
    click.option(
        "-n", "--rows", type=click.IntRange(1), metavar="N", help="Packaged rows for the model of -b. [all]"
    ),
    click.option(
        "--max-constant-reward",
        type=Finite(),
        metavar="REWARD",
        help="Threshold: mean reward of an empty answer, a fixed sentence, the prompt, or another row's best answer.",
    ),
    click.option("--deterministic", is_flag=True, help="Threshold: scoring again gives the same rewards."),
    click.option("--reproducible", is_flag=True, help="Threshold: every recorded reward comes out again."),
    click.option(
        "--honest", is_flag=True, help="Threshold: no reward where the judge, a tool or the policy failed."
    ),
)


@dataclass
class RecordOptions:
    """Values of `record_options`, and what became of the thresholds."""

    target: Path | None
    rows: int | None
    endpoint: EndpointOptions
    max_constant_reward: float | None
    deterministic: bool
    reproducible: bool
    honest: bool
    missed: list[str] = field(default_factory=list)
    """Thresholds that were not met."""

    @property
    def wanted(self) -> bool:
        """Whether anything is to be measured."""
        limits = (self.deterministic, self.reproducible, self.honest, self.max_constant_reward is not None)
        return self.target is not None or self.endpoint.urls is not None or any(limits)

    def check_target(self, environments: Sequence[str]) -> None:
        """Raise `ConfigError` or `DataError` where the records of these environments cannot be written."""
        if (target := self.target) is None:
            return
        is_file = target.suffix == ".json"
        if is_file and len(environments) > 1:
            raise ConfigError(
                f"--record {target}: one file holds one record; name a directory for {len(environments)}"
            )
        if target.exists() and is_file is target.is_dir():
            raise DataError(
                f"--record {target} is a {'directory' if is_file else 'file'}; name FILE.json or a directory",
                path=str(target),
            )
        writable_path(target if is_file else target / "record.json")
        seen: dict[str, str] = {}
        for own in (name for name in environments if name.endswith((".yaml", ".yml"))):
            if (other := seen.setdefault(Path(own).stem, own)) != own:
                raise ConfigError(
                    f"--record {target}: {other} and {own} would have one record; check one at a time"
                )

    def request_fields(self) -> dict[str, Any]:
        """The fields of `CheckRequest` that say what is measured."""
        policy = None
        refuse_without_endpoint(self.endpoint)
        if self.endpoint.urls is not None:
            policy = policy_endpoint(self.endpoint, log).model_copy(update={"api_key": None})
        elif self.rows is not None:
            raise ConfigError("-n limits the rows for a model; name its endpoint with -b")
        return {"record": self.wanted, "policy": policy, "policy_rows": self.rows}

    def kept(self, name: str) -> tuple[str, str] | None:
        """Verdict and settings of the record that is there."""
        from gymgate.check.record.files import load_record, record_path

        assert self.target is not None
        record = load_record(record_path(self.target, name))
        return (record.reproducible.verdict, record.settings) if record else None

    def finish(self, result: CheckResult) -> None:
        """Write the record of a check, and print its findings and the thresholds that it does not meet."""
        from gymgate.check.record.files import record_path, save_record
        from gymgate.check.record.findings import Thresholds, findings, missed
        from gymgate.check.record.record import record_of

        record = record_of(result)
        for finding in findings(record):
            click.echo(f"  {finding}")
        if record.policy and record.policy.pass_at_1 is not None:
            error = record.policy.standard_error
            beside = "" if error is None else f" ± {error:.3f}"
            click.echo(
                f"  {record.policy.model}: pass@1 {record.policy.pass_at_1:.3f}{beside}, {record.policy.scored} rows"
            )
        if self.target is not None:
            path = record_path(self.target, record.name)
            save_record(path, record)
            log(f"{record.environment}: record in {path}")
        limits = Thresholds(self.max_constant_reward, self.deterministic, self.reproducible, self.honest)
        for each in missed(record, limits):
            self.missed.append(each)
            log(f"{record.environment}: threshold not met: {each}")


def record_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options; the command gets `recording: RecordOptions`."""

    @wraps(command)
    def gathered(**given: Any) -> Any:
        fields = [name for name in RecordOptions.__dataclass_fields__ if name in given]
        return command(recording=RecordOptions(**{name: given.pop(name) for name in fields}), **given)

    return add_options(_OPTIONS)(endpoint_options(gathered))
