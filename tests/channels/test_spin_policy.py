from __future__ import annotations

from raydist.channels.sleeper import SpinPolicy


def play(policy: SpinPolicy, num_waits: int) -> int:
    """How often it watches, in vain, in so many waits."""
    watched = 0
    for _ in range(num_waits):
        if policy.spin_s() > 0:
            watched += 1
            policy.in_vain()
    return watched


def test_long_waits_are_hardly_watched() -> None:
    assert play(SpinPolicy(), 1000) < 25


def test_it_goes_on_trying() -> None:
    policy = SpinPolicy()
    play(policy, 1000)
    assert play(policy, 1000) >= 10


def test_what_comes_in_time_is_watched_for_again() -> None:
    policy = SpinPolicy()
    play(policy, 1000)
    policy.in_time()
    for _ in range(10):
        assert policy.spin_s() > 0
        policy.in_time()
    policy.in_vain()
    assert [policy.spin_s() > 0 for _ in range(2)] == [False, True]


def test_short_sleeps_bring_it_back_sooner() -> None:
    policy, other = SpinPolicy(), SpinPolicy()
    for one in (policy, other):
        play(one, 1000)
    for _ in range(6):
        other.slept(10.0)
        policy.slept(50e-6)
    assert policy.spin_s() > 0
    assert other.spin_s() == 0
