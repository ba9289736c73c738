"""Check that the servers that sample answer, serve the same model, and are set up as the trainer needs them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

import aiohttp
import orjson

from gymgate.doctor import Finding
from gymgate.doctor.versions import SERVER, Trainer, meets

TIMEOUT_S = 10.0
DEV_MODE = "start it with VLLM_SERVER_DEV_MODE=1"


class ServedModel(NamedTuple):
    """A server's description of its model."""

    model: str | None = None
    max_model_len: int | None = None


async def check_servers(urls: Sequence[str], trainer: Trainer) -> tuple[list[Finding], ServedModel | None]:
    """Return the findings for every replica, and the model they serve; `None` if one of them cannot be used."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:
        results = await asyncio.gather(*(_Replica(session, url, trainer).check() for url in urls))
    findings = [finding for found, _ in results for finding in found]
    models = [served for _, served in results if served is not None]
    if len({*models}) > 1:
        listed = ", ".join(
            f"{url}: {served.model} ({served.max_model_len})"
            for url, (_, served) in zip(urls, results, strict=True)
            if served
        )
        findings.append(Finding("replicas", False, f"serve different models; start them alike: {listed}"))
    usable = len(models) == len(urls) and len({*models}) == 1
    return findings, models[0] if usable else None


def server_root(url: str) -> str:
    """Return a server's address without `/v1`."""
    return url.rstrip("/").removesuffix("/v1")


class _Replica:
    """One server, and what was found about it."""

    def __init__(self, session: aiohttp.ClientSession, url: str, trainer: Trainer) -> None:
        self.session = session
        self.root = server_root(url)
        self.trainer = trainer
        self.findings: list[Finding] = []

    async def check(self) -> tuple[list[Finding], ServedModel | None]:
        served = await self._model()
        if served is not None:
            await self._version()
            if self.trainer == "trl":
                await self._settings()
        return self.findings, served

    async def _model(self) -> ServedModel | None:
        status, body = await self._get("/v1/models")
        if status is None:
            self._add(False, f"cannot be reached ({body}); start it, or correct the address")
            return None
        try:
            card = body["data"][0]
            served = ServedModel(str(card["id"]), card.get("max_model_len"))
        except (KeyError, IndexError, TypeError):
            self._add(False, f"/v1/models answered {status} without a model; is this a vLLM server?")
            return None
        self._add(True, f"serves {served.model}, at most {served.max_model_len or '?'} ids")
        return served

    async def _version(self) -> None:
        status, body = await self._get("/version")
        version = body.get("version") if status == 200 and isinstance(body, dict) else None
        if version is None:
            self._add(None, "does not tell its version")
            return
        wanted = SERVER[self.trainer]
        fits = meets(str(version), wanted)
        self._add(fits, f"vLLM {version}" + ("" if fits else f" does not fit; pip install '{wanted}' there"))

    async def _settings(self) -> None:
        """Check what TRL needs to update weights and to compare logprobs."""
        status, body = await self._get("/server_info?config_format=json")
        if status != 200 or not isinstance(body, dict):
            self._add(False, f"/server_info answered {status}: weights cannot be updated; {DEV_MODE}")
            return
        config = body.get("vllm_config") or {}
        mode = (config.get("model_config") or {}).get("logprobs_mode")
        right = mode == "processed_logprobs"
        advice = "" if right else "; start it with --logprobs-mode processed_logprobs"
        self._add(right, f"logprobs mode {mode}{advice}")
        transfer = config.get("weight_transfer_config")
        advice = 'none; start it with --weight-transfer-config \'{"backend": "nccl"}\''
        self._add(bool(transfer), f"weight transfer: {transfer or advice}")

    async def _get(self, path: str) -> tuple[int | None, Any]:
        """The status and the JSON body; without an answer, `None` and the reason."""
        try:
            async with self.session.get(self.root + path) as answer:
                content = await answer.read()
                try:
                    return answer.status, orjson.loads(content)
                except orjson.JSONDecodeError:
                    return answer.status, None
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            return None, str(error) or type(error).__name__

    def _add(self, ok: bool | None, detail: str) -> None:
        self.findings.append(Finding("server", ok, f"{self.root} {detail}"))
