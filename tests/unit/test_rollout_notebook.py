"""What a notebook shows of a rollout: all of it is text, and of bounded size."""

from __future__ import annotations

import time
from html.parser import HTMLParser
from typing import Any

import pytest

import gymgate
from gymgate.rollouts import ModelCall, Rollout, RolloutError, Timing

HOSTILE = "</pre></details><script>alert(1)</script><img src=x onerror=alert(1)>\ud800 \"'&"


class Parsed(HTMLParser):
    """Tags, attributes and text; elements must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[Any] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def rollout(text: str = "so", entries: int = 1, **fields: Any) -> Rollout:
    said = [{"type": "message", "role": text[:50], "content": text} for _ in range(entries)]
    result = {"responses_create_params": {"input": "hi"}, "response": {"output": said}}
    calls = [ModelCall(index=0, dialect="chat"), ModelCall(index=1, dialect="chat", model_server="judge")]
    known: dict[str, Any] = {"status": "completed", "reward": 0.5, "result": result, "calls": calls}
    timing = Timing(total_s=2.25)
    return Rollout(**{"id": "x", "environment": text, "agent": text, "timing": timing, **known, **fields})


def test_a_table_and_the_folded_conversation() -> None:
    shown = Parsed(rollout()._repr_html_())
    assert shown.tags.count("tr") == 2
    assert shown.tags.count("details") == 3
    for text in ("completed", "0.5", "2.2", "so (2 characters)", "user (2 characters)", "hi"):
        assert text in shown.text
    assert shown.attributes == []


def test_a_failed_rollout_says_why() -> None:
    error = RolloutError(kind="policy", type="PolicyError", message="gone <b>")
    shown = Parsed(rollout(status="failed", reward=None, result=None, error=error)._repr_html_())
    assert "PolicyError: gone <b>" in shown.text
    assert "details" not in shown.tags


def test_a_reward_that_counts_for_nothing_is_not_shown() -> None:
    shown = Parsed(rollout(status="masked", reward=0.125)._repr_html_())
    assert "0.125" not in shown.text


def test_what_is_hostile_is_text() -> None:
    error = RolloutError(kind="policy", type=HOSTILE, message=HOSTILE)
    html = rollout(HOSTILE, status="failed", error=error)._repr_html_()
    assert {*Parsed(html).tags} == {
        *("div", "table", "thead", "tbody", "tr", "th", "td", "p", "details", "summary", "pre")
    }
    assert Parsed(html).attributes == []
    assert Parsed(html).text.count("<script>alert(1)</script>") == 6
    html.encode()


@pytest.mark.parametrize(("length", "entries"), [(10_000_000, 1), (1000, 10_000)])
def test_what_is_long_is_cut_and_says_so(length: int, entries: int) -> None:
    began = time.monotonic()
    value = rollout("<" * length, entries)
    html = value._repr_html_()
    assert len(html) < 1_000_000
    assert time.monotonic() - began < 5
    assert str(length - 2000 if entries == 1 else entries + 1 - 40) in Parsed(html).text


class Printer:
    """The part of IPython's pretty printer that is used."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def text(self, text: str) -> None:
        self.texts.append(text)


def test_in_a_list_a_rollout_is_a_line() -> None:
    error = RolloutError(kind="policy", type="PolicyError", message="xxx\n" * 3_000_000)
    printer = Printer()
    rollout("e" * 1000)._repr_pretty_(printer, cycle=False)
    rollout("e", status="failed", error=error)._repr_pretty_(printer, cycle=False)
    first, second = printer.texts
    assert "reward 0.5" in first
    assert "PolicyError: xxx" in second
    assert len(first + second) < 500
    assert "\n" not in first + second
    assert str(rollout("e" * 1000)) == first, "print shows no more"


def test_an_error_is_printed_on_one_line_and_keeps_its_fields() -> None:
    error = RolloutError(kind="policy", type="PolicyError", message="gone:\n  no room", status_code=503)
    assert str(error) == "PolicyError: gone: no room"
    assert (error.message, error.status_code) == ("gone:\n  no room", 503)
    assert RolloutError.model_validate_json(error.model_dump_json()) == error


def test_what_a_run_yields_is_shown_alike() -> None:
    collected = gymgate.CollectedRollout(**vars(rollout()), row_key="0" * 16)
    assert collected._repr_html_() == rollout()._repr_html_()
