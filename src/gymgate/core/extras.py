"""The command that installs one of gymgate's extras beside the gymgate that runs."""

from __future__ import annotations

import json
import shlex
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit


def install_command(extra: str, *others: str) -> str:
    """Return `pip install` for an extra of this gymgate, or several with commas between; `others` are further packages.

    A gymgate that was installed from a clone or a wheel is installed from there again, because no index may have it.
    """
    try:
        source = json.loads(metadata.distribution("gymgate").read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:
        source = {}
    url = urlsplit(source.get("url", ""))
    path = Path(unquote(url.path))
    if url.scheme != "file" or not path.exists():
        target = [f"gymgate[{extra}]"]
    else:
        editable = source.get("dir_info", {}).get("editable")
        target = [*(["-e"] if editable else []), f"{path}[{extra}]"]
    return shlex.join(["pip", "install", *others, *target])
