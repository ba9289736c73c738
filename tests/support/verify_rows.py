"""Run servers' own verify, in NeMo Gym's interpreter, over answers in a wrong and in a right format.

Reads a JSON object from stdin, server -> case; the last line that it prints is server -> results, or what was raised. A case has
the `row`'s fields, the `answers`, the server's `config`, and what stands for what only scoring needs: packages (`absent`),
functions and methods with what they return, attributes. `recorded` are numbers of rollouts in the release's file, whose
results follow.
"""

import asyncio
import copy
import importlib.util
import inspect
import json
import sys
import typing
from pathlib import Path
from types import ModuleType
from unittest.mock import AsyncMock, MagicMock

import nemo_gym
from nemo_gym.openai_utils import NeMoGymResponse
from nemo_gym.server_utils import SESSION_ID_KEY

SITE = Path(nemo_gym.__file__).parents[1]


def response(text):
    content = [{"annotations": [], "text": text, "type": "output_text"}]
    message = {"id": "m", "content": content, "role": "assistant", "status": "completed", "type": "message"}
    fields = {"id": "r", "created_at": 0.0, "model": "m", "object": "response", "output": [message]}
    return NeMoGymResponse(**fields, parallel_tool_calls=True, tool_choice="auto", tools=[])


class Absent(ModuleType):
    """Stands for a package that only scoring needs, once an answer was found."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


async def results(server, case):
    directory = SITE / "resources_servers" / server
    recordings = (directory / "data" / "example_rollouts.jsonl").read_text().splitlines()
    recorded = [json.loads(recordings[number]) for number in case.get("recorded", ())]
    if not case.get("answers"):
        return recorded
    sys.path.insert(0, str(directory))
    before = set(sys.modules)
    for name in case.get("absent", ()):
        sys.modules[name] = Absent(name)
    try:
        spec = importlib.util.spec_from_file_location(f"case_{server}", directory / "app.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        for name, value in case.get("replaced", {}).items():
            value = Path(value) if isinstance(value, str) and value.startswith("/") else value
            setattr(module, name, MagicMock(return_value=value))
        for name, value in case.get("functions", {}).items():
            setattr(module, name, AsyncMock(return_value=value))
        if "tested" in case:
            module.check_correctness_remote = MagicMock(remote=AsyncMock(return_value=case["tested"]))
            module.ray = MagicMock(get=MagicMock(return_value=case["tested"]))
        cls = next(
            c
            for c in vars(module).values()
            if isinstance(c, type) and c.__module__ == module.__name__ and hasattr(c, "verify")
        )
        config = {"host": "h", "port": 1, "entrypoint": "app.py", "name": server, **case.get("config", {})}
        types = typing.get_type_hints(cls.verify)
        made = cls.model_construct(
            config=typing.get_type_hints(cls)["config"](**config), server_client=MagicMock()
        )
        for name, value in case.get("methods", {}).items():
            object.__setattr__(made, name, AsyncMock(return_value=value))
        out = []
        for text in case["answers"]:
            for name, value in case.get("attributes", {}).items():
                setattr(made, name, copy.deepcopy(value))
            body = types["body"](
                **case.get("row", {}), responses_create_params={"input": "?"}, response=response(text)
            )
            request = MagicMock(session={SESSION_ID_KEY: "s"})
            args = [request, body] if "request" in inspect.signature(cls.verify).parameters else [body]
            out.append((await made.verify(*args)).model_dump(mode="json"))
        return [*out, *recorded]
    finally:
        sys.path.remove(str(directory))
        for name in set(sys.modules) - before:
            if getattr(sys.modules[name], "__file__", None) is None or str(directory) in str(
                sys.modules[name].__file__
            ):
                del sys.modules[name]


async def main():
    found = {}
    for server, case in json.load(sys.stdin).items():
        try:
            found[server] = await results(server, case)
        except Exception as error:
            found[server] = f"{type(error).__name__}: {error}"
    print("\n" + json.dumps(found))


asyncio.run(main())
