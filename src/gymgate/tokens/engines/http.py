"""Inference servers that take and give token ids over HTTP.

Contracts: vLLM `POST /inference/v1/generate` and `POST /v1/completions` with `return_token_ids`; SGLang `POST /generate` with
`input_ids` and `return_logprob`. Nothing is patched on the server's side.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from gymgate.core import codec
from gymgate.core.addresses import basic_authorization, secrets_of_login, split_login
from gymgate.core.config import SESSION_HEADER
from gymgate.core.errors import PolicyError, TokenDataError, described
from gymgate.core.http_client import HTTPClient, Request, Response
from gymgate.core.json_server import JSONServer, listed_models, probe
from gymgate.tokens.engines.base import FinishReason, Sample

MAX_RETRIES = 2
"""Retries after a lost connection, 408, 409, 425 or a 5xx. A 429 is waited out within the timeout."""


class HTTPEngine:
    """The common part of engines over HTTP: one client per event loop.

    `session_header` is sent with the id of the rollout, for routers; `None`: none is sent.
    """

    path: str

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 3600.0,
        session_header: str | None = SESSION_HEADER,
    ) -> None:
        address, login = split_login(base_url)
        self.url = address.rstrip("/").removesuffix("/v1") + self.path
        self.model = model
        self._session_header = session_header
        self._headers = {} if login is None else {"Authorization": basic_authorization(login)}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        try:
            request = Request(self.url, self._headers)
            if session_header:
                request.refuse_header(session_header)
        except ValueError as error:
            raise PolicyError(f"engine address {address!r}: {error}", endpoint=address) from error
        self._server = JSONServer(
            request,
            self.url,
            timeout_s=timeout_s,
            max_retries=MAX_RETRIES,
            rate_limit_s=timeout_s,
            secrets=[*filter(None, [api_key]), *(secrets_of_login(login) if login is not None else ())],
        )
        self._clients: dict[asyncio.AbstractEventLoop, HTTPClient] = {}

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Mapping[str, Any], *, session: str
    ) -> Sample:
        """See `Engine.generate`. Without `max_tokens` the answer may fill the model's context."""
        # Sent as null: where the field is missing, vLLM samples 16 ids and SGLang 128.
        body = self.request(list(prompt_ids), {"max_tokens": None, **sampling}, session)
        payload = codec.dumps(body)
        headers = {self._session_header: session} if self._session_header else {}
        answer = await self._server.post(self._client(), payload, headers)
        try:
            return self.sample(answer.body)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            message = f"{self.url} gave no usable answer: {described(error)}"
            raise PolicyError(message, endpoint=self.url) from error

    def request(self, prompt_ids: list[int], sampling: dict[str, Any], session: str) -> dict[str, Any]:
        """Make the body to send."""
        raise NotImplementedError

    def sample(self, answer: dict[str, Any]) -> Sample:
        """Read the body of an answer."""
        raise NotImplementedError

    def _must_agree(self, token_ids: Sequence[int], names: Sequence[Any]) -> None:
        """Check that logprobs which name their ids (`token_id:17`) belong to the ids sampled."""
        for position, (token, name) in enumerate(zip(token_ids, names, strict=False)):
            if str(name).startswith("token_id:") and name != f"token_id:{token}":
                raise TokenDataError(
                    f"{self.url}: position {position} holds id {token}, but its logprob is of {name}"
                )

    def _client(self) -> HTTPClient:
        """This event loop's client. A loop that ended without `close` took its connections along."""
        self._clients = {loop: client for loop, client in self._clients.items() if not loop.is_closed()}
        return self._clients.setdefault(asyncio.get_running_loop(), HTTPClient())

    async def close(self) -> None:
        """Close this event loop's connections."""
        if client := self._clients.pop(asyncio.get_running_loop(), None):
            await client.close()


class VLLMGenerateEngine(HTTPEngine):
    """vLLM's token-level route."""

    path = "/inference/v1/generate"

    def request(self, prompt_ids: list[int], sampling: dict[str, Any], session: str) -> dict[str, Any]:
        parameters = {"skip_special_tokens": False, **sampling, "logprobs": 1}
        body: dict[str, Any] = {"token_ids": prompt_ids, "sampling_params": parameters}
        return {**body, "model": self.model} if self.model else body

    def sample(self, answer: dict[str, Any]) -> Sample:
        choice = answer["choices"][0]
        token_ids = list(choice["token_ids"])
        entries = (choice.get("logprobs") or {}).get("content")
        logprobs = None if entries is None else [entry["logprob"] for entry in entries]
        self._must_agree(token_ids, [entry.get("token") for entry in entries or []])
        return Sample(token_ids, logprobs, _finish(choice.get("finish_reason")), _version(choice, answer))


