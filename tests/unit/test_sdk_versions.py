"""What importing `gymgate.inspect` or `gymgate.openenv` says where their packages cannot be used."""

from __future__ import annotations

from importlib import metadata

import pytest

from gymgate.core.errors import MissingExtraError
from gymgate.core.extras import install_command
from gymgate.integrations import versions


@pytest.mark.parametrize(
    ("installed", "reason"),
    [
        ({"openai": "3.4"}, "inspect-ai is"),
        ({"inspect-ai": "0.3.285"}, "openai is"),
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
        versions.require("inspect")
    assert install_command("inspect") in str(raised.value)
    assert "\n" not in str(raised.value)


def test_new_enough_ones_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions.metadata, "version", lambda name: "3.54.0")
    versions.require("inspect")


def test_the_extra_is_the_one_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions.metadata, "version", lambda name: "0.9")
    with pytest.raises(MissingExtraError, match=r"openenv 0\.9 .*gymgate\.openenv .*\b0\.10"):
        versions.require("openenv")
