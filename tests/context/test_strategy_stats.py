from __future__ import annotations

import dataclasses

import pytest

import raydist as rd


def test_counts_begin_at_nothing_and_stay_as_they_are() -> None:
    stats = rd.OneDeviceStrategy("cpu").stats()
    assert stats == rd.StrategyStats(steps=0, nonfinite_backwards=0, skipped_updates=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.steps = 1  # type: ignore[misc]  # the point
