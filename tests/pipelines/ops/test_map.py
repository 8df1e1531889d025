"""Functions of elements, and of whole blocks where they are vectorised."""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from operator import call
from typing import Any

import numpy as np
import pytest
import torch

from raydist.core.errors import FailedPreconditionError, SpecError
from raydist.dataset import Dataset
from raydist.options import OptimizationOptions, Options
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.elements.tensor_functions import with_tensors
from tests.contracts.op import EXECUTORS, collect, iterate, same
from tests.pipelines.tables import outline, recorder
from tests.refused import check_refused

Point = namedtuple("Point", ["x", "y"])


@dataclasses.dataclass
class Pair:
    first: Any
    second: Any


def numbers(dataset: Dataset) -> list[Any]:
    return [np.asarray(x).tolist() for x in dataset.as_numpy_iterator()]


def test_a_tuple_is_unpacked_and_a_named_element_is_one_argument() -> None:
    tuples = Dataset.from_tensor_slices(([1, 2], [10, 20]))
    assert numbers(tuples.map(lambda a, b: a + b)) == [11, 22]
    assert numbers(tuples.map(lambda a, b: Point(a, b)).map(lambda p: p.x - p.y)) == [-9, -18]
    assert numbers(tuples.map(lambda a, b: {"a": a, "b": b}).map(lambda d: d["b"])) == [10, 20]
    assert numbers(tuples.map(lambda a, b: Pair(a, (b, a))).map(lambda p: p.second[0])) == [10, 20]
    assert numbers(tuples.map(lambda a, b: ((a, b), b)).map(lambda ab, b: ab[0] * b)) == [10, 40]


def test_an_error_keeps_its_type_and_place_and_says_where() -> None:
    def fails(x: int) -> int:
        if x == 3:
            raise KeyError("no label")
        return x

    for make_executor in EXECUTORS:
        iterator = iterate(Dataset.range(6).filter(lambda x: x > 1).map(fails), make_executor)
        assert int(next(iterator)) == 2
        with pytest.raises(KeyError, match="no label") as caught:
            next(iterator)
        (note,) = caught.value.__notes__
        assert note.startswith("In map-2 (test_map.py:")
        assert note.endswith("fails), element 1 of its input.")
        assert caught.traceback[-1].name == "fails"
        assert [int(x) for x in iterator] == [4, 5]
        iterator.close()


def test_stop_iteration_in_a_function_does_not_end_the_dataset() -> None:
    items = collect(iterate(Dataset.range(3).map(lambda x: next(iter([])) if x == 1 else x)))
    assert items == [0, ("RuntimeError", "The function raised StopIteration, which would end the iteration."), 2]


def test_another_structure_or_dtype_is_an_error_in_its_place() -> None:
    dataset = Dataset.range(4).map(lambda x: x if x != 2 else {"x": x})
    assert outline(dataset, EXECUTORS[1]) == [0, 1, "SpecError", 3]
    assert "gave * of int64, and now {'x': '*'} of int64" in collect(iterate(dataset, EXECUTORS[1]))[2][1]
    assert outline(Dataset.range(3).map(lambda x: int(x) if x != 1 else 0.5)) == [0, "SpecError", 2]


def test_a_value_that_no_tensor_can_hold_is_an_error() -> None:
    def first(value: Any) -> Any:
        return next(iterate(Dataset.range(2).map(lambda x: value)))

    wrong: list[Any] = [threading.Lock(), {1, 2}, object, np.array([object()])]
    cases: list[tuple[Callable[[], object], str]] = [(partial(first, {"bad": value}), "A leaf must") for value in wrong]
    nothing: list[Any] = [(), None, {"bad": None}]
    cases += [(partial(first, value), "at least one leaf") for value in nothing]
    cases += [(lambda: first(torch.empty(1, dtype=torch.bits8)), r"tensor\.float\(\)")]
    check_refused(call, cases, SpecError)
    check_refused(call, [(partial(first, 2**70), "must fit into int64")])


def test_output_spec_is_checked_per_element_and_saves_the_probe() -> None:
    calls = []

    def ragged(x: int) -> np.ndarray:
        calls.append(x)
        return np.zeros(int(x), np.float32)

    spec = TensorSpec((None,), np.float32)
    dataset = Dataset.range(3).map(ragged, output_spec=spec)
    assert dataset.element_spec == spec
    assert calls == []
    assert [len(x) for x in dataset.as_numpy_iterator()] == [0, 1, 2]
    narrow = collect(iterate(Dataset.range(4).map(ragged, output_spec=TensorSpec((2,), np.float32))))
    assert [item[0] if isinstance(item, tuple) else "" for item in narrow] == ["SpecError"] * 2 + ["", "SpecError"]
    assert "must return TensorSpec(shape=(2,), dtype=float32), got TensorSpec(shape=(0,)" in narrow[0][1]


