"""What tables of cases are compared with: calls of a function, elements and errors as plain values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from raydist.dataset import Dataset
from tests.contracts.op import EXECUTORS, MakeExecutor, collect, is_error, iterate

__all__ = ["outline", "recorder"]


def recorder(calls: list[int]) -> Callable[[Any], Any]:
    """A map function that changes nothing and notes what it was called with."""

    def note(x: Any) -> Any:
        calls.append(int(x))
        return x

    return note


def outline(dataset: Dataset, make_executor: MakeExecutor = EXECUTORS[0]) -> list[Any]:
    """Elements of one leaf as Python values, and errors as the names of their classes."""
    items = collect(iterate(dataset, make_executor))
    return [item[0] if is_error(item) else np.asarray(item).tolist() for item in items]
