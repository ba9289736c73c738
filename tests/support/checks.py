"""What tests of `gymgate check` share: recordings of the faulty environment, and its check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gymgate.core.config import EnvironmentConfig
from gymgate.quality import CheckRequest, CheckResult, check_all


def message(text: str) -> list[dict[str, Any]]:
    return [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}]


def recorded(question: str, answer: str, reward: float, **fields: Any) -> str:
    params = {"input": [{"role": "user", "content": question}]}
    response = {"id": "resp_1", "output": message(answer)}
    return json.dumps({"responses_create_params": params, "response": response, "reward": reward, **fields})


def made_in(directory: Path) -> list[Path]:
    """What a server wrote into its own directory."""
    return list(directory.rglob("made_at_start.txt"))


async def checked(config: Path, fault: str = "none", version: str = "0.7.0", **settings: Any) -> CheckResult:
    """Check a config; `settings` are those of `CheckRequest` and, like `sandbox`, of its environment."""
    environment = {name: settings.pop(name) for name in EnvironmentConfig.model_fields if name in settings}
    environment |= {"name": str(config), "overrides": {"faulty.resources_servers.faulty.fault": fault}}
    request = CheckRequest.model_validate(
        {"environments": [environment], "runtime": {"version": version}, **settings}
    )
    (outcome,) = await check_all([request])
    assert isinstance(outcome, CheckResult), outcome
    return outcome


PARIS = recorded("capital of France?", "Paris", 1.0)
