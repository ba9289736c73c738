"""`gymgate eval run`: verifiers' own eval, with the local runtime, a policy without a key, and a closing table."""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

import click

from gymgate.catalog.needs import refuse_unanswered
from gymgate.cli.eval_args import (
    REPLAY_KEY_VARIABLE,
    environment_names,
    read_settings,
    resume_args,
    split_taskset,
)
from gymgate.cli.eval_report import print_report, read_tallies, watch
from gymgate.cli.options import checked_url
from gymgate.cli.run_plan import REPLAYED_JUDGES
from gymgate.config import DEFAULT_NEMO_GYM, RuntimeConfig
from gymgate.errors import ConfigError
from gymgate.integrations.verifiers.requirement import DEFAULT_ENVIRONMENT, PLUGIN_ID, require_verifiers

if TYPE_CHECKING:
    from gymgate.catalog import Environment

EPILOG = """Any other option goes to verifiers as it is: `vf-eval nemo-gym-env --help` lists them, and `@ FILE`
reads them from TOML or JSON. The knobs of the environment are `--env.taskset.*`."""


@click.group("eval")
def command() -> None:
    """Evaluate a model through an SDK's own eval."""


@command.command("run", epilog=EPILOG, context_settings={"ignore_unknown_options": True})
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="[TASKSET] [VERIFIERS OPTIONS]")
@click.option(
    "--env",
    "environments",
    multiple=True,
    help=f"NeMo Gym environment; repeat for several. [{DEFAULT_ENVIRONMENT}]",
)
@click.option("--data", help="Packaged file by name, JSONL path, or hf:owner/name[:split]. [example]")
@click.option("--gym", help=f"nemo-gym release. [{DEFAULT_NEMO_GYM}]")
@click.option(
    "-n", "--tasks", type=click.IntRange(1), help="Tasks to run. [one of the default environment, else all]"
)
@click.option("-r", "--rollouts", type=click.IntRange(1), help="Rollouts per task. [1]")
@click.option("-c", "--concurrency", type=click.IntRange(1), help="Rollouts at once. [128]")
@click.option("-b", "--base-url", help="Policy endpoint, up to /v1. [replay of recorded rollouts]")
@click.option("-m", "--model", help="Model name. [the endpoint's only one]")
@click.option("--api-key-var", help="Variable with the endpoint's key. [OPENAI_API_KEY]")
@click.option("--push", is_flag=True, help="Upload the results to the Prime Intellect platform.")
@click.option("--resume", metavar="RUN_DIR", help="Run what a saved run still owes; give no other settings.")
def run(args: tuple[str, ...], **options: Any) -> None:
    """Run NeMo Gym environments through verifiers' eval (`vf-eval`); TASKSET is nemo-gym-env by default.

    Without an endpoint the policy is the rollouts that NeMo Gym ships, replayed: no model, no key.
    """
    require_verifiers()
    taskset, argv = _arguments(args, options)
    settings = read_settings(argv)
    given = [*([taskset] if taskset else []), *argv]
    if PLUGIN_ID in (taskset, settings.get("env.taskset.id")):
        names = environment_names(settings, DEFAULT_ENVIRONMENT)
        runtime = _check_environments(names, settings)
        with _policy(names, settings, runtime) as endpoint, _early_stack(argv, settings):
            code = _evaluate(given, endpoint)
    else:
        code = _evaluate(given)
    sys.exit(code)


def _arguments(args: Sequence[str], options: Mapping[str, Any]) -> tuple[str | None, list[str]]:
    """The taskset and the rest of verifiers' command line, our options translated."""
    if options["resume"]:
        return None, [*resume_args(options["resume"]), *args]
    taskset, rest = split_taskset(args, PLUGIN_ID)
    if taskset not in (None, PLUGIN_ID) and any(options[name] for name in ("environments", "data", "gym")):
        raise ConfigError(f"--env, --data and --gym are options of {PLUGIN_ID}, not of {taskset!r}")
    flags = {
        "--env.taskset.env": ",".join(options["environments"]) or None,
        "--env.taskset.data": options["data"],
        "--env.taskset.gym": options["gym"],
        "-n": options["tasks"],
        "-r": options["rollouts"],
        "-c": options["concurrency"],
        "--client.base-url": options["base_url"],
        "--client.api-key-var": options["api_key_var"],
        "--model": options["model"],
    }
    given = [part for flag, value in flags.items() if value is not None for part in (flag, str(value))]
    push = [] if options["push"] or "--push" in rest or "--resume" in rest else ["--no-push"]
    return taskset, [*rest, *given, *push]


