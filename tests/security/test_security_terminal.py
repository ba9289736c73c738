"""Text from outside on a terminal: it is shown, and nothing in it is obeyed."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import web

from gymgate import cli
from gymgate.cli.output import echo, log, print_json, print_table
from gymgate.core.errors import PolicyError, from_wire, printable
from support.upstream import Seen, upstream, upstream_in_thread

HOSTILE = "\x1b]0;title\x07\x1b[31mred\x9b2J\r\u202eback\x00"
CONTROLS = {*map(chr, (*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0))), "\u202e"}


def test_control_characters_become_visible() -> None:
    assert printable("plain ± 日本 \t\n") == "plain ± 日本 \t\n"
    assert printable("\x1b[31m") == "\\x1b[31m"
    assert not CONTROLS & {*printable(HOSTILE)}


def test_no_error_holds_control_characters() -> None:
    """Neither one made here nor one that another process sent."""
    error = PolicyError(f"endpoint: {HOSTILE}", status_code=500)
    sent = from_wire({"error": "PolicyError", "message": HOSTILE})
    for each in (error, sent, pickle.loads(pickle.dumps(error))):
        assert not CONTROLS & {*str(each), *each.message}
    assert str(error) == error.message


def test_nothing_that_is_printed_holds_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    log(HOSTILE)
    echo(HOSTILE)
    print_table(["name", "text"], [[HOSTILE, HOSTILE]])
    print_json({HOSTILE: HOSTILE})
    shown = capsys.readouterr()
    assert json.loads(shown.out[shown.out.index("{") :]) == {HOSTILE: HOSTILE}
    assert not (CONTROLS - {"\n"}) & {*shown.out, *shown.err}
    assert "red" in shown.out
    assert "red" in shown.err


def test_commands_print_by_the_functions_that_show_control_characters() -> None:
    direct = re.compile(r"(click\.s?echo|console\.print|status\.update|^ *print)\((?!\))(.*)", re.MULTILINE)
    shown = re.compile(r'"[a-z ]+"|.*printable\(|f"gymgate: \{(error|where)\}')
    for module in Path(cli.__file__).parent.glob("*.py"):
        calls = direct.finditer(module.read_text()) if module.name != "output.py" else ()
        assert [call[0] for call in calls if shown.match(call[2]) is None] == [], module


def test_what_an_endpoint_lists_is_shown_and_not_obeyed() -> None:
    """By `gymgate doctor`, which asks it for its models."""

    async def listed(seen: Seen) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": HOSTILE, "object": "model"}]})

    with upstream_in_thread(listed) as endpoint:
        words = [
            sys.executable,
            "-m",
            "gymgate",
            "doctor",
            "--vllm",
            endpoint.url.removesuffix("/v1"),
            "-m",
            "m",
        ]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert "red" in done.stdout
    assert not (CONTROLS - {"\n"}) & {*done.stdout, *done.stderr}


async def test_an_endpoints_message_is_shown_and_not_obeyed() -> None:
    import aiohttp

    from gymgate.gateway.server import Gateway

    async def refuse(seen: Seen) -> web.Response:
        return web.json_response({"error": {"message": HOSTILE}}, status=400)

    async with upstream(refuse) as endpoint, Gateway() as gateway, aiohttp.ClientSession() as http:
        route = gateway.open(endpoint.endpoint())
        async with http.post(f"{route.base_url}/chat/completions", json={"messages": []}) as response:
            assert response.status == 400
        assert route.failure is not None
        assert "red" in str(route.failure)
        assert not CONTROLS & {*str(route.failure)}
