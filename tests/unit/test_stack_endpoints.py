"""The endpoints that a lease has told its daemon of, and when it tells it to forget one."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from gymgate.core.config import HTTPEndpoint
from gymgate.stack.client.endpoints import KEPT, RegisteredEndpoints


def endpoint(name: str, **sampling: Any) -> HTTPEndpoint:
    return HTTPEndpoint(base_url=f"http://{name}/v1", model="m", sampling=sampling)


def test_an_endpoint_is_told_once_and_by_the_text_of_its_sampling() -> None:
    told: list[tuple[str, int]] = []
    known = RegisteredEndpoints(lambda kind, number, **_: told.append((kind, number)))
    numbers = []
    for each in (
        endpoint("a", seed=1),
        endpoint("a", seed=1),
        endpoint("a", seed=1.0),
        endpoint("b", seed=1),
    ):
        with known.number_of(each) as number:
            numbers.append(number)
    assert numbers == [0, 0, 1, 2]
    assert told == [("register", 0), ("register", 1), ("register", 2)]


def test_only_what_no_rollout_uses_is_forgotten_the_least_recently_used_first() -> None:
    told: list[tuple[str, int]] = []
    known = RegisteredEndpoints(lambda kind, number, **_: told.append((kind, number)))
    with ExitStack() as in_use:
        held = in_use.enter_context(known.number_of(endpoint("held")))
        again = in_use.enter_context(known.number_of(endpoint("twice")))
        with known.number_of(endpoint("twice")) as number:
            assert number == again
        for name in range(KEPT):
            with known.number_of(endpoint(str(name))):
                pass
        with known.number_of(endpoint("0")) as first:  # used again, so the second is the oldest
            pass
        assert not [kind for kind, _ in told if kind == "forget"]
        with known.number_of(endpoint("one too many")):
            pass
        assert [number for kind, number in told if kind == "forget"] == [first + 1]
    forgotten = [number for kind, number in told if kind == "forget"]
    assert len(forgotten) == 3
    assert held not in forgotten
    assert again not in forgotten
    with known.number_of(endpoint("1")) as number:
        assert number == len([kind for kind, _ in told if kind == "register"]) - 1, "registered anew"
