from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from raydist.dataset import Dataset
from raydist.pipelines.elements.functions import call_rows, element_rows, function_label, wants_rng
from raydist.pipelines.elements.items import ElementError
from raydist.pipelines.elements.rows import block_of_rows
from raydist.pipelines.elements.seeds import RandomKey


class Scale:
    def __call__(self, x: Any) -> Any:
        return x * 2


def augment(x: Any, *, rng: np.random.Generator) -> Any:
    return x + rng.random()


def test_describe_names_file_line_and_function() -> None:
    assert function_label(augment) == f"test_functions.py:{augment.__code__.co_firstlineno} augment"
    assert function_label(functools.partial(augment, 1)) == function_label(augment)
    assert function_label(Scale()).endswith("Scale")
    assert function_label(Scale()).startswith("test_functions.py:")
    assert function_label(len) == "len"


def test_wants_rng() -> None:
    assert wants_rng(augment)
    assert not wants_rng(lambda x, rng: x)
    assert not wants_rng(int)


def test_element_rows_rebuild_nests() -> None:
    rows: list[Any] = [(1, {"a": "x", "b": (np.zeros(2), b"")}), (2, {"a": "y", "b": (np.ones(2), b"z")})]
    block = block_of_rows(rows)
    rebuilt = list(element_rows(block.structure, block.columns))
    assert [row[1]["a"] for row in rebuilt] == ["x", "y"]
    assert rebuilt[1][1]["b"][0].tolist() == [1, 1]


def test_calls_go_on_behind_an_error() -> None:
    results, failed = call_rows(lambda x: 6 // int(x), block_of_rows([2, 0, 3]), start=10)
    assert (results[0], results[2], failed) == (3, 2, [1])
    assert isinstance(results[1], ElementError)
    assert results[1].index == 11


def test_random_calls_depend_on_the_index() -> None:
    key = RandomKey(1, "map-1")
    whole, _ = call_rows(augment, block_of_rows([0.0, 0.0, 0.0]), 5, key)
    part, _ = call_rows(augment, block_of_rows([0.0]), 6, key)
    assert part == [whole[1]]
    assert len(set(whole)) == 3


def test_only_a_keyword_only_rng_is_wanted() -> None:
    def plain(x: int, y: int = 1, *, scale: int = 2, rng: object) -> int:
        return x

    @functools.wraps(plain)
    def wrapper(*args: int, **keywords: object) -> int:
        return 1

    wanting: list[Callable[..., Any]] = [plain, wrapper, functools.partial(plain, scale=3)]
    others: list[Callable[..., Any]] = [lambda x, rng: x, lambda rng: rng, lambda x, *, seed: x, lambda **rng: rng, len]
    assert [wants_rng(fn) for fn in wanting] == [True] * 3
    assert [wants_rng(fn) for fn in others] == [False] * 5


def test_a_large_row_is_the_functions_own_and_what_it_makes_of_it_in_place_is_not_copied() -> None:
    pixels = np.zeros((6, 1 << 15), np.float32)
    places: list[int] = []

    def brighter(x: Any) -> Any:
        x += len(places)
        places.append(x.ctypes.data)
        return x

    made = list(Dataset.from_tensor_slices(pixels).map(brighter, num_parallel_calls=1).as_numpy_iterator())
    assert [x[0] for x in made] == list(range(6))
    assert [x.ctypes.data for x in made] == places
    assert not pixels.any()


def test_large_rows_are_copied_one_by_one() -> None:
    block = block_of_rows([np.zeros(1 << 15, np.float32)] * 3).shared()
    kept: list[Any] = []
    call_rows(kept.append, block, 0)
    assert all(row.base is None for row in kept)
    assert not any(np.shares_memory(row, block.columns[0]) for row in kept)
