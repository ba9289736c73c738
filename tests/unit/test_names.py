"""Names of NeMo Gym that our code uses, in trees of stubs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gymgate.gym.inside import names

SOURCE = Path(names.__file__).parent


def stub_tree(root: Path, position: int) -> Path:
    """A `nemo_gym` whose only names are those of the table, each in its place of this position, the last if it has fewer."""
    for name, places in names.PLACES.items():
        module = root.joinpath(*places[min(position, len(places) - 1)].split("."))
        for package in [module, *module.parents]:
            if package != root and root in package.parents:
                package.mkdir(parents=True, exist_ok=True)
                (package / "__init__.py").touch()
        with (module / "__init__.py").open("a") as file:
            file.write(f"{name} = {name!r}\n")
    return root


def imported(root: Path, *symbols: str) -> subprocess.CompletedProcess[str]:
    program = (
        "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); sys.argv[0] = sys.argv[1]; del sys.argv[1];"
    )
    program += "runpy.run_path(sys.argv[0], run_name='__main__')"
    return subprocess.run(
        [sys.executable, "-I", "-c", program, root, names.__file__, *symbols],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("position", [0, 1], ids=["next", "0.7"])
def test_every_name_is_found_where_a_release_has_it_alone(tmp_path: Path, position: int) -> None:
    done = imported(stub_tree(tmp_path, position))
    assert (done.returncode, done.stderr) == (0, "")


def test_what_a_release_lacks_is_listed(tmp_path: Path) -> None:
    """Its module is there, or nothing of it."""
    tree = stub_tree(tmp_path, 0)
    kept = tree.joinpath(*names.PLACES["rollout_context"][0].split("."), "__init__.py")
    kept.write_text(kept.read_text().replace("rollout_context = ", "episode_context = "))
    tree.joinpath(*names.PLACES["initialize_ray"][0].split("."), "__init__.py").unlink()
    tree.joinpath(*names.PLACES["initialize_ray"][0].split(".")).rmdir()
    done = imported(tree)
    assert done.returncode == 1
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == [
        "initialize_ray",
        "rollout_context",
    ]


def test_a_module_that_cannot_be_imported_is_an_error_of_its_own(tmp_path: Path) -> None:
    tree = stub_tree(tmp_path, 0)
    broken = tree.joinpath(*names.PLACES["BaseRunRequest"][0].split("."), "__init__.py")
    broken.write_text("import no_such_package\n")
    done = imported(tree, *names.PRELOADED)
    assert done.returncode == 1
    assert "no_such_package" in done.stderr


def test_the_table_has_what_our_code_uses_and_nothing_else() -> None:
    called = re.compile(r'gym_(?:symbol|place)\(\s*"(\w+)"\s*\)')
    used = {name for path in SOURCE.rglob("*.py") for name in called.findall(path.read_text())}
    assert used | {*names.PRELOADED} == {*names.PLACES}