def test_element_spec_runs_the_function_on_three_elements_once() -> None:
    calls: list[int] = []
    dataset = Dataset.range(9).map(recorder(calls))
    assert dataset.element_spec == dataset.element_spec == TensorSpec((), np.int64)
    assert calls == [0, 1, 2]
    with pytest.raises(FailedPreconditionError, match="the dataset is empty"):
        _ = Dataset.range(0).map(lambda x: x).element_spec


def test_arguments_may_be_written_without_harm() -> None:
    def double(row: np.ndarray) -> np.ndarray:
        row *= 2
        return row

    source = np.ones((3, 2))
    for _ in range(2):
        assert numbers(Dataset.from_tensor_slices(source).map(double)) == [[2, 2]] * 3
    assert (source == 1).all()


def test_num_parallel_calls_runs_at_the_same_time() -> None:
    both = threading.Barrier(2, timeout=20)

    def meets(x: int) -> int:
        both.wait()
        return x

    assert numbers(Dataset.range(4).map(meets, num_parallel_calls=2)) == [0, 1, 2, 3]
    main = threading.current_thread()
    in_order = Dataset.range(3).map(lambda x: threading.current_thread() is main, num_parallel_calls=1)
    assert numbers(in_order) == [True] * 3


def test_ragged_rows_are_copies_of_what_a_function_returns() -> None:
    kept = [np.arange(n) for n in range(1, 6)]

    def halves(n: Any) -> tuple[Any, Any]:
        return kept[int(n)][:-1], kept[int(n)][1:]

    def zeroed(first: Any, second: Any) -> tuple[Any, Any]:
        first[:] = -1
        return first, second

    found = list(Dataset.range(5).map(halves).map(zeroed))
    assert [second.tolist() for _, second in found] == [list(range(1, n)) for n in range(1, 6)]
    assert [array.tolist() for array in kept] == [list(range(n)) for n in range(1, 6)]
    rows = [row.tolist() for row in Dataset.range(1, 4).map(lambda n: np.arange(int(n))[::-1])]
    assert rows == [[0], [1, 0], [2, 1, 0]], "turned round"


ON = Options(optimization=OptimizationOptions(map_vectorization=True))
IMAGES = np.arange(60, dtype=np.float32).reshape(20, 3)


def check_same(dataset: Dataset, case: object) -> list[Any]:
    """Return the elements, which are the same with and without the setting."""
    plain = collect(iterate(dataset))
    assert same(collect(iterate(dataset.with_options(ON))), plain), case
    return plain


def test_a_function_that_writes_to_its_argument() -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        x *= 2
        return x.clone()

    dataset = Dataset.from_tensor_slices(IMAGES.copy()).map(lambda x: x + 1).map(with_tensors(doubled))
    assert np.array_equal(np.stack(check_same(dataset, "written to")), 2 * (IMAGES + 1))


def test_whole_blocks_are_run_at_once() -> None:
    calls: list[tuple[int, ...]] = []

    def note(x: Any) -> Any:
        calls.append(tuple(x.shape))
        return x + 1

    elements = collect(iterate(Dataset.range(1, 400).map(note).batch(400).with_options(ON)))
    assert elements[0].tolist() == list(range(2, 401))
    assert len(calls) < 100


def branches(x: Any) -> Any:
    return x if x > 4 else -x


def fails_once(x: Any) -> Any:
    if x == 7:
        raise ValueError("seven")
    return x


def test_a_function_that_vmap_cannot_run_is_called_for_each_element() -> None:
    functions: list[Callable[..., Any]] = [
        *(branches, fails_once, str, lambda x: x * 0.5, lambda x: x + np.random.default_rng(0).integers(9))
    ]
    for fn in functions:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check_same(Dataset.range(20).map(fn).batch(20), fn)
    with pytest.warns(RuntimeWarning, match=r"py:\d+ branches\) over whole blocks, and cannot"):
        collect(iterate(Dataset.range(20).map(branches).batch(20).with_options(ON)))