def _check_environments(names: Sequence[str], settings: Mapping[str, Any]) -> RuntimeConfig:
    """The runtime that the settings name, installed if it is not there; `ConfigError` for an unknown environment."""
    from gymgate.catalog import Catalog
    from gymgate.runtime import ensure_runtime

    config = RuntimeConfig(
        version=str(settings.get("env.taskset.gym", DEFAULT_NEMO_GYM)),
        python=settings.get("env.taskset.python"),
        interpreter=settings.get("env.taskset.interpreter"),
    )
    runtime = ensure_runtime(config, progress=_progress)
    roots = [Path(root) for root in settings.get("env.taskset.component_roots") or ()]
    catalog = Catalog(runtime.site, runtime.version, roots)
    found = [catalog.find(name) for name in names]
    changed = any(key.startswith("env.taskset.overrides") for key in settings)
    if not changed and "env.taskset.agent" not in settings:
        _require_judges(found, settings)
    return config


def _require_judges(found: Sequence[Environment], settings: Mapping[str, Any]) -> None:
    """`NeedMissingError` for a judge that the settings give no endpoint, before verifiers is loaded."""
    prefix, hint = "env.taskset.models.", ""
    if prefix[:-1] in settings:  # all of them as JSON
        return
    given = {key.removeprefix(prefix).partition(".")[0] for key in settings if key.startswith(prefix)}
    for environment in found:
        judges = dict(environment.config(settings.get("env.taskset.config")).judges)
        named = given | {name for name in judges if name.replace("-", "_") in given}
        if not settings.get("client.base_url"):
            hint = REPLAYED_JUDGES.format(environment.known_as)
        refuse_unanswered(environment.name, judges, named, option="--env.taskset.models.{}=URL", hint=hint)


def _early_stack(argv: Sequence[str], settings: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Start the stack while verifiers is imported, unless verifiers is only asked for its help or its config."""
    if settings.get("dry_run") or {"-h", "--help"} & {*argv}:
        return nullcontext()
    from gymgate.integrations.verifiers import early

    return early.starting(settings, _progress)


@contextmanager
def _policy(
    names: Sequence[str], settings: Mapping[str, Any], runtime: RuntimeConfig
) -> Iterator[Callable[[], list[str]]]:
    """Gives what to add to the command line for a policy; the replay policy runs meanwhile if no other is named."""
    base_url, model = settings.get("client.base_url"), settings.get("model") or settings.get("m")
    replayed = settings.get("client.api_key_var") == REPLAY_KEY_VARIABLE
    if base_url:
        checked_url(str(base_url))
    if base_url and not replayed:
        key = [] if "client.api_key_var" in settings else ["--client.api-key-var", "OPENAI_API_KEY"]
        flags = [*key, *([] if model else ["--model", _only_model(base_url)])]
        yield lambda: flags
        return
    if model and not replayed:
        raise ConfigError(f"model {model!r} needs an endpoint: -b http://host:8000/v1")
    from gymgate.cli.serve_process import begin_replay_server

    port = urlparse(str(base_url)).port if base_url else 0
    _progress(f"no endpoint named: replaying the recorded rollouts of {', '.join(names)}")
    with begin_replay_server(names, port=port or 0, runtime=runtime) as server:

        def flags_of_replay() -> list[str]:
            url = server.base_url  # waits until it listens
            return [] if base_url else _replay_flags(url)

        yield flags_of_replay


def _replay_flags(base_url: str) -> list[str]:
    return ["--client.base-url", base_url, "--client.api-key-var", REPLAY_KEY_VARIABLE, "--model", "replay"]


def _only_model(base_url: str) -> str:
    """The model that the endpoint serves; `ConfigError` if it cannot be reached or serves several."""
    url = f"{base_url.rstrip('/')}/models"
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            models = [str(item["id"]) for item in json.load(answer)["data"]]
    except urllib.error.HTTPError as error:
        raise ConfigError(f"name the model with -m: {url} answered {error.code} {error.reason}") from None
    except OSError as error:
        raise ConfigError(f"endpoint {base_url!r} cannot be reached: {error}") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"name the model with -m: {url} answered no list of models") from None
    if len(models) != 1:
        raise ConfigError(f"name the model with -m; {base_url} serves {', '.join(models) or 'none'}")
    return models[0]


def _evaluate(argv: Sequence[str], endpoint: Callable[[], list[str]] = list) -> int:
    """Run verifiers' eval and print the closing table; its exit code, 1 where rollouts failed.

    `endpoint` gives the arguments that name the policy, which starts while verifiers is imported.
    """
    _progress("loading verifiers")
    from verifiers.v1.cli.eval.main import main

    argv = [*argv, *endpoint()]
    started, code = time.time(), 0
    with watch() as watcher:
        try:
            main([*argv])
        except SystemExit as error:
            code = _exit_code(error)
    if watcher.path is None or not (watcher.path / "traces.jsonl").is_file():
        return code
    return _report(watcher.path, started, code)


def _report(path: Path, started: float, code: int) -> int:
    tallies = read_tallies(path, since=started)
    print_report(tallies, path)
    failed = sum(tally.failed for tally in tallies.values())
    return code or int(failed > 0)


def _exit_code(error: SystemExit) -> int:
    if isinstance(error.code, str):
        raise ConfigError(error.code) from None
    return error.code or 0


def _progress(message: str) -> None:
    click.echo(message, err=True)
