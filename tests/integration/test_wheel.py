"""The built package: what is in it, what it says of itself, and, installed outside the clone, that it does its main job."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from gymgate.core.config import SUPPORTED_NEMO_GYM
from gymgate.gym.runtime import find_interpreters
from gymgate.gym.runtime.uv import run_uv

ROOT = Path(__file__).parents[2]
EXTRAS = {"nemogym", "datasets", "inspect", "openenv", "otel", "parquet", "ray", "skyrl", "trl", "verl"}


def build(project: Path, output: Path) -> tuple[Path, Path]:
    """The wheel and the source distribution of a project."""
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(output)]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    [wheel], [sdist] = output.glob("*.whl"), output.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build(ROOT, tmp_path_factory.mktemp("dist"))


def test_the_wheel_has_the_packages_and_nothing_else(built: tuple[Path, Path]) -> None:
    names = zipfile.ZipFile(built[0]).namelist()
    assert {name.split("/")[0] for name in names} == {"gymgate", "nemo_gym_env", "gymgate-0.2.0.dist-info"}
    assert {"gymgate/py.typed", "nemo_gym_env/py.typed"} <= {*names}
    for release in SUPPORTED_NEMO_GYM:
        assert f"gymgate/gym/runtime/locks/nemo-gym-{release}.txt" in names
    assert "gymgate/template/resources_servers/my_environment/data/example_rollouts.jsonl" in names
    listed = subprocess.run(
        ["git", "ls-files", "src/gymgate"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    ).stdout.split()
    assert {name.removeprefix("src/") for name in listed if (ROOT / name).exists()} <= {*names}


def test_the_metadata_says_what_a_user_needs_to_know(built: tuple[Path, Path]) -> None:
    archive = zipfile.ZipFile(built[0])
    about = metadata.Distribution.at(_extracted(archive, built[0].parent)).metadata
    assert (about["Name"], about["License-Expression"], about["License-File"]) == (
        "gymgate",
        "Apache-2.0",
        "LICENSE",
    )
    assert about["Requires-Python"] == ">=3.11"
    assert {*(about.get_all("Provides-Extra") or ())} == EXTRAS
    assert about["Description-Content-Type"] == "text/markdown"
    assert about.get_payload() == (ROOT / "README.md").read_text()
    classifiers = about.get_all("Classifier") or ()
    for minor in (11, 12, 13):
        assert f"Programming Language :: Python :: 3.{minor}" in classifiers
    assert archive.read("gymgate-0.2.0.dist-info/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert b"gymgate = gymgate._entry:main" in archive.read("gymgate-0.2.0.dist-info/entry_points.txt")
    everything = b"".join(archive.read(name) for name in archive.namelist())
    assert str(ROOT).encode() not in everything


def _extracted(archive: zipfile.ZipFile, directory: Path) -> Path:
    archive.extractall(directory)
    return directory / "gymgate-0.2.0.dist-info"


def test_the_source_distribution_makes_the_same_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    with tarfile.open(built[1]) as archive:
        archive.extractall(tmp_path, filter="data")
    again, _ = build(tmp_path / "gymgate-0.2.0", tmp_path / "dist")
    first, second = zipfile.ZipFile(built[0]), zipfile.ZipFile(again)
    assert {each.filename: each.CRC for each in first.infolist()} == {
        each.filename: each.CRC for each in second.infolist()
    }


def interpreter(minor: int) -> Path:
    if sys.version_info[:2] == (3, minor):
        return Path(sys.executable)
    found = [each.path for each in find_interpreters() if each.version[1] == minor]
    if not found:
        pytest.skip(f"no Python 3.{minor} on this machine")
    return found[0]


@pytest.mark.heavy
@pytest.mark.gym
@pytest.mark.timeout(600)
@pytest.mark.parametrize("minor", [11, 12, 13])
def test_a_fresh_installation_does_the_main_job(built: tuple[Path, Path], tmp_path: Path, minor: int) -> None:
    """verifiers' eval of a real environment and `gymgate run`, with the locked versions, outside the clone."""
    made = tmp_path / "venv"
    run_uv("venv", "--python", interpreter(minor), made)
    wanted = f"{built[0]}[nemogym]"
    run_uv("pip", "install", "--python", made / "bin" / "python", "-c", ROOT / "locks" / "dev.txt", wanted)
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "UV_PYTHON")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    for arguments in (
        ["eval", "run", "nemo-gym-env", "-n", "2", "-r", "2", "-c", "4"],
        ["run", "mcqa", "-r", "4"],
        ["init", "warehouse"],  # the installer has compiled the template
        ["check", "warehouse"],
        ["doctor"],
    ):
        done = subprocess.run(
            [made / "bin" / "gymgate", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
    where = "import gymgate; print(gymgate.__file__, gymgate.__version__)"
    done = subprocess.run(
        [made / "bin" / "python", "-c", where], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(_module(made, minor)), "0.2.0"]


@pytest.mark.gym
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("extra", "program"),
    [
        ("nemogym", "import nemo_gym_env, gymgate.integrations.verifiers.evaluation"),
        ("trl", "import gymgate.trl, renderers, datasets"),  # torch, of hundreds of megabytes, is left out
    ],
)
def test_an_extra_alone_has_what_it_imports(
    built: tuple[Path, Path], tmp_path: Path, extra: str, program: str
) -> None:
    """With the newest releases of the index, not the locked ones. `./dev extras` tries all extras."""
    made, excluded = tmp_path / "venv", tmp_path / "excluded.txt"
    excluded.write_text("torch\n")
    run_uv("venv", "--python", sys.executable, made)
    python = made / "bin" / "python"
    run_uv("pip", "install", "--python", python, "--excludes", excluded, f"{built[0]}[{extra}]")
    done = subprocess.run(
        [python, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr


def _module(made: Path, minor: int) -> Path:
    return made / "lib" / f"python3.{minor}" / "site-packages" / "gymgate" / "__init__.py"


@pytest.mark.heavy
@pytest.mark.timeout(300)
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
def test_the_requirements_can_be_met_on_each_python(python: str) -> None:
    project = str(ROOT / "pyproject.toml")
    made = run_uv("pip", "compile", "-q", "--python-version", python, "--extra", "nemogym", project)
    assert "verifiers==" in made
