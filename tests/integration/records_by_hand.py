"""Figures of quality records, made without gymgate: each resources server is imported in NeMo Gym's interpreter, and its
`/verify` is called through an in-process client.

    RUNTIME/bin/python records_by_hand.py < CLAIMS    # {environment: {figure: value}}; prints what differs

For environments of one turn, without judge and tools.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import logging
import statistics
import sys
from pathlib import Path
from typing import Any

FIXED = "I do not know."
ROWS = 10


def figures(name: str) -> dict[str, Any]:
    """The same figures, by calling `/verify`."""
    import yaml
    from fastapi.testclient import TestClient

    (package,) = importlib.import_module("resources_servers").__path__
    directory = Path(package) / name
    sys.path.insert(0, str(directory))  # a server starts in its directory
    module = importlib.import_module(f"resources_servers.{name}.app")
    server = server_class(module)
    configs = sorted((directory / "configs").glob("*.yaml"), key=lambda path: path.stem != name)
    config = yaml.safe_load(configs[0].read_text())
    block = next(value["resources_servers"] for value in config.values() if "resources_servers" in value)
    (settings,) = block.values()
    config_class = server.model_fields["config"].annotation
    made = config_class(host="127.0.0.1", port=1, name=name, **settings)

    client = TestClient(instance(server, made).setup_webserver())
    files = sorted((directory / "data").glob("*.jsonl"))
    records = [
        each for path in files if "rollouts" in path.name for each in lines(path) if "response" in each
    ]
    rows = [each for path in files if "rollouts" not in path.name for each in lines(path)]

    def verify(row: dict[str, Any], response: dict[str, Any]) -> float:
        answer = client.post("/verify", json={**row, "response": response})
        answer.raise_for_status()
        return float(answer.json()["reward"])

    paired = [(row_of(record, position, rows), record) for position, record in enumerate(records)]
    passes = [
        [verify(row, record["response"]) for row, record in order] for order in (paired, paired, paired[::-1])
    ]
    passes[2].reverse()
    seen: list[dict[str, Any]] = []
    for row in [*(row for row, _ in paired), *rows]:
        if row not in seen and len(seen) < ROWS:
            seen.append(row)
    template = records[0]["response"]

    def mean(text: Any) -> float:
        return statistics.fmean(verify(row, saying(template, text(row))) for row in seen)

    return {
        "again": [
            sum(
                abs(new - record["reward"]) < 1e-6 for new, (_, record) in zip(passes[0], paired, strict=True)
            ),
            len(records),
        ],
        "changed": sum(len(set(rewards)) > 1 for rewards in zip(*passes, strict=True)),
        "recorded mean": round(statistics.fmean(record["reward"] for record in records), 6),
        "empty": mean(lambda row: ""),
        "fixed sentence": mean(lambda row: FIXED),
        "the prompt": mean(prompt),
    }


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def server_class(module: Any) -> Any:
    from nemo_gym.base_resources_server import SimpleResourcesServer

    found = [
        each
        for each in vars(module).values()
        if inspect.isclass(each)
        and issubclass(each, SimpleResourcesServer)
        and each.__module__ == module.__name__
    ]
    return found[-1]


def instance(server: Any, config: Any) -> Any:
    from nemo_gym.server_utils import BaseServerConfig, ServerClient
    from omegaconf import OmegaConf

    head = BaseServerConfig(host="127.0.0.1", port=1)
    return server(
        config=config,
        server_client=ServerClient(head_server_config=head, global_config_dict=OmegaConf.create({})),
    )


def row_of(record: dict[str, Any], position: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The packaged row with the record's prompt and most of its fields, the one of its index first; the record itself
    if there is none."""
    alike = [
        (row["responses_create_params"]["input"] == record["responses_create_params"]["input"],
         sum(record.get(key) == value for key, value in row.items()), number == record.get("_ng_task_index", position), row)
        for number, row in enumerate(rows)
        if prompt(row) == prompt(record)
    ]  # fmt: skip
    others = {key: value for key, value in record.items() if key not in ("response", "reward")}
    return max(alike, key=lambda each: each[:3], default=(0, 0, 0, others))[3]


def prompt(row: dict[str, Any]) -> str:
    """What the user said."""
    given = row["responses_create_params"]["input"]
    if isinstance(given, str):
        return given
    parts = [item["content"] for item in given if item.get("role") == "user"]
    return "\n".join(
        part if isinstance(part, str) else " ".join(each.get("text", "") for each in part) for part in parts
    )


def saying(template: dict[str, Any], text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    message = {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": content}
    return {**template, "output": [message]}


def main() -> int:
    logging.disable()
    wrong = 0
    for name, said in json.load(sys.stdin).items():
        asyncio.set_event_loop(asyncio.new_event_loop())
        found = figures(name)
        differing = [
            f"{key}: record {said[key]}, by hand {found[key]}"
            for key in said
            if not same(said[key], found[key])
        ]
        wrong += bool(differing)
        print(f"{name}: {'; '.join(differing) or f'the same ({found})'}")
    return int(wrong > 0)


def same(one: Any, other: Any) -> bool:
    return one == other if isinstance(one, list | int) else abs(one - other) < 1e-6


if __name__ == "__main__":
    sys.exit(main())
