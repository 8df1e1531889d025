"""Doing many things of which some may fail."""

from __future__ import annotations

import pytest

from raydist.mirroring.attempt import attempt_all


def test_every_call_is_made_in_order_and_the_first_error_is_raised() -> None:
    made: list[int] = []

    def fail(number: int) -> None:
        made.append(number)
        raise ValueError(f"call {number}")

    with pytest.raises(ValueError, match="call 1"):
        attempt_all([lambda: fail(1), lambda: fail(2), lambda: made.append(3)])
    assert made == [1, 2, 3]
