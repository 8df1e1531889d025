from __future__ import annotations

import pytest

from raydist.core.errors import InvalidArgumentError
from raydist.options.requirement import require


def test_what_holds_is_let_through() -> None:
    require(True, "n must be > 0", 1)


def test_what_does_not_hold_is_told_with_what_was_got() -> None:
    with pytest.raises(InvalidArgumentError, match=r"n must be > 0, got -1\."):
        require(False, "n must be > 0", -1)
