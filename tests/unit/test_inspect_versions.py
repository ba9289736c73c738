"""What importing `gymgate.inspect` says where Inspect AI cannot be used."""

from __future__ import annotations

from importlib import metadata

import pytest

from gymgate.errors import MissingExtraError
from gymgate.integrations.inspect import versions


@pytest.mark.parametrize(
    ("installed", "reason"),
    [
        ({"openai": "3.4"}, "inspect-ai is not installed"),
        ({"inspect-ai": "0.3.285"}, "openai is not installed"),
        ({"inspect-ai": "0.3.285", "openai": "2.54.0"}, "openai 2.54.0 is installed"),
        ({"inspect-ai": "0.3.90", "openai": "3.4"}, "inspect-ai 0.3.90 is installed"),
    ],
)
def test_the_reason_and_the_remedy_are_one_line(
    installed: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name in installed:
            return installed[name]
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(versions.metadata, "version", version)
    with pytest.raises(MissingExtraError, match=reason) as raised:
        versions.require_inspect()
    assert "pip install 'gymgate[inspect]'" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_new_enough_ones_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions.metadata, "version", lambda name: "3.54.0")
    versions.require_inspect()
