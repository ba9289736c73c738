"""Check that the servers that sample answer, serve the same model, and are set up as the trainer needs them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from gymgate.core.addresses import without_login
from gymgate.core.http_client import HTTPClient, Response
from gymgate.core.json_server import listed_models, object_of, probe
from gymgate.doctor import Finding
from gymgate.doctor.packages import SERVER, Trainer, meets

DEV_MODE = "start it with VLLM_SERVER_DEV_MODE=1"


class ServedModel(NamedTuple):
    """A server's description of its model."""

    model: str | None = None
    max_model_len: int | None = None


async def check_servers(urls: Sequence[str], trainer: Trainer) -> tuple[list[Finding], ServedModel | None]:
    """Return the findings for every replica, and the model they serve; `None` if one of them cannot be used."""
    async with HTTPClient() as client:
        results = await asyncio.gather(*(_Replica(client, url, trainer).check() for url in urls))
    findings = [finding for of_replica, _ in results for finding in of_replica]
    models = [served for _, served in results if served is not None]
    if len({*models}) > 1:
        listed = ", ".join(
            f"{without_login(url)}: {served.model} ({served.max_model_len})"
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

    def __init__(self, client: HTTPClient, url: str, trainer: Trainer) -> None:
        self.client = client
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
        answer = await probe(f"{self.root}/v1/models", self.client)
        if not isinstance(answer, Response):
            self._add(False, f"cannot be reached ({answer}); start it, or correct the address")
            return None
        if not (models := listed_models(answer)):
            self._add(False, f"/v1/models answered {answer.status} without a model; is this a vLLM server?")
            return None
        served = ServedModel(models[0]["id"], models[0].get("max_model_len"))
        self._add(True, f"serves {served.model}, at most {served.max_model_len or '?'} ids")
        return served

    async def _version(self) -> None:
        _, body = await self._get("/version")
        version = body.get("version")
        if version is None:
            self._add(None, "does not tell its version")
            return
        requirement = SERVER[self.trainer]
        fits = meets(str(version), requirement)
        self._add(
            fits, f"vLLM {version}" + ("" if fits else f" does not fit; pip install '{requirement}' there")
        )

    async def _settings(self) -> None:
        """Check what TRL needs to update weights and to compare logprobs."""
        status, body = await self._get("/server_info?config_format=json")
        if not body:
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

    async def _get(self, path: str) -> tuple[int | str, dict[str, Any]]:
        """Return the status, or why there is none, and the object of the answer; empty unless the status is 200."""
        answer = await probe(self.root + path, self.client)
        if not isinstance(answer, Response):
            return answer, {}
        with contextlib.suppress(ValueError):
            if answer.status == 200:
                return answer.status, object_of(answer)
        return answer.status, {}

    def _add(self, ok: bool | None, detail: str) -> None:
        self.findings.append(Finding("server", ok, without_login(f"{self.root} {detail}")))
