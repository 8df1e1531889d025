from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from raydist.pipelines.elements.columns_read import columns_read


def two_lines(row: Any) -> Any:
    first = row["a"]
    if first > 0:
        return first
    return row["b"][0], "row"


@pytest.mark.parametrize(
    ("fn", "names"),
    [
        (lambda row: row["a"], {"a"}),
        (lambda row: {"x": row["a"] * 2, "y": row["a"]}, {"a"}),
        (lambda row, *, rng: row["a"] + rng.random(), {"a"}),
        (lambda row: [x + 1 for x in row["a"]], {"a"}),
        (two_lines, {"a", "b"}),
        (lambda row: 3, set()),
    ],
)
def test_constant_names(fn: Callable[..., Any], names: set[str]) -> None:
    assert columns_read(fn) == frozenset(names)


def rebinds(row: Any) -> Any:
    same = row
    return same["a"]


def assigns(row: Any) -> Any:
    row["b"] = 1
    return row["a"]


def closes_over(row: Any) -> Any:
    return [row["a"] for _ in range(2)] + (lambda: row["a"])()


NAME = "a"


@pytest.mark.parametrize(
    "fn",
    [
        lambda row: row,
        lambda row: row[NAME],
        lambda row: row[0],
        lambda row: row["a":],
        lambda row: len(row) + row["a"],
        lambda row: row.get("a"),
        lambda *rows: rows[0]["a"],
        lambda row, **more: row["a"],
        lambda row, other: row["a"],
        lambda row: eval("row")["a"],
        lambda row: locals()["row"]["b"] + row["a"],
        lambda row: row["a"] if "b" in row else 0,
        functools.partial(lambda row: row["a"]),
        len,
        rebinds,
        assigns,
        closes_over,
    ],
)
def test_anything_else_proves_nothing(fn: Callable[..., Any]) -> None:
    assert columns_read(fn) is None
