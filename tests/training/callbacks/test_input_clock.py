from __future__ import annotations

from raydist.training.callbacks.tensor_board import InputClock


def test_the_time_between_a_dispatched_step_and_the_next_batch_is_waiting() -> None:
    times = iter([0.0, 1.0, 3.0, 3.5, 4.0, 8.0])
    clock = InputClock(lambda: next(times))
    clock.begin()
    clock.drawn()
    clock.dispatched()
    clock.drawn()
    assert clock.steps_per_second(2) == 2 / 0.5
    assert clock.waiting() == 1.0 + 0.5
    assert clock.seconds() == 8.0


def test_no_time_is_no_rate() -> None:
    assert InputClock(lambda: 0.0).steps_per_second(1) == 0.0
