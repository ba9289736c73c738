"""Whether the servers that sample are there, alike, and set up as a trainer needs them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

import aiohttp
import orjson

from gymgate.doctor.versions import SERVER, Trainer
from gymgate.runtime.checks import Check

TIMEOUT_S = 10.0
DEV_MODE = "start it with VLLM_SERVER_DEV_MODE=1"


class Served(NamedTuple):
    """What the first server that answers says of its model."""

    model: str | None = None
    max_model_len: int | None = None


async def look_at_servers(urls: Sequence[str], trainer: Trainer) -> tuple[list[Check], Served | None]:
    """The lines of every replica, and what is served; `None` if one cannot be used."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:
        looked = await asyncio.gather(*(_Server(session, url, trainer).look() for url in urls))
    checks = [check for lines, _ in looked for check in lines]
    models = [served for _, served in looked if served is not None]
    if len({*models}) > 1:
        told = ", ".join(
            f"{url}: {served.model} ({served.max_model_len})"
            for url, (_, served) in zip(urls, looked, strict=True)
            if served
        )
        checks.append(Check("replicas", False, f"serve different models; start them alike: {told}"))
    usable = len(models) == len(urls) and len({*models}) == 1
    return checks, models[0] if usable else None


class _Server:
    """One replica."""

    def __init__(self, session: aiohttp.ClientSession, url: str, trainer: Trainer) -> None:
        self.session = session
        self.root = url.rstrip("/").removesuffix("/v1")
        self.trainer = trainer
        self.checks: list[Check] = []

    async def look(self) -> tuple[list[Check], Served | None]:
        """Its lines, and what it serves if that can be used."""
        served = await self._models()
        if served is not None:
            await self._version()
            if self.trainer == "trl":
                await self._settings()
        return self.checks, served

    async def _models(self) -> Served | None:
        status, body = await self._get("/v1/models")
        if status is None:
            self._say(False, f"cannot be reached ({body}); start it, or correct the address")
            return None
        try:
            card = body["data"][0]
            served = Served(str(card["id"]), card.get("max_model_len"))
        except (KeyError, IndexError, TypeError):
            self._say(False, f"/v1/models answered {status} without a model; is this a vLLM server?")
            return None
        self._say(True, f"serves {served.model}, at most {served.max_model_len or '?'} ids")
        return served

    async def _version(self) -> None:
        status, body = await self._get("/version")
        version = body.get("version") if status == 200 and isinstance(body, dict) else None
        if version is None:
            self._say(None, "does not tell its version")
            return
        wanted = SERVER[self.trainer]
        fits = wanted.holds(str(version))
        self._say(fits, f"vLLM {version}" + ("" if fits else f" does not fit; pip install '{wanted}' there"))

    async def _settings(self) -> None:
        """What TRL needs to update weights, and to compare logprobs."""
        status, body = await self._get("/server_info?config_format=json")
        if status != 200 or not isinstance(body, dict):
            self._say(False, f"/server_info answered {status}: no weight updates; {DEV_MODE}")
            return
        config = body.get("vllm_config") or {}
        mode = (config.get("model_config") or {}).get("logprobs_mode")
        right = mode == "processed_logprobs"
        advice = "" if right else "; start it with --logprobs-mode processed_logprobs"
        self._say(right, f"logprobs mode {mode}{advice}")
        transfer = config.get("weight_transfer_config")
        advice = "" if transfer else """none; start it with --weight-transfer-config '{"backend": "nccl"}'"""
        self._say(bool(transfer), f"weight transfer: {advice or transfer}")

    async def _get(self, path: str) -> tuple[int | None, Any]:
        try:
            async with self.session.get(self.root + path) as answer:
                content = await answer.read()
                try:
                    return answer.status, orjson.loads(content)
                except orjson.JSONDecodeError:
                    return answer.status, None
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            return None, str(error) or type(error).__name__

    def _say(self, ok: bool | None, detail: str) -> None:
        self.checks.append(Check("server", ok, f"{self.root} {detail}"))
