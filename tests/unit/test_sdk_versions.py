"""What importing an integration says where its SDK cannot be used, or is newer than the tested releases."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from gymgate.core.errors import MissingExtraError
from gymgate.core.extras import SDKS, install_command
from gymgate.doctor import packages
from gymgate.integrations import versions

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


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


def test_pre_releases_of_the_oldest_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions.metadata, "version", lambda name: f"{SDKS['openenv'].oldest}rc1")
    versions.require("openenv")


def test_the_extra_is_the_one_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions.metadata, "version", lambda name: "0.9")
    with pytest.raises(MissingExtraError, match=r"openenv 0\.9 .*gymgate\.openenv .*\b0\.10"):
        versions.require("openenv")


@pytest.mark.parametrize(
    ("extra", "newer"), [("trl", "1.19.0"), ("openenv", "0.15.0"), ("inspect", "0.3.292")]
)
def test_a_newer_sdk_is_one_line_with_both_numbers_and_is_tried(
    extra: str, newer: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sdk = SDKS[extra]
    monkeypatch.setattr(metadata, "version", lambda name: newer if name == sdk.package else "3.54.0")
    versions.warn_if_untested(extra)
    if extra != "trl":
        versions.require(extra)  # type: ignore[arg-type]
    lines = {record.getMessage() for record in caplog.records}
    [line] = lines
    assert line.startswith(f"{sdk.package} {newer} ")
    assert f" {sdk.newest}," in line
    assert "\n" not in line
    [told] = [finding for finding in packages.check_sdks() if finding.name == sdk.package]
    assert told.ok is None
    assert line.endswith(told.detail)


@pytest.mark.parametrize("version", ["1.15.0", "1.16.4", "1.16.0.dev3", "1.16+cpu"])
def test_a_tested_sdk_is_silent(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    versions.warn_if_untested("trl")
    assert not caplog.records
    assert packages.installed("trl", version).ok is True


def test_a_newer_trainer_is_no_failure_of_the_checks_before_a_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: {"trl": "1.19.0", "vllm": "0.31"}.get(name, "99.0"))
    (trl, *others) = packages.check_versions("trl")
    assert (trl.ok, "1.19.0" in trl.detail, "1.16" in trl.detail) == (None, True, True)
    assert all(other.ok for other in others)


@pytest.mark.parametrize("extra", SDKS)
def test_the_bounds_of_an_extra_are_the_tested_releases(extra: str) -> None:
    sdk = SDKS[extra]
    [bounds] = [
        requirement.specifier
        for requirement in map(Requirement, PYPROJECT[extra])
        if requirement.name == sdk.package
    ]
    assert min(bound.version for bound in bounds if bound.operator == ">=").startswith(sdk.oldest)
    assert bounds.contains(sdk.newest) or bounds.contains(f"{sdk.newest}.1")
    if extra != "inspect":  # the last number of its releases counts them all
        major, minor = Version(sdk.newest).release[:2]
        assert not bounds.contains(f"{major}.{minor + 1}")


def test_the_locks_hold_tested_releases() -> None:
    locks = "".join(path.read_text() for path in (ROOT / "locks").glob("*.txt"))
    for sdk in SDKS.values():
        for version in re.findall(rf"^{sdk.package}==([^ ;]+)", locks, re.MULTILINE):
            assert sdk.untested(version) is None


def test_an_sdk_whose_modules_moved_is_told_by_its_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.11.0")
    monkeypatch.setattr(metadata, "distributions", lambda name: [name] if name == "verl" else [])
    moved = ModuleNotFoundError("No module named 'verl.moved'", name="verl.moved")
    told = str(versions.failed_import("verl", moved, "advice"))
    assert re.match(r"verl 0\.11\.0 .*verl\.moved.* 0\.9\.1 to 0\.9:", told)
    missing = str(versions.failed_import("skyrl", ImportError("x", name="pybase64"), "advice"))
    assert missing.startswith(f"pybase64 is not installed: {install_command('skyrl')}")
    ours = ImportError("x", name="gymgate.core")
    with pytest.raises(ImportError) as raised:
        versions.failed_import("verl", ours, "advice")
    assert raised.value is ours
