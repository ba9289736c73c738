"""A Docker daemon and an image for the tests: the daemon that answers, else a private one where that can be started.

Nothing is installed and no registry is asked. `$GYMGATE_TEST_IMAGE` names an image with Debian, bash, Python, pytest, git and
tmux; without it one is made with debootstrap, once: the private daemon keeps its images in `DATA`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

IMAGE = "gymgate-test:2"
"""Has the packages below. Another set of them needs another tag."""
DATA = Path(tempfile.gettempdir()) / f"gymgate-test-docker-{os.getuid()}"
PACKAGES = "bash,python3,python3-pytest,python3-py,git,ca-certificates,procps,tmux"
START_S = 60


@pytest.fixture(scope="session")
def docker() -> Iterator[str]:
    """The name of an image that a Docker daemon has; `DOCKER_HOST` leads to the daemon."""
    with pytest.MonkeyPatch.context() as patch:
        if not _answers():
            if reason := _cannot_start():
                pytest.skip(f"no Docker daemon answers, and none can be started: {reason}")
            yield from _private_daemon(patch)
            return
        yield _image()


def _private_daemon(patch: pytest.MonkeyPatch) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="gymgate-dockerd-") as directory:
        host = f"unix://{directory}/docker.sock"
        patch.setenv("DOCKER_HOST", host)
        words = [
            "--data-root",
            str(DATA),
            "--exec-root",
            f"{directory}/exec",
            "--pidfile",
            f"{directory}/pid",
        ]
        with Path(directory, "log").open("wb") as log:
            daemon = subprocess.Popen(
                ["dockerd", *words, "--host", host, "--bridge=none", "--iptables=false"],
                stdout=log,
                stderr=log,
            )
        try:
            deadline = time.monotonic() + START_S
            while not _answers():
                if daemon.poll() is not None or time.monotonic() > deadline:
                    pytest.skip(f"dockerd does not start: {Path(directory, 'log').read_text()[-300:]}")
            yield _image()
        finally:
            daemon.terminate()
            daemon.wait(START_S)


def _answers() -> bool:
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "version"], capture_output=True, timeout=30, check=False).returncode == 0


def _cannot_start() -> str | None:
    missing = [name for name in ("docker", "dockerd") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} is not on PATH"
    return None if os.getuid() == 0 else "dockerd needs root"


def _image() -> str:
    if name := os.environ.get("GYMGATE_TEST_IMAGE"):
        return name
    command = ["docker", "image", "inspect", IMAGE]
    if subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0:
        return IMAGE
    if shutil.which("debootstrap") is None or os.getuid() != 0:
        pytest.skip(f"the daemon has no image {IMAGE!r}; set GYMGATE_TEST_IMAGE, or install debootstrap")
    with tempfile.TemporaryDirectory(prefix="gymgate-image-") as directory:
        command = [
            "debootstrap",
            "--variant=minbase",
            f"--include={PACKAGES}",
            "bookworm",
            directory,
            _mirror(),
        ]
        made = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        if made.returncode != 0:
            pytest.skip(f"debootstrap failed: {made.stdout[-300:]}")
        archive = f"tar -C {directory} -c . | docker import - {IMAGE}"
        subprocess.run(archive, shell=True, check=True, timeout=300)
    return IMAGE


def _mirror() -> str:
    """The Debian mirror that apt uses here."""
    sources = [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")]
    text = "\n".join(path.read_text() for path in sources if path.is_file())
    found = re.search(r"https?://\S+/debian/?(?=\s)", text)
    return found[0] if found else "http://deb.debian.org/debian"
