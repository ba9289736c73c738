"""How many restarts an environment gets, and what each of them waits."""

from __future__ import annotations

from gymgate.stack.restarts import LONGEST_WAIT_S, Restarts


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_each_restart_waits_twice_as_long_as_the_one_before() -> None:
    restarts = Restarts(9, 600, Clock())
    assert [restarts.next_wait() for _ in range(10)] == [
        0,
        0.5,
        1,
        2,
        4,
        8,
        16,
        LONGEST_WAIT_S,
        LONGEST_WAIT_S,
        None,
    ]
    assert (restarts.total, restarts.recent) == (9, 9)


def test_a_restart_counts_for_as_long_as_the_window() -> None:
    """One crash a day is none too many; a fourth within the window is."""
    clock = Clock()
    restarts = Restarts(3, 600, clock)
    for _ in range(20):
        assert restarts.next_wait() == 0
        clock.now += 86400
    assert [restarts.next_wait() for _ in range(4)] == [0, 0.5, 1, None]
    clock.now += 600
    assert restarts.recent == 2, "the first is forgotten; the others waited, and count from when they ran"
    assert restarts.next_wait() == 1
    assert restarts.total == 24


def test_none_is_allowed() -> None:
    assert Restarts(0, 600, Clock()).next_wait() is None


def test_very_many_are_allowed() -> None:
    restarts = Restarts(10**6, 600, Clock())
    assert [restarts.next_wait() for _ in range(2000)][-1] == LONGEST_WAIT_S
