"""vLLM's routes over `Scheduler`: completions, chat-completions and token-level generation, pause and weight updates; and
SGLang's `/generate`.

    python -m examples.token_server --port 0

The bodies are vLLM's (read in its 0.22 to 0.30 sources): clients that work here work against `vllm serve`, started with
`VLLM_SERVER_DEV_MODE=1` for the routes about weights. Logprobs are vLLM's `processed_logprobs`. Weights arrive as the path of a
safetensors file (`update_info: {"path": ...}`), where vLLM's come over NCCL.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import orjson
from aiohttp import web
from examples.token_server import answers
from examples.token_server.sampling import Generation, Sampling, SamplingError
from examples.token_server.scheduler import Scheduler
from safetensors.torch import load_file

Json = dict[str, Any]
_SGLANG_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
MAX_BODY = 64 * 2**20


class TokenServer:
    """The application; `model`, `tokenizer` and `renderer` belong together."""

    def __init__(
        self, model: Any, tokenizer: Any, renderer: Any, *, name: str, max_model_len: int, max_batch: int = 64
    ) -> None:
        self.scheduler = Scheduler(model, max_batch)
        self.tokenizer = tokenizer
        self.renderer = renderer
        self.name = name
        self.max_model_len = max_model_len
        self.dtype = str(next(model.parameters()).dtype)

    def application(self) -> web.Application:
        """Every route."""
        app = web.Application(client_max_size=MAX_BODY, middlewares=[_errors])
        app.router.add_get("/health", self.health)
        app.router.add_get("/ping", self.health)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/server_info", self.server_info)
        app.router.add_get("/get_world_size", _answering({"world_size": 1}))
        app.router.add_get("/is_paused", self.is_paused)
        app.router.add_get("/load", self.load)
        for path, handler in {
            "/v1/completions": self.completions,
            "/v1/chat/completions": self.chat,
            "/inference/v1/generate": self.generate,
            "/generate": self.sglang_generate,
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
            "/pause": self.pause,
            "/resume": self.resume,
            "/update_weights": self.update_weights,
            "/finish_weight_update": self.finish_weight_update,
            "/init_weight_transfer_engine": _answering({"message": "Weight transfer initialized"}),
            "/start_weight_update": _answering({"message": "Weight update started"}),
            "/reset_prefix_cache": _answering({"success": True}),
        }.items():
            app.router.add_post(path, handler)
        app.on_cleanup.append(self._close)
        return app

    async def health(self, request: web.Request) -> web.Response:
        """Nothing but 200."""
        return web.Response()

    async def models(self, request: web.Request) -> web.Response:
        """The one model."""
        card = {
            "id": self.name,
            "object": "model",
            "owned_by": "token-server",
            "max_model_len": self.max_model_len,
        }
        return _json({"object": "list", "data": [card]})

    async def server_info(self, request: web.Request) -> web.Response:
        """The fields that TRL's clients read."""
        model_config = {
            "model": self.name,
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "logprobs_mode": "processed_logprobs",
        }
        config = {
            "model_config": model_config,
            "lora_config": None,
            "weight_transfer_config": {"backend": "file"},
        }
        return _json({"vllm_config": config})

    async def is_paused(self, request: web.Request) -> web.Response:
        """Whether `/pause` came last."""
        return _json({"is_paused": self.scheduler.paused})

    async def load(self, request: web.Request) -> web.Response:
        """Counters, for tests."""
        running, waiting = self.scheduler.load
        counted = {
            name: getattr(self.scheduler, name)
            for name in ("steps", "sampled", "largest_batch", "aborted", "version")
        }
        return _json({"server_load": running + waiting, "running": running, "waiting": waiting, **counted})

    async def completions(self, request: web.Request) -> web.Response:
        """Prompts as text or as ids, one or several, each sampled `n` times."""
        body = self._known_model(await _body(request))
        prompts = self._prompts(body["prompt"])
        sampling = Sampling.parse(body, 16)
        for prompt in prompts:
            self._must_fit(len(prompt) + sampling.max_tokens)
        wanted = [prompt for prompt in prompts for _ in range(body.get("n") or 1)]
        done = await self._sample(wanted, sampling)
        return _json(answers.completion(_id("cmpl"), self.name, done, body))

    async def chat(self, request: web.Request) -> web.Response:
        """Messages, rendered anew for every call."""
        body = self._known_model(await _body(request))
        prompt = self._rendered(body)
        self._must_fit(len(prompt) + 1)
        if (limit := body.get("max_completion_tokens")) is not None:
            body["max_tokens"] = limit
        wants = body.get("logprobs")
        body["logprobs"] = (body.get("top_logprobs") or 0) if wants else None
        sampling = Sampling.parse(body, self.max_model_len - len(prompt))
        self._must_fit(len(prompt) + sampling.max_tokens)
        done = await self._sample([prompt] * (body.get("n") or 1), sampling)
        parsed = [
            self.renderer.parse_response(g.token_ids, tools=_tools(body), prompt_ids=prompt) for g in done
        ]
        return _json(answers.chat(_id("chatcmpl"), self.name, done, body, parsed))

    async def generate(self, request: web.Request) -> web.Response:
        """Ids in, ids out."""
        body = self._known_model(await _body(request))
        prompt = _ids(body["token_ids"])
        self._must_fit(len(prompt) + 1)
        room = self.max_model_len - len(prompt)
        wanted = dict(body.get("sampling_params") or {})
        wanted["max_tokens"] = min(wanted.get("max_tokens") or 16, room)
        (done,) = await self._sample([prompt], Sampling.parse(wanted, room))
        return _json(answers.generate(body.get("request_id") or _id("gen"), done))

    async def sglang_generate(self, request: web.Request) -> web.Response:
        """SGLang's native route, for ids."""
        body = await _body(request)
        prompt = _ids(body["input_ids"])
        self._must_fit(len(prompt) + 1)
        room = self.max_model_len - len(prompt)
        given = dict(body.get("sampling_params") or {})
        wanted = {_SGLANG_NAMES.get(name, name): value for name, value in given.items()}
        wanted["max_tokens"] = min(wanted.get("max_tokens") or 128, room)
        wanted["logprobs"] = 0 if body.get("return_logprob") else None
        (done,) = await self._sample([prompt], Sampling.parse(wanted, room))
        return _json(answers.sglang(_id("rid"), done))

    async def tokenize(self, request: web.Request) -> web.Response:
        """A text, or messages."""
        body = await _body(request)
        ids = self._rendered(body) if "messages" in body else self._encoded(body["prompt"])
        return _json({"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids})

    async def detokenize(self, request: web.Request) -> web.Response:
        """The text of ids."""
        return _json({"prompt": self._decode(_ids((await _body(request))["tokens"]))})

    async def pause(self, request: web.Request) -> web.Response:
        """`mode` is `abort` (vLLM's default), `wait` or `keep`."""
        mode = request.query.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            raise SamplingError(f"mode={mode!r}; one of abort, wait, keep")
        await asyncio.wrap_future(self.scheduler.pause(mode))
        return _json({"status": "paused"})

    async def resume(self, request: web.Request) -> web.Response:
        """After `/pause`."""
        await asyncio.wrap_future(self.scheduler.resume())
        return _json({"status": "resumed"})

    async def update_weights(self, request: web.Request) -> web.Response:
        """Load the parameters in a safetensors file."""
        path = (await _body(request))["update_info"]["path"]
        try:
            state = await asyncio.to_thread(load_file, path)
            await asyncio.wrap_future(self.scheduler.load_weights(state))
        except (OSError, ValueError) as error:
            raise SamplingError(f"cannot load {path}: {error}") from error
        return _json({"message": "Weights updated"})

    async def finish_weight_update(self, request: web.Request) -> web.Response:
        """From now on answers carry the next version."""
        version = await asyncio.wrap_future(self.scheduler.finish_update())
        return _json({"message": "Weight update finished", "policy_version": version})

    async def _sample(self, prompts: Sequence[list[int]], sampling: Sampling) -> list[Generation]:
        """Finished generations; aborted when the client goes away, which cancels this."""
        eos = self.tokenizer.eos_token_id
        started = [Generation(prompt, sampling, eos, self._decode) for prompt in prompts]
        for generation in started:
            self.scheduler.submit(generation)
        try:
            return list(await asyncio.gather(*(asyncio.wrap_future(g.done) for g in started)))
        except asyncio.CancelledError:
            for generation in started:
                self.scheduler.abort(generation)
            raise

    def _known_model(self, body: Json) -> Json:
        if body.get("stream"):
            raise SamplingError("the token server does not stream")
        if body.get("model") not in (None, self.name):
            raise web.HTTPNotFound(text=f"The model `{body['model']}` does not exist.")
        return body

    def _must_fit(self, length: int) -> None:
        if length > self.max_model_len:
            raise SamplingError(
                f"This model's maximum context length is {self.max_model_len} tokens. However, your request has {length}."
            )

    def _prompts(self, prompt: Any) -> list[list[int]]:
        if isinstance(prompt, str):
            return [self._encoded(prompt)]
        if prompt and isinstance(prompt[0], int):
            return [_ids(prompt)]
        return [self._encoded(entry) if isinstance(entry, str) else _ids(entry) for entry in prompt]

    def _rendered(self, body: Mapping[str, Any]) -> list[int]:
        messages = [{**m, "content": m.get("content") or ""} for m in body["messages"]]
        return list(
            self.renderer.render_ids(
                messages, tools=_tools(body), add_generation_prompt=body.get("add_generation_prompt", True)
            )
        )

    def _encoded(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    async def _close(self, app: web.Application) -> None:
        await asyncio.to_thread(self.scheduler.close)


def _ids(value: Any) -> list[int]:
    if not isinstance(value, list) or not value or not all(type(token) is int for token in value):
        raise SamplingError("a prompt of ids is a non-empty list of integers")
    return value


def _tools(body: Mapping[str, Any]) -> list[Any] | None:
    tools = body.get("tools")
    return [tool.get("function", tool) for tool in tools] if tools else None


def _id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(8)}"


async def _body(request: web.Request) -> Json:
    raw = await request.read()
    body = orjson.loads(raw) if raw else {}
    if not isinstance(body, dict):
        raise SamplingError("the body must be a JSON object")
    return body


def _json(value: Any) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")


def _answering(value: Json) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(request: web.Request) -> web.Response:
        return _json(value)

    return answer


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Errors in OpenAI's format, as vLLM's."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _error(error.status, error.text or error.reason)
    except (SamplingError, orjson.JSONDecodeError) as error:
        return _error(400, str(error))
    except (KeyError, TypeError) as error:
        return _error(400, f"the body does not fit {request.path}: {error!r}")


def _error(status: int, message: str) -> web.Response:
    kind = {400: "BadRequestError", 404: "NotFoundError"}.get(status, "InternalServerError")
    body = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return web.Response(status=status, body=orjson.dumps(body), content_type="application/json")
