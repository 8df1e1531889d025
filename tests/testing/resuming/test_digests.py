from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from raydist.errors import SpecError
from raydist.testing.resuming.digests import state_digest

STATE: dict[str, Any] = {"a": torch.arange(6).view(2, 3), "b": [1, 2.0, None, "x", b"y", (True,)], "c": np.ones(2)}


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.arange(6).view(3, 2)},
        {"a": torch.arange(6, dtype=torch.int32).view(2, 3)},
        {"a": torch.tensor([[0, 1, 2], [3, 4, 6]])},
        {"b": [1, 2.0, None, "x", b"y", [True]]},
        {"b": [1, 2.0, None, "x", b"y", (1,)]},
        {"c": np.ones((2, 1))},
        {"c": torch.ones(2, dtype=torch.float64)},
        {"d": None},
    ],
)
def test_any_difference_is_another_digest(other: dict[str, Any]) -> None:
    assert state_digest(STATE) == state_digest(dict(reversed(STATE.items())))
    assert state_digest({**STATE, **other}) != state_digest(STATE)


def test_bits_count_not_values() -> None:
    assert state_digest(torch.tensor(0.0)) != state_digest(torch.tensor(-0.0))
    assert state_digest(torch.tensor(float("nan"))) == state_digest(torch.tensor(float("nan")))
    assert state_digest(torch.empty(0)) != state_digest(torch.empty(0, 1))


def test_other_things_have_none() -> None:
    with pytest.raises(SpecError, match="got function"):
        state_digest({"a": [test_bits_count_not_values]})
