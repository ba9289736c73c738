"""Start the token server: prints `listening on URL`, ends on SIGINT or SIGTERM, or with --until-eof when stdin is closed."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from typing import Any

import torch
from aiohttp import web
from examples.token_server.server import TokenServer


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.token_server", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 for any free one")
    parser.add_argument("--model", default="tiny", help="tiny, or a directory with a Hugging Face causal LM")
    parser.add_argument("--served-model-name", help="default: --model")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--max-num-seqs", type=int, default=64, help="rows of the running batch")
    parser.add_argument("--seed", type=int, default=0, help="of the tiny model's weights")
    parser.add_argument("--until-eof", action="store_true", help="end when stdin is closed")
    asyncio.run(serve(parser.parse_args()))


async def serve(args: argparse.Namespace) -> None:
    """Until told to end."""
    model, tokenizer, renderer = load(args.model, args.seed)
    server = TokenServer(
        model,
        tokenizer,
        renderer,
        name=args.served_model_name or args.model,
        max_model_len=args.max_model_len,
        max_batch=args.max_num_seqs,
    )
    runner = web.AppRunner(server.application(), handler_cancellation=True, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, args.host, args.port)
        await site.start()
        port = runner.addresses[0][1]
        print(f"listening on http://{args.host}:{port}", flush=True)
        await told_to_end(until_eof=args.until_eof)
    finally:
        await runner.cleanup()


def load(model: str, seed: int) -> tuple[Any, Any, Any]:
    """Model, tokenizer and renderer."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    if model == "tiny":
        from examples.trl.tiny_policy import make_model, make_renderer, make_tokenizer

        tokenizer = make_tokenizer()
        return make_model(tokenizer), tokenizer, make_renderer(tokenizer)
    from renderers import create_renderer
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return AutoModelForCausalLM.from_pretrained(model), tokenizer, create_renderer(tokenizer)


async def told_to_end(*, until_eof: bool) -> None:
    """A signal, or the end of stdin."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    if until_eof:
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        reading = loop.create_task(reader.read())
        reading.add_done_callback(lambda _: ended.set())
    await ended.wait()


if __name__ == "__main__":
    main()
