from __future__ import annotations

from typing import Any

import pytest

import raydist as rd
from raydist.parameter_servers.consistency import require_consistency


def test_the_rules_there_are() -> None:
    for rule in ("async", rd.BoundedStaleness(0), rd.SyncWithBackups(2)):
        assert require_consistency(rule) == rule


@pytest.mark.parametrize("value", [-1, 1.0, True, None, "2"])
@pytest.mark.parametrize("kind", [rd.BoundedStaleness, rd.SyncWithBackups])
def test_they_are_given_counts(kind: Any, value: Any) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=rf"{kind.__name__} must be given an int >= 0 \(\w+\), got"):
        kind(value)


@pytest.mark.parametrize("value", ["sync", 3, None, rd.SyncWithBackups])
def test_anything_else_is_none(value: Any) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=r"consistency must be \"async\", rd.BoundedStaleness"):
        require_consistency(value)