class VLLMCompletionsEngine(HTTPEngine):
    """vLLM's OpenAI completions route with a prompt of token ids and `return_token_ids`."""

    path = "/v1/completions"
    _max_model_len: int | None = None

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Mapping[str, Any], *, session: str
    ) -> Sample:
        """See `Engine.generate`. This route takes no bound, null too, for one of 16 ids, so the room is computed here."""
        if sampling.get("max_tokens") is None:
            room = await self._context_length() - len(prompt_ids)
            sampling = {**sampling, "max_tokens": max(1, room)}
        return await super().generate(prompt_ids, sampling, session=session)

    async def _context_length(self) -> int:
        """Return the model's context length, which vLLM's list of models gives. Raises `PolicyError` if it does not."""
        if self._max_model_len is None:
            url = self.url.removesuffix(self.path) + "/v1/models"
            answer = await probe(url, self._client(), self._headers)
            models = (listed_models(answer) if isinstance(answer, Response) else None) or []
            lengths = [model.get("max_model_len") for model in models if self.model in (None, model["id"])]
            if not lengths or not isinstance(lengths[0], int):
                raise PolicyError(
                    f"{url} does not give the model's max_model_len; bound the answers, by max_tokens or by "
                    "TokenPolicy's max_model_len or max_completion_len",
                    endpoint=self.url,
                )
            self._max_model_len = lengths[0]
        return self._max_model_len

    def request(self, prompt_ids: list[int], sampling: dict[str, Any], session: str) -> dict[str, Any]:
        required = {"logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True}
        body = {"prompt": prompt_ids, "skip_special_tokens": False, **sampling, **required}
        return {**body, "model": self.model} if self.model else body

    def sample(self, answer: dict[str, Any]) -> Sample:
        choice = answer["choices"][0]
        if choice.get("token_ids") is None:
            raise TokenDataError(
                f"{self.url} returned no token_ids; it needs vLLM >= 0.10.2 (return_token_ids)"
            )
        token_ids, details = list(choice["token_ids"]), choice.get("logprobs") or {}
        self._must_agree(token_ids, details.get("tokens") or [])
        finish, version = _finish(choice.get("finish_reason")), _version(choice, answer)
        return Sample(token_ids, details.get("token_logprobs"), finish, version)


class SGLangEngine(HTTPEngine):
    """SGLang's native route."""

    path = "/generate"
    _NAMES: ClassVar = {
        "max_tokens": "max_new_tokens",
        "min_tokens": "min_new_tokens",
        "seed": "sampling_seed",
    }

    def request(self, prompt_ids: list[int], sampling: dict[str, Any], session: str) -> dict[str, Any]:
        parameters = {self._NAMES.get(name, name): value for name, value in sampling.items()}
        parameters.setdefault("skip_special_tokens", False)
        if parameters.get("top_k") == 0:
            parameters["top_k"] = -1  # SGLang refuses 0; this is its word for all ids
        return {"input_ids": prompt_ids, "sampling_params": parameters, "return_logprob": True}

    def sample(self, answer: dict[str, Any]) -> Sample:
        details = answer["meta_info"]
        entries = details.get("output_token_logprobs")
        sampled = None if entries is None else [entry[1] for entry in entries]
        token_ids = list(answer["output_ids"] if sampled is None else answer.get("output_ids", sampled))
        if sampled is not None and sampled != token_ids:
            raise TokenDataError(f"{self.url}: output_ids and the ids of output_token_logprobs differ")
        logprobs = None if entries is None else [entry[0] for entry in entries]
        finish = _finish((details.get("finish_reason") or {}).get("type"))
        return Sample(token_ids, logprobs, finish, _version(details, answer))


def _finish(reason: str | None) -> FinishReason:
    return reason if reason in ("length", "abort") else "stop"  # type: ignore[return-value]


def _version(*places: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the versions of the weights that a server sampled with: it gives a number, or the first and the last.

    Stock vLLM says nothing, and SGLang's `weight_version` is a number only where the trainer gives it one.
    """
    for place in places:
        version = place.get("policy_version", place.get("weight_version"))
        if isinstance(version, str) and version.isdecimal():
            version = int(version)
        if type(version) is int:
            return version, version
        if isinstance(version, list) and len(version) == 2 and all(type(entry) is int for entry in version):
            return version[0], version[1]
    return None
