"""`gymgate doctor`: what this machine has of what a run needs, and a training of what it needs."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import click

from gymgate.cli.options import Seconds

if TYPE_CHECKING:
    from gymgate.doctor import Target
    from gymgate.runtime.checks import Check

_SIGNS = {True: "ok", False: "FAILED", None: "-"}


@click.command(name="doctor")
@click.argument("environments", nargs=-1, metavar="[ENV]...")
@click.option("--trl", "trainer", flag_value="trl", help="Look at what a training with TRL needs.")
@click.option("--verl", "trainer", flag_value="verl", help="Look at what a training with verl needs.")
@click.option(
    "--vllm", "urls", multiple=True, metavar="URL", help="Server that samples; once for each replica."
)
@click.option("--model", metavar="NAME", help="Hub name or directory of the policy. [what the server serves]")
@click.option("--renderer", metavar="NAME", help="Renderer of the policy, such as qwen3. [the model's]")
@click.option("--data", default="example", show_default=True, help="Rows, of which the first is rolled out.")
@click.option("--gym", metavar="VERSION", help="nemo-gym release. [0.7.0]")
@click.option(
    "--timeout",
    type=Seconds(0, min_open=True),
    default=300.0,
    show_default=True,
    help="Seconds per rollout.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool, **options: Any) -> None:
    """Check what a run needs of this machine; exit code 1 if something required is missing.

    With a trainer, a server or a model, check what a training needs: versions that fit, servers that answer alike,
    and one rollout of each agent of ENV, whose ids, lengths, turns and sampling are looked at.

    \b
    gymgate doctor
    gymgate doctor --trl --vllm http://127.0.0.1:8000 workplace_assistant mcqa
    """
    from gymgate.runtime.checks import run_checks

    show = _Shown(as_json)
    for check in run_checks():
        show(check)
    target = _target(**options)
    if target is not None:
        asyncio.run(_train(target, show))
    sys.exit(show.end())


def _target(trainer: str | None, gym: str | None, timeout: float, **options: Any) -> Target | None:
    """`None`: only the machine is of interest."""
    if trainer is None and not any(options[name] for name in ("environments", "urls", "model")):
        return None
    from gymgate.config import RuntimeConfig
    from gymgate.doctor import Target

    runtime = RuntimeConfig(version=gym) if gym else RuntimeConfig()
    return Target(trainer=trainer or "tokens", timeout_s=timeout, runtime=runtime, **options)  # type: ignore[arg-type]


async def _train(target: Target, show: _Shown) -> None:
    from gymgate.doctor import run_training_checks

    async for check in run_training_checks(target, lambda line: click.echo(line, err=True)):
        show(check)


class _Shown:
    """Checks as they come, or all of them as JSON in the end."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.checks: list[Check] = []

    def __call__(self, check: Check) -> None:
        self.checks.append(check)
        if not self.as_json:
            click.echo(f"{_SIGNS[check.ok]:<7}{check.name:<18} {check.detail}")

    def end(self) -> int:
        """The exit code."""
        if self.as_json:
            import orjson

            click.echo(orjson.dumps([check._asdict() for check in self.checks], option=orjson.OPT_INDENT_2))
        return int(any(check.ok is False for check in self.checks))
