"""Command lines and files that are made to be hard to read: one line, no traceback, in bounded time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gymgate.core.errors import ConfigError
from gymgate.gym.catalog.parse import parse_yaml, read_yaml

LAUGHS = "\n".join(
    ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))]
)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (LAUGHS, "aliases"),
        ("a: &a\n  b: *a", "itself"),
        (f"a: {'9' * 6000}", "4300"),
        ("[" * 5000, "."),
        ("a: [", "."),
    ],
)
def test_yaml_that_cannot_be_used_is_refused_at_once(text: str, word: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=word):
        parse_yaml(text)
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match="config") as refused:
        read_yaml(tmp_path / "config.yaml", "config")
    assert "\n" not in str(refused.value)


def test_yaml_with_aliases_is_read() -> None:
    assert parse_yaml("a: &a [1, {b: 2}]\nc: [*a, *a]")["c"] == [[1, {"b": 2}]] * 2


@pytest.mark.parametrize(
    ("words", "output"),
    [(["list"], "/dev/full"), (["info", "x" * 5000], None), (["run", f"{LAUGHS}.yaml"], None)],
)
def test_a_full_output_and_a_long_name_are_one_line(words: list[str], output: str | None) -> None:
    with Path(output or "/dev/null").open("w") as target:
        done = subprocess.run(
            [sys.executable, "-m", "gymgate", *words],
            stdout=target,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("gymgate: ")
    assert "Traceback" not in done.stderr
