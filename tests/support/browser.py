"""Chromium driven over WebDriver, for pages that change while they are open."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
TIMEOUT_S = 60


class Browser:
    """A window."""

    def __init__(self, session: str) -> None:
        self._session = session

    def open(self, url: str) -> None:
        """Open a page and wait until it is loaded."""
        ask(f"{self._session}/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """Return what a function's body returns in the page."""
        return ask(f"{self._session}/execute/sync", {"script": script, "args": arguments})

    def wait_for(self, condition: str) -> None:
        """Wait until an expression is true in the page, whenever its document changes; fail if it does not get so."""
        script = f"""
          const done = arguments[0], holds = () => {{ try {{ return Boolean({condition}); }} catch {{ return false; }} }};
          if (holds()) return done(true);
          const observer = new MutationObserver(() => {{ if (holds()) {{ observer.disconnect(); done(true); }} }});
          observer.observe(document, {{ subtree: true, childList: true, attributes: true, characterData: true }});
        """
        ask(f"{self._session}/execute/async", {"script": script, "args": []})

    def shoot(self, path: Path, width: int, height: int) -> None:
        """Save what the window shows at a size, which may be less than that of a window."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        command = {"cmd": "Emulation.setDeviceMetricsOverride", "params": size}
        ask(f"{self._session}/goog/cdp/execute", command)
        path.write_bytes(base64.b64decode(ask(f"{self._session}/screenshot")))


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with a new profile; skips the test where there is none."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no chromium and chromedriver on PATH")
    with subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = (re.search(r"started successfully on port (\d+)", line) for line in process.stdout)
            port = next(match[1] for match in found if match)
            options = {"binary": chromium, "args": [*FLAGS, f"--user-data-dir={profile}"]}
            timeouts = {"script": TIMEOUT_S * 500}
            asked = {"alwaysMatch": {"goog:chromeOptions": options, "timeouts": timeouts}}
            made = ask(f"http://127.0.0.1:{port}/session", {"capabilities": asked})
            session = f"http://127.0.0.1:{port}/session/{made['sessionId']}"
            try:
                yield Browser(session)
            finally:
                ask(session, method="DELETE")
        finally:
            process.terminate()


def ask(url: str, body: Any = None, method: str | None = None) -> Any:
    """Return the value in the answer of the driver."""
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url, data, method=method), timeout=TIMEOUT_S) as answer:
        return json.load(answer)["value"]
