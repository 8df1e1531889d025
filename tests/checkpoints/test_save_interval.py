"""When a checkpoint is due."""

from __future__ import annotations

from typing import Any

import pytest

from raydist.checkpoints.save_interval import SaveInterval
from raydist.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("interval", "step", "since", "seconds", "due"),
    [
        (SaveInterval(), 1, 1, 0.0, True),
        (SaveInterval(steps=3), 3, 1, 1e6, False),
        (SaveInterval(steps=3), 4, 1, 0.0, True),
        (SaveInterval(steps=3), 1, None, 0.0, True),
        (SaveInterval(seconds=10), 100, 1, 9.9, False),
        (SaveInterval(seconds=10), 100, None, 9.9, False),
        (SaveInterval(seconds=10), 2, 1, 10.0, True),
        (SaveInterval(steps=3, seconds=10), 2, 1, 10.0, True),
        (SaveInterval(steps=3, seconds=10), 4, 1, 0.0, True),
        (SaveInterval(steps=3, seconds=10), 2, 1, 1.0, False),
    ],
)
def test_steps_or_seconds(interval: SaveInterval, step: int, since: int | None, seconds: float, due: bool) -> None:
    assert interval.is_due(step, since_step=since, seconds=seconds) == due


@pytest.mark.parametrize("arguments", [{"steps": 0}, {"steps": True}, {"seconds": -1}, {"seconds": "1"}])
def test_intervals_are_positive(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="> ?=? ?[01]"):
        SaveInterval(**arguments)
