"""Make the scans of supported releases that ship with gymgate: `./dev python locks/scans.py` (`--check` only compares).

A release that is not installed is installed first, into the cache.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from servercode import CodeReader

from gymgate.core import codec
from gymgate.core.config import SUPPORTED_NEMO_GYM, RuntimeConfig
from gymgate.gym.catalog import Environment, shipped
from gymgate.gym.catalog.entries import AGENT_KIND, PACKAGED_KINDS
from gymgate.gym.catalog.scan import Scanner
from gymgate.gym.inside.resolve import RESOURCES, walk
from gymgate.gym.runtime import ensure_runtime

_ROW_IMAGE = re.compile(r"(?:^|\.)(?:docker_image|image|image_name|image_ref|image_url)$")
"""Fields of rows that name an image, apart from their prompts."""
ROWS_READ = 100
"""Lines of each file that are searched for images and tools."""
REWARDS = tomllib.loads((Path(__file__).parent / "rewards.toml").read_text())
"""By resources server: the file and the words in it that say what the reward is, and our reading of them, if they are code."""


def fresh_scan(site: Path) -> list[Environment]:
    """Return every environment and every agent with a config, read from their files, and what rows and source tell."""
    scanner = Scanner([site], site, CodeReader([site]))
    scanned = {
        kind: [scanner.directory(path, kind) for path in sorted((site / kind).glob("[!_.]*/"))]
        for kind in (*PACKAGED_KINDS, AGENT_KIND)
    }
    agents = [item for item in scanned.pop(AGENT_KIND) if item is not None]
    environments = [item for items in scanned.values() for item in items if item is not None]
    environments.sort(key=lambda item: (item.name, PACKAGED_KINDS.index(item.kind)))
    return [_with_rows(item, reward_of(item, site)) for item in (*environments, *agents)]


def _with_rows(item: Environment, reward: str | None) -> Environment:
    data = tuple(replace(file, lines=file.rows()) for file in item.data)
    return replace(item, data=data, images=images_of_rows(item), tools=tools_of_rows(item), reward=reward)


def reward_of(environment: Environment, site: Path) -> str | None:
    """Return what the reward of the default config is, if one resources server gives it and REWARDS knows that server's words."""
    config = environment.config()
    scoring = {agent.resources_server for agent in config.agents}
    servers = {
        server.type for server in config.servers if server.kind == RESOURCES and server.name in scoring
    }
    server = servers.pop() if len(servers) == 1 else ""
    if (entry := REWARDS.get(server)) is None:
        return None
    file = site / RESOURCES / server / entry.get("file", "README.md")
    source = file.read_text() if file.is_file() else ""
    words = re.search(r"\s+".join(map(re.escape, entry["quote"].split())), source)
    if words is None:
        return None
    quote = entry["quote"].replace("**", "").replace("`", "").removeprefix("Reward: ").rstrip(".:")
    place = f"{file.relative_to(site).as_posix()}:{source.count(chr(10), 0, words.start()) + 1}"
    return f"{entry.get('text') or quote} ({place})"


def images_of_rows(environment: Environment) -> tuple[str, ...]:
    """Return the images that the packaged rows name, once each; none if no config needs containers."""
    if not any("docker" in config.need_kinds for config in environment.configs):
        return ()
    return tuple(dict.fromkeys(image for row in _rows(environment) for image in _images_of_row(row)))


def tools_of_rows(environment: Environment) -> tuple[str, ...]:
    """Return the names of the functions that the packaged rows offer to the policy, once each."""
    offered = (row.get("responses_create_params", {}).get("tools") or () for row in _rows(environment))
    functions = (tool for tools in offered for tool in tools if tool.get("type") == "function")
    return tuple(dict.fromkeys(tool["name"] for tool in functions))


def _rows(environment: Environment) -> Iterator[dict[str, Any]]:
    for file in environment.data:
        if file.kind in ("rows", "raw"):
            with file.path.open("rb") as lines:
                for line in islice(lines, ROWS_READ):
                    with suppress(ValueError):
                        yield codec.loads_object(line)


def _images_of_row(row: dict[str, Any]) -> Iterator[str]:
    for path, value in walk(row):
        is_prompt = path.startswith(("responses_create_params.input", "responses_create_params.tools"))
        if _ROW_IMAGE.search(path) and not is_prompt and isinstance(value, str) and value:
            yield value


def main() -> int:
    stale = []
    for version in SUPPORTED_NEMO_GYM:
        site = ensure_runtime(RuntimeConfig(version=version), progress=print).site
        path = Path(str(shipped.SCANS)) / f"{version}.json.gz"
        scanned = fresh_scan(site)
        packed = shipped.packed(scanned, site)
        if path.is_file() and shipped.packed(shipped.load(version, site), site) == packed:
            continue
        stale.append(path.name)
        if "--check" not in sys.argv:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(packed)
    print(f"{'differ' if '--check' in sys.argv else 'written'}: {', '.join(stale) or 'none'}")
    return int("--check" in sys.argv and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
