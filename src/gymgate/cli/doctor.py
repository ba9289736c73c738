"""`gymgate doctor`: check what a run, or a training, needs of this machine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from gymgate.cli.options import field_option, gym_option, json_option
from gymgate.cli.output import echo, log, print_json
from gymgate.core.config import RolloutLimits, StackConfig
from gymgate.runs.described.spec import RunSpec

if TYPE_CHECKING:
    from gymgate.core.config import RuntimeConfig
    from gymgate.doctor import Finding

_SIGNS = {True: "ok", False: "FAILED", None: "-"}


@click.command(name="doctor")
@click.argument("environments", nargs=-1, metavar="[ENV]...")
@click.option("--trl", "trainer", flag_value="trl", help="Check what a training with TRL needs.")
@click.option("--verl", "trainer", flag_value="verl", help="Check what a training with verl needs.")
@click.option(
    "--vllm",
    "urls",
    multiple=True,
    metavar="URL",
    help="Address of a server that samples; give it once for each replica.",
)
@click.option("-m", "--model", metavar="NAME", help="Hub name or directory of the policy. [the served model]")
@click.option("--renderer", metavar="NAME", help="Renderer of the policy, e.g. qwen3. [the model's]")
@field_option("Rows", RunSpec, "data", "--data", metavar="ROWS", help="Rows, of which the first is run.")
@gym_option
@field_option("Limits", RolloutLimits, "timeout_s", "--timeout", default=300.0, help="Seconds per rollout.")
@json_option
def command(as_json: bool, **options: Any) -> None:
    """Check what a run or a training needs of this machine.

    Exits with 1 if something required is missing.
    With a trainer, a server or a model, also check what a training needs: package versions, servers that serve the same
    model, and one rollout of each agent of ENV with its token ids, lengths, turns and sampling.

    \b
    gymgate doctor
    gymgate doctor --trl --vllm http://127.0.0.1:8000 workplace_assistant mcqa
    """
    findings: list[Finding] = []

    async def check() -> None:
        async for finding in _findings(**options):
            findings.append(finding)
            if not as_json:
                echo(f"{_SIGNS[finding.ok]:<7}{finding.name:<20} {finding.detail}")

    asyncio.run(check())
    if as_json:
        print_json(findings)
    sys.exit(int(any(finding.ok is False for finding in findings)))


async def _findings(
    environments: Sequence[str], data: str, gym: RuntimeConfig, timeout: float, **options: Any
) -> AsyncIterator[Finding]:
    from gymgate.doctor.machine import check_machine

    for finding in check_machine():
        yield finding
    if not (environments or any(options[name] for name in ("trainer", "urls", "model"))):
        return
    from gymgate.doctor.training import TrainingSetup, check_training

    spec = None
    if environments:
        stack = StackConfig(environments=tuple(environments), runtime=gym)
        spec = RunSpec(stack=stack, data=data, limits=RolloutLimits(timeout_s=timeout))
    setup = TrainingSetup(spec=spec, **{name: value for name, value in options.items() if value})
    async for finding in check_training(setup, log):
        yield finding
