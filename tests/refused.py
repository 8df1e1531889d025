"""Tables of arguments that are refused, each with its message."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from raydist.core.errors import InvalidArgumentError

__all__ = ["check_refused"]


def check_refused(
    call: Callable[[Any], object], cases: Iterable[tuple[Any, str]], error: type[Exception] = InvalidArgumentError
) -> None:
    """Check that `call` raises `error` for what comes first in each case, with a message like what comes second."""
    for given, message in cases:
        with pytest.raises(error, match=message):
            pytest.fail(f"{given!r} was accepted: {call(given)!r}")
