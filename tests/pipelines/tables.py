"""What tables of cases are compared with: calls of a function, errors, elements and errors as plain values."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from raydist.dataset import Dataset
from tests.contracts.op import EXECUTORS, MakeExecutor, collect, is_error, iterate

__all__ = ["check_refused", "outline", "recorder"]


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


def check_refused(kind: type[BaseException], cases: Iterable[tuple[Callable[[], object], str]]) -> None:
    """Call each function: it must raise an error of this kind, whose text matches the pattern."""
    wrong: list[str] = []
    for number, (call, message) in enumerate(cases):
        try:
            got = f"returned {call()!r}"
        except kind as error:
            if re.search(message, str(error)):
                continue
            got = repr(error)
        wrong.append(f"case {number}, which must say {message!r}, {got}")
    assert not wrong, "\n".join(wrong)
