from __future__ import annotations

import pytest

from raydist import crowds
from raydist.crowds import is_crowd


@pytest.mark.parametrize(("num_processes", "expected"), [(1, False), (8, False), (9, True), (64, True)])
def test_more_than_two_a_core_are_a_crowd(monkeypatch: pytest.MonkeyPatch, num_processes: int, expected: bool) -> None:
    monkeypatch.setattr(crowds, "num_cores", lambda: 4)
    assert is_crowd(num_processes) is expected
