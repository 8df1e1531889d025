from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from raydist.core.errors import InvalidArgumentError
from raydist.options import Timeouts


@pytest.mark.parametrize("name", [limit.name for limit in fields(Timeouts)])
@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), None])
def test_every_time_limit_is_finite_and_positive(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"Timeouts\.{name} must be a finite number"):
        Timeouts(**{name: value})
