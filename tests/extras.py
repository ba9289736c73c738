"""`./dev extras [NAME ...]`: each extra alone in a new virtual environment: it installs, and what it is for begins.

A training's first step runs for TRL; verl and SkyRL need a GPU for theirs, so they are imported, SkyRL with its trainer. torch
comes first, as the CPU build; an extra is skipped where there is none for its Python, because CUDA's is gigabytes. The
environments are made in .venv-extras, and removed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import yaml

from gymgate.gym.runtime import find_interpreters
from gymgate.gym.runtime.uv import UvFailedError, run_uv

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".venv-extras"
TORCH = "2.13.0"
ONE_STEP = FOLDER / "one_step.yaml"


class Trial(NamedTuple):
    """What is tried with an extra."""

    arguments: tuple[str, ...]
    """Of its interpreter."""
    torch: bool = False
    minors: tuple[int, ...] = (11, 12, 13, 14)
    """Python versions (3.x) that its SDK has releases for."""


TRIALS = {
    "nemogym": Trial(("-m", "gymgate", "eval", "run", "nemo-gym-env", "-n", "1", "-r", "1")),
    "datasets": Trial(("-c", "import datasets")),
    "inspect": Trial(("-c", "import gymgate.inspect")),
    "openenv": Trial(("-c", "import gymgate.openenv")),
    "otel": Trial(("-c", "import gymgate.results.spans, opentelemetry.sdk.trace")),
    "parquet": Trial(("-c", "import pyarrow.parquet")),
    "ray": Trial(("-c", "import ray")),
    "skyrl": Trial(("-c", "import examples.skyrl.train"), torch=True, minors=(12, 13)),
    "trl": Trial(("examples/trl/train.py", "--config", str(ONE_STEP)), torch=True),
    "verl": Trial(("-c", "import gymgate.verl"), torch=True, minors=(11, 12)),
}


def interpreter(minors: tuple[int, ...]) -> Path | None:
    """This interpreter if it fits, else one of the machine's."""
    if sys.version_info.minor in minors:
        return Path(sys.executable)
    return next((found.path for found in find_interpreters() if found.version[1] in minors), None)


def install_torch(python: Path) -> bool:
    """Install the CPU build: from the configured index or find-links, else from PyTorch's own index."""
    for choice in ((f"torch=={TORCH}+cpu",), ("--torch-backend", "cpu", f"torch=={TORCH}")):
        try:
            run_uv("pip", "install", "-q", "--python", python, *choice)
        except UvFailedError:
            continue
        return "+cpu" in run_uv("pip", "freeze", "--python", python)
    return False


def tried(extra: str) -> str:
    """Try an extra and say how it ended: `ok`, `skipped: REASON` or `FAILED: REASON`."""
    trial, made = TRIALS[extra], FOLDER / extra
    if (base := interpreter(trial.minors)) is None:
        return f"skipped: no Python 3.{trial.minors[0]}"
    shutil.rmtree(made, ignore_errors=True)
    try:
        run_uv("venv", "-q", "--python", base, made)
        python = made / "bin" / "python"
        kept: tuple[str | Path, ...] = ()
        if trial.torch:
            if not install_torch(python):
                return f"skipped: no CPU build of torch {TORCH} for this Python"
            constraint = FOLDER / "torch.txt"
            constraint.write_text(f"torch=={TORCH}+cpu\n")
            kept = ("-c", constraint)
        run_uv("pip", "install", "-q", "--python", python, *kept, f"{ROOT}[{extra}]")
        done = subprocess.run(
            [python, *trial.arguments], cwd=ROOT, capture_output=True, text=True, timeout=900, check=False
        )
        return "ok" if done.returncode == 0 else f"FAILED: {done.stderr.strip()[-2000:]}"
    except UvFailedError as error:
        return f"FAILED: {error}"
    finally:
        shutil.rmtree(made, ignore_errors=True)


def main() -> int:
    unknown = [name for name in sys.argv[1:] if name not in TRIALS]
    if unknown:
        sys.exit(f"dev: no extra {', '.join(unknown)}; there are {', '.join(TRIALS)}")
    FOLDER.mkdir(exist_ok=True)
    config = yaml.safe_load((ROOT / "examples/trl/tiny.yaml").read_text())
    config["grpo"].update(max_steps=1, output_dir=str(FOLDER / "run"))
    ONE_STEP.write_text(yaml.safe_dump(config))
    failed = False
    for extra in sys.argv[1:] or TRIALS:
        result = tried(extra)
        failed |= result.startswith("FAILED")
        print(f"{extra:10} {result}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
