"""The commands of README and docs, typed: those of a page (`support.pages`) one by one, in a directory without anything else.

HOME is empty; only gymgate's cache is that of the machine. A scripted endpoint stands for every model and judge. What pages name
as the reader's own is there: `runs/...`, `rows.jsonl` and `my_env`. A line is left out only for a reason in `REASONS`, or if it
reads a file that a line without a model or a download would not have made.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from gymgate.core.config import cache_dir
from support.pages import command_lines
from support.upstream import scripted_chat

ROOT = Path(__file__).parents[2]
GENERATED = ("findings.md", "environments-status.md", "index.md")
"""Pages of commands that checked every environment, for hours; and the copy of the README."""
PAGES = [
    ROOT / "README.md",
    *(path for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in GENERATED),
    *sorted((ROOT / "examples").glob("*/README.md")),
    ROOT / "environments" / "nemo_gym_env" / "README.md",
]
COPIED = ("examples", "environments")
"""Directories of the clone that commands name."""
RUNS = {
    "x": "mcqa",
    "base": "mcqa",
    "tuned": "mcqa",
    "judged": "simpleqa --judge genrm_model=URL",
    "cards": "blackjack",
}
"""Below `runs`: the reader's own runs, and what they ran."""
ENDPOINT = re.compile(
    r"https?://(?:(?:host|HOST|gpu|judge|a|b|api\.openai\.com)(?::\d+)?|localhost:8000|127\.0\.0\.1:8123)(?:/v1)?"
)
REASONS = {
    r"^(?:\S*pip|python3 -m venv|rm|git|\S*twine|cd /tmp$|/tmp/)": "installs or publishes: test_wheel.py and docs/releasing.md",
    r"^(?:\./dev|\S*/areal/)": "a part of the tests",
    r"^(?:sbatch|gymgate slurm)|slurm": "needs Slurm",
    r"--ray": "needs a Ray cluster: tests/training",
    r"^docker|--sandbox docker|config agents/|agents/mini_swe": "needs Docker",
    r"\bvllm\b|sglang|^gymgate serve-policy": "needs an inference engine",
    r"^inspect |--to inspect": "needs the extra inspect: tests/inspect",
    r"^gymgate serve-env": "needs the extra openenv: tests/openenv",
    r"examples/(?:trl|skyrl)|--trl": "needs a trainer: tests/training, tests/skyrl",
    r"^uv ": "installs, or needs a checkout of prime-rl",
    r"--log-to": "needs a package that logs",
    r"examples/verl": "needs a GPU and the extra verl",
    r"^ssh ": "needs an SSH server: test_stack_ssh.py",
    r"^gymgate (?:logs|stop)": "is about a stack that runs, and may end one of somebody else: test_stack_seen.py",
    r"--otel|OTEL_|--set telemetry": "needs the extra otel",
    r"^--": "options alone",
    r"check --all(?!.*--rows-only)": "takes hours",
    r"^gymgate data prepare (?!reasoning_gym)": "downloads: test_data_prepare.py",
    r"\.\.\.(?!$)|[A-Z]=VALUE|KEY=|\bDIR\b|\b(?:IN,OUT|URL|ENV|NAME)\b": "a placeholder",
    r"\.parquet": "needs the extra parquet",
}
"""Pattern -> why a line that has it is not typed."""
FAILS = {
    r"^gymgate check .*mcqa(?!.*--(?:rows-only|probe))": "one of mcqa's recorded rewards is not reproduced",
    r"127\.0\.0\.1:8124": "the page shows an endpoint that fails",
    r"^gymgate rescore runs/cards": "other cards are dealt",
}
"""Pattern -> why docs say that a line exits with 1."""
ENDLESS = r"^gymgate view"
"""Runs until it is interrupted."""
MAY_FAIL = r"^gymgate doctor"
"""Exits with 1 if this machine lacks something that is required."""
WRITTEN = ("-o", "--output", "--record", "--summary", ">")
"""What precedes a path that a line writes."""


def lines(page: Path) -> Iterator[str]:
    """A page's command lines without comments."""
    for line in command_lines(page):
        if shlex.split(line, comments=True):
            yield re.sub(r"\s+#\s.*$", "", line).strip()


def reason_against(line: str) -> str | None:
    """Why a line is not typed; `None`: it is."""
    return next((reason for pattern, reason in REASONS.items() if re.search(pattern, line)), None)


