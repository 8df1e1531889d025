from __future__ import annotations

from raydist.coordinator.workforce import ClosurePace


def test_short_closures_go_together_and_long_ones_alone() -> None:
    pace = ClosurePace()
    pace.learn(b"short", 0.0001)
    pace.learn(b"long", 1.0)
    assert pace.most(b"short") == 16
    assert pace.most(b"long") == 1


def test_it_follows_what_closures_take_and_forgets_old_functions() -> None:
    pace = ClosurePace()
    pace.learn(b"f", 1.0)
    for _ in range(60):
        pace.learn(b"f", 0.01)
    assert pace.most(b"f") == 2
    for number in range(300):
        pace.learn(number.to_bytes(2, "big"), 0.001)
    assert pace.most(b"f") == 1
