from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest

from raydist.core.errors import InvalidArgumentError
from raydist.core.values import NoNumber


class Held(NoNumber):
    @staticmethod
    def _refusal() -> str:
        return "Ask for it."


@pytest.mark.parametrize(
    "use", [bool, int, float, operator.neg, abs, lambda it: it + 1, lambda it: 2 * it, lambda it: it < it]
)
def test_it_cannot_be_computed_with(use: Callable[[Any], Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^Ask for it\.$"):
        use(Held())


def test_it_can_be_compared_and_kept() -> None:
    one, other = Held(), Held()
    assert one == one
    assert one != other
    assert len({one, other}) == 2
