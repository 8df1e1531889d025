from __future__ import annotations

from raydist.channels.patience import Patience


def play(patience: Patience, num_waits: int) -> int:
    """How often it watches, in vain, in so many waits."""
    watched = 0
    for _ in range(num_waits):
        if patience.watch_s() > 0:
            watched += 1
            patience.in_vain()
    return watched


def test_long_waits_are_hardly_watched() -> None:
    assert play(Patience(), 1000) < 25


def test_it_goes_on_trying() -> None:
    patience = Patience()
    play(patience, 1000)
    assert play(patience, 1000) >= 10


def test_what_comes_in_time_is_watched_for_again() -> None:
    patience = Patience()
    play(patience, 1000)
    patience.in_time()
    for _ in range(10):
        assert patience.watch_s() > 0
        patience.in_time()
    patience.in_vain()
    assert [patience.watch_s() > 0 for _ in range(2)] == [False, True]


def test_short_sleeps_bring_it_back_sooner() -> None:
    patience, other = Patience(), Patience()
    for one in (patience, other):
        play(one, 1000)
    for _ in range(6):
        other.slept(10.0)
        patience.slept(50e-6)
    assert patience.watch_s() > 0
    assert other.watch_s() == 0
