from __future__ import annotations

import pytest

from raydist.channels import gathering
from raydist.channels.gathering import rest_s


@pytest.mark.parametrize(
    ("num_missing", "crowd", "seconds"),
    [(1, False, 0), (8, True, 0), (10, False, 0.0006), (10, True, 0.004), (99, True, 0.0128)],
)
def test_the_more_are_to_come_the_longer_is_waited_for_several(
    num_missing: int, crowd: bool, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "is_crowd", lambda _: crowd)
    assert rest_s(num_missing) == pytest.approx(seconds)