def absent_path(line: str, directory: Path) -> str | None:
    """A file that a line reads and that neither the page nor the clone has."""
    words = shlex.split(line)
    for before, word in zip(["", *words], words, strict=False):
        path = word.lstrip("@").partition(":")[0]
        is_path = path.startswith(("./", "runs/", "data/")) or path.endswith((".jsonl", ".yaml", ".toml"))
        if is_path and before not in WRITTEN and "=" not in path and not (directory / path).exists():
            return path
    return None


@pytest.fixture(scope="module")
def seed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every page's directory begins with."""
    directory = tmp_path_factory.mktemp("seed")
    with scripted_chat(lambda _: r"\boxed{A}") as url:
        for name, what in RUNS.items():
            command = f"gymgate run {what.replace('URL', url)} -n 2 -r 2 -b {url} -m m -o runs/{name}"
            done = typed(command, directory, {})
            assert done.returncode == 0, done.stderr
    assert typed("gymgate init my_env", directory, {}).returncode == 0
    row = '{"responses_create_params": {"input": "Say A."}, "agent_ref": {"type": "responses_api_agents", "name": "%s"}}\n'
    (directory / "rows.jsonl").write_text(row % "example_single_tool_call_simple_agent")
    for name in COPIED:
        shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
    return directory


def typed(line: str, directory: Path, variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Type a line. What removes from the cache gets an empty one."""
    home = directory / ".home"
    home.mkdir(exist_ok=True)
    cache = home / "cache" if "cache clean" in line else cache_dir()
    environment = {
        "HOME": str(home),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "GYMGATE_CACHE": str(cache),
        "BROWSER": "true",
        **{name: value for name, value in os.environ.items() if name.startswith(("PIP_", "UV_", "LANG"))},
        **variables,
    }
    return subprocess.run(
        ["bash", "-c", line],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_the_reasons_leave_out_no_more_than_they_say() -> None:
    every = [line for page in PAGES for line in lines(page)]
    kept = [line for line in every if reason_against(line) is None]
    assert len(kept) > 80
    unused = [pattern for pattern in REASONS if not any(re.search(pattern, line) for line in every)]
    assert unused == []


@pytest.mark.heavy
@pytest.mark.gym
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", [path.relative_to(ROOT).as_posix() for path in PAGES])
def test_what_a_page_says_to_type_works(page: str, seed: Path, tmp_path: Path) -> None:
    shutil.copytree(seed, tmp_path, dirs_exist_ok=True)
    directory = tmp_path
    if page.startswith("examples/"):  # its commands are typed there
        directory = tmp_path / Path(page).parent
    variables = {"JUDGE_API_KEY": "k", "MY_KEY": "k", "OPENAI_API_KEY": "k"}
    wrong = []
    with scripted_chat(lambda _: r"\boxed{A}") as url:
        for path in tmp_path.rglob("*.toml"):
            path.write_text(path.read_text().replace("http://127.0.0.1:8000/v1", url))
        for line in lines(ROOT / page):
            if reason_against(line) is not None:
                continue
            if name := re.fullmatch(r"cd (\S+)", line):
                directory = directory / name[1]
                continue
            # Two replicas have two addresses.
            line = ENDPOINT.sub(
                lambda match: url.replace("127.0.0.1", "localhost" if "//b" in match[0] else "127.0.0.1"),
                line,
            )
            line = re.sub(r"\bMODEL\b", "m", line)
            if absent_path(line, directory) is not None or line.startswith("export "):
                continue
            for path in re.findall(r"-o (runs/\S+)", line):
                if path.removeprefix("runs/") in RUNS:  # the page begins it itself
                    shutil.rmtree(directory / path)
            print(line)
            ended = f"timeout -s INT 10 {line}" if re.search(ENDLESS, line) else line
            done = typed(ended, directory, variables)
            expected = 1 if any(re.search(pattern, line) for pattern in FAILS) else 0
            if re.search(ENDLESS, line):
                expected = 124  # of `timeout`
            if done.returncode != expected and not (re.search(MAY_FAIL, line) and done.returncode == 1):
                wrong.append(
                    f"{line}\nexited with {done.returncode}\n{done.stdout[-1500:]}{done.stderr[-1500:]}"
                )
    assert not wrong, "\n\n".join(wrong)
