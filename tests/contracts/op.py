"""The contract of all operations: `check_op(lambda: dataset)`."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from raydist.core.nest import flatten
from raydist.core.values import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from raydist.dataset import Dataset
from raydist.options import Options
from raydist.pipelines.elements.convert import numpy_rows
from raydist.pipelines.elements.element_nests import flatten_element
from raydist.pipelines.elements.small_floats import dtype_kind
from raydist.pipelines.elements.spec import DatasetSpec, ObjectSpec, spec_of_value
from raydist.pipelines.engine.executor import Executor, InlineExecutor
from raydist.pipelines.engine.threads import ThreadExecutor
from raydist.pipelines.run.iterator import DatasetIterator

__all__ = ["check_op", "collect", "is_error", "iterate", "same"]

SEED = 11
MOST_INSIDE = 20  # elements compared of a dataset that is an element
EXECUTORS: tuple[Callable[[Options], Executor], ...] = (
    lambda options: InlineExecutor(),
    lambda options: ThreadExecutor(3),
)

MakeExecutor = Callable[[Options], Executor]


def iterate(dataset: Dataset, make_executor: MakeExecutor = EXECUTORS[0], epoch: int = 0) -> DatasetIterator[Any]:
    """An iterator over numpy elements with a fixed seed."""
    options = dataset.options()
    seed = SEED if options.seed is None else options.seed
    return DatasetIterator(
        dataset._op, options=options, seed=seed, epoch=epoch, convert=numpy_rows, make_executor=make_executor
    )


def collect(iterator: Iterator[Any], limit: int = 1 << 30) -> list[Any]:
    """Elements and errors (as type and text) in order, up to `limit`."""
    items: list[Any] = []
    while len(items) < limit:
        try:
            items.append(next(iterator))
        except StopIteration:
            break
        except Exception as error:  # an error is an item like any other
            items.append((type(error).__name__, str(error)))
    return items


def is_error(item: Any) -> bool:
    """Return True if an item of `collect` is an error."""
    return isinstance(item, tuple) and isinstance(item[0], str) and item[0].endswith("Error")


def same(first: Any, second: Any) -> bool:
    """Return True if two lists of elements agree in structure, order of keys, dtype, shape and value."""
    mine, structure = flatten(tuple(first))
    theirs, other = flatten(tuple(second))
    if structure != other or structure.places() != other.places():
        return False
    return all(map(_same_leaf, mine, theirs))


def _inside(dataset: Dataset) -> list[Any]:
    """The first elements of a dataset that is an element; the first epoch, however often it is asked for."""
    iterator = DatasetIterator(
        dataset._op, options=dataset.options(), seed=dataset._root_seed(), epoch=0, convert=numpy_rows
    )
    found = collect(iterator, MOST_INSIDE)
    iterator.close()
    return found


def _same_leaf(mine: Any, theirs: Any) -> bool:
    if type(mine) is not type(theirs):
        return False
    if isinstance(mine, Dataset):
        return same(_inside(mine), _inside(theirs))
    if isinstance(mine, list):  # of `ragged_batch`, or of a `collate` function
        return len(mine) == len(theirs) and all(map(_same_leaf, mine, theirs))
    if not isinstance(mine, np.ndarray | np.generic):
        return bool(mine == theirs)
    if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
        return False
    return bool(np.array_equal(mine, theirs, equal_nan=dtype_kind(mine.dtype) in "fmM"))


def check_op(
    make_dataset: Callable[[], Dataset],
    expected: list[Any] | None = None,
    *,
    limit: int = 40,
    executors: tuple[MakeExecutor, ...] = EXECUTORS,
) -> None:
    """Run every check on the first `limit` elements of a dataset.

    Args:
        make_dataset: Builds the dataset anew.
        expected: Its elements, where they are known, as numpy values.
        limit: Where to stop; a longer or endless dataset is compared up to there.
        executors: Where to run it.
    """
    elements = collect(iterate(make_dataset()), limit)
    if expected is not None:
        assert same(elements, expected), f"got {elements}, expected {expected}"
    for make_executor in executors:
        assert same(collect(iterate(make_dataset(), make_executor), limit), elements), "same seed, same order"
    copied = pickle.loads(pickle.dumps(make_dataset()))
    assert same(collect(iterate(copied), limit), elements), "a pickled dataset is the same dataset"
    _check_cardinality(make_dataset(), elements, limit)
    _check_random_access(make_dataset(), elements)
    _check_spec(make_dataset(), elements)
    for number, make_executor in enumerate(executors):
        _check_resume(make_dataset, elements, limit, make_executor, executors[number - 1])
    _check_resume(lambda: make_dataset().prefetch(3), elements, limit, executors[0], executors[0])


def _check_cardinality(dataset: Dataset, elements: list[Any], limit: int) -> None:
    count = dataset.cardinality()
    if count == INFINITE_CARDINALITY:
        assert len(elements) == limit
    elif count != UNKNOWN_CARDINALITY:
        errors = sum(map(is_error, elements))  # `take` does not count them, a `batch` that one spoils does
        assert len(elements) - errors <= min(count, limit) <= len(elements)
        assert len(dataset) == count


def _check_random_access(dataset: Dataset, elements: list[Any]) -> None:
    """Elements that can be read by their index are those that come in order, in whatever order they are asked for."""
    access = dataset._op.random_access()
    count = len(elements) if access is None else min(len(access), len(elements))
    if access is None or count == 0 or any(map(is_error, elements)):
        return
    indices = np.random.default_rng(SEED).permutation(count)
    assert same(numpy_rows(access.gather(indices)), [elements[index] for index in indices]), "elements by their index"


def _check_spec(dataset: Dataset, elements: list[Any]) -> None:
    if not elements:
        return
    specs, structure = flatten_element(dataset.element_spec)
    for element in elements:
        if is_error(element):
            continue
        leaves, found = flatten_element(element)
        assert found == structure
        for spec, leaf in zip(specs, leaves, strict=True):
            if isinstance(leaf, list):
                assert isinstance(spec, ObjectSpec)
                continue
            found_spec = DatasetSpec() if isinstance(leaf, Dataset) else spec_of_value(leaf)
            assert spec.accepts(found_spec), f"{spec} does not accept {leaf!r}"


def _check_resume(
    make_dataset: Callable[[], Dataset],
    elements: list[Any],
    limit: int,
    saved_on: MakeExecutor,
    loaded_on: MakeExecutor,
) -> None:
    """Save after every element; load (in a fresh iterator, on another executor) and compare the rest, and its end."""
    first = iterate(make_dataset(), saved_on)
    for done in range(len(elements) + 1):
        state = json.dumps(first.state_dict())
        assert len(state) <= 10_000
        resumed = iterate(make_dataset(), loaded_on, epoch=99)
        resumed.load_state_dict(json.loads(state))
        assert json.dumps(resumed.state_dict()) == state, "a state that was loaded is the state that is saved"
        assert same(collect(resumed, limit - done), elements[done:]), f"resumed after {done} elements"
        resumed.close()
        collect(first, 1)
    first.close()
