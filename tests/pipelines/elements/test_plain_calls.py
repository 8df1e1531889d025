from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import raydist as rd
from raydist.dataset import Dataset
from raydist.pipelines.elements.plain_calls import only_plain_calls

SIZE = 5
SIZES = iter(range(5))
CALLS = {"batch", "zip", "Dataset"}


def named(window: Any) -> Any:
    return window.batch(SIZE, drop_remainder=True)


def of_size(size: int) -> Callable[[Any], Any]:
    return lambda window: window.batch(size)


def branch(window: Any) -> Any:
    return window.batch(5) if SIZE > 3 else window


def tries(window: Any) -> Any:
    try:
        return window.batch(5)
    except ValueError:
        return window


@pytest.mark.parametrize(
    ("fn", "count"),
    [
        (named, 1),
        (of_size(3), 1),
        (lambda w: w, 1),
        (lambda x, y: rd.Dataset.zip(x.batch(2), y.batch(SIZE)), 2),
        (lambda x, y: Dataset.zip((y, x)).batch(3), 2),
    ],
)
def test_what_is_the_same_at_every_call(fn: Callable[..., Any], count: int) -> None:
    assert only_plain_calls(fn, CALLS) == count


@pytest.mark.parametrize(
    "fn",
    [
        branch,
        tries,
        of_size("text"),  # type: ignore[arg-type]  # the point of this test
        len,
        partial(named),
        lambda w: w.map(len),
        lambda w: w.batch(next(SIZES)),
        lambda w: w.batch(len(SIZES)),  # type: ignore[arg-type]  # the point of this test
        lambda w: w.batch(unknown),  # type: ignore[name-defined]  # noqa: F821 - the point of this test
        lambda w: [w.batch(5)][0],
        lambda w: w.batch(SIZE + 1),
        lambda w: (print(w), w.batch(5))[1],
        lambda *w: w[0].batch(5),
        lambda w, size=5: w.batch(size),
        lambda w: (yield w.batch(5)),
    ],
)
def test_what_may_be_anything(fn: Callable[..., Any]) -> None:
    assert only_plain_calls(fn, CALLS) is None
