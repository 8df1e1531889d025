"""Every operation keeps the contract of operations, alone and in company."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import call
from typing import Any

import numpy as np
import pytest

import raydist.pipelines
from raydist.core.errors import SpecError
from raydist.core.values import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from raydist.dataset import Dataset
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.engine.build import walk
from raydist.pipelines.engine.op import DatasetOp
from raydist.pipelines.run.plan import make_plan
from tests.contracts.datasets import DATASETS
from tests.contracts.op import check_op, iterate
from tests.refused import check_refused

FAMILIES = sorted({name.split()[0].strip(",") for name in DATASETS})


@pytest.mark.parametrize("family", FAMILIES)
def test_operation_keeps_its_contract(family: str) -> None:
    for name, make_dataset in DATASETS.items():
        if name.split()[0].strip(",") == family:
            try:
                check_op(make_dataset)
            except BaseException as error:
                error.add_note(f"The dataset {name!r} of tests/contracts/datasets.py.")
                raise


def test_no_operation_is_forgotten() -> None:
    for module in pkgutil.walk_packages(raydist.pipelines.__path__, "raydist.pipelines."):
        importlib.import_module(module.name)
    forgotten = {op.__name__ for op in _operations(DatasetOp.__subclasses__())} - set().union(
        *map(_operations_in, DATASETS.values())
    )
    assert forgotten == set(), "add to DATASETS of tests/contracts/datasets.py datasets in whose graphs they stand"


def _operations(kinds: Iterable[type[DatasetOp]]) -> Iterator[type[DatasetOp]]:
    for op in kinds:
        if not inspect.isabstract(op) and op.__module__.startswith("raydist.pipelines."):
            yield op
        yield from _operations(op.__subclasses__())


def _operations_in(make_dataset: Callable[[], Dataset]) -> set[str]:
    """Names of the operations of a pipeline, those that rewrites put in included."""
    dataset = make_dataset()
    plan = make_plan(dataset._op, dataset.options())
    return {type(op).__name__ for graph in (plan.written, plan.optimised) for op in walk(graph)}


FIVE = Dataset.range(5)
ENDLESS = FIVE.repeat()
UNKNOWN = FIVE.filter(lambda x: True)
INTS = TensorSpec((None,), np.int64)
RAGGED = Dataset.range(1, 5).map(lambda n: np.full(n, n), output_spec=INTS)
ROWS = Dataset.from_tensor_slices((np.zeros((4, 3), np.uint8), ["a"] * 4))
NUMBER = TensorSpec((), np.int64)


def keep(x: Any) -> Any:
    return x


def running(total: Any, x: Any) -> Any:
    return total + x, total + x


# What is done to range(5); cardinalities for it, for an endless input and for one of unknown size.
SIZES: list[tuple[Callable[[Dataset], Dataset], tuple[int | str, int | str, int | str]]] = [
    (lambda ds: ds.map(keep), (5, "infinite", "unknown")),
    (lambda ds: ds.filter(lambda x: True), ("unknown", "unknown", "unknown")),
    (lambda ds: ds.batch(2), (3, "infinite", "unknown")),
    (lambda ds: ds.batch(2, drop_remainder=True), (2, "infinite", "unknown")),
    (lambda ds: ds.padded_batch(2), (3, "infinite", "unknown")),
    (lambda ds: ds.batch(2).rebatch(2), ("unknown", "unknown", "unknown")),
    (lambda ds: ds.scan(0, running), (5, "infinite", "unknown")),
    (lambda ds: ds.window(2), (3, "infinite", "unknown")),
    (lambda ds: ds.shuffle(3), (5, "infinite", "unknown")),
    (lambda ds: ds.shuffle(3).repeat(), ("infinite", "infinite", "infinite")),
    (lambda ds: ds.repeat(2), (10, "infinite", "unknown")),
    (lambda ds: ds.repeat(0), (0, 0, 0)),
    (lambda ds: ds.repeat(-7), ("infinite", "infinite", "infinite")),
    (lambda ds: ds.take(2), (2, 2, "unknown")),
    (lambda ds: ds.take(9), (5, 9, "unknown")),
    (lambda ds: ds.take(-1), (5, "infinite", "unknown")),
    (lambda ds: ds.take(0), (0, 0, 0)),
    (lambda ds: ds.skip(2), (3, "infinite", "unknown")),
    (lambda ds: ds.skip(9), (0, "infinite", "unknown")),
    (lambda ds: ds.shard(3, 0), (2, "infinite", "unknown")),
    (lambda ds: ds.unique(), ("unknown", "unknown", "unknown")),
    (lambda ds: ds.assert_cardinality(7), (7, 7, 7)),
    (lambda ds: ds.interleave(Dataset.from_tensors), ("unknown", "unknown", "unknown")),
    (lambda ds: Dataset.zip(ds, Dataset.range(3)), (3, 3, "unknown")),
    (lambda ds: Dataset.zip(ds, ENDLESS), (5, "infinite", "unknown")),
    (lambda ds: Dataset.zip(ds, Dataset.range(0)), (0, 0, 0)),
    (lambda ds: ds.concatenate(FIVE), (10, "infinite", "unknown")),
    (lambda ds: ds.concatenate(ENDLESS), ("infinite", "infinite", "infinite")),
    (lambda ds: Dataset.sample_from_datasets([ds, FIVE]), ("unknown", "infinite", "unknown")),
    (lambda ds: Dataset.choose_from_datasets([ds, FIVE], FIVE), ("unknown", "unknown", "unknown")),
]


def test_cardinality() -> None:
    words = {INFINITE_CARDINALITY: "infinite", UNKNOWN_CARDINALITY: "unknown"}
    for number, (make, expected) in enumerate(SIZES):
        found = [make(dataset).cardinality() for dataset in (FIVE, ENDLESS, UNKNOWN)]
        assert tuple(words.get(size, size) for size in found) == expected, f"line {number} of SIZES"


def test_spec() -> None:
    for dataset, spec in (
        (ROWS.batch(2), (TensorSpec((None, 3), np.uint8), TensorSpec((None,), "U"))),
        (ROWS.batch(2, drop_remainder=True), (TensorSpec((2, 3), np.uint8), TensorSpec((2,), "U"))),
        (ROWS.batch(2).unbatch(), (TensorSpec((3,), np.uint8), TensorSpec((), "U"))),
        (FIVE.batch(4).rebatch(2), INTS),
        (FIVE.batch(4).rebatch(2, drop_remainder=True), TensorSpec((2,), np.int64)),
        (RAGGED.padded_batch(2), TensorSpec((None, None), np.int64)),
        (RAGGED.padded_batch(2, [5], drop_remainder=True), TensorSpec((2, 5), np.int64)),
        (RAGGED.bucket_by_sequence_length(len, [2], [2, 2]), TensorSpec((None, None), np.int64)),
        (RAGGED.bucket_by_sequence_length(len, [2], [2, 2], drop_remainder=True), TensorSpec((2, None), np.int64)),
        (RAGGED.group_by_window(len, lambda key, w: w.padded_batch(2), 9), TensorSpec((None, None), np.int64)),
        (RAGGED.rejection_resample(len, [0.2, 0.3, 0.5]), (NUMBER, INTS)),
        (FIVE.enumerate(), (NUMBER, NUMBER)),
        (FIVE.scan(0.0, lambda total, x: (total, (x, "text"))), (NUMBER, TensorSpec((), "str"))),
        (FIVE.unique(), NUMBER),
        (ENDLESS.interleave(lambda n: Dataset.from_tensors((n, "text"))), (NUMBER, TensorSpec((), "str"))),
        (Dataset.sample_from_datasets([FIVE, UNKNOWN]), NUMBER),
    ):
        assert dataset.element_spec == spec


def test_bad_arguments() -> None:
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: FIVE.assert_cardinality(-3), "expected_cardinality must be >= 0, .* got -3"),
        (lambda: FIVE.batch(2, collate=5), "collate must be a function"),  # type: ignore[arg-type]
        (lambda: FIVE.padded_batch(0), "batch_size must be >= 1, got 0"),
        (lambda: FIVE.ragged_batch(0), "batch_size must be >= 1, got 0"),
        (lambda: FIVE.filter(None), "filter needs a function"),  # type: ignore[arg-type]
        (lambda: FIVE.take_while(3), "take_while needs a function, got 3"),  # type: ignore[arg-type]
        (lambda: FIVE.map(3), "map needs a function, got 3"),  # type: ignore[arg-type]
        (lambda: FIVE.map(keep, num_parallel_calls=0), "num_parallel_calls must be >= 1.*got 0"),
        (lambda: FIVE.flat_map(3), "flat_map needs a function, got 3"),  # type: ignore[arg-type]
        (lambda: FIVE.scan(0, 3), "scan needs a function"),  # type: ignore[arg-type]
        (lambda: FIVE.reduce(0, 3), "reduce needs a function"),  # type: ignore[arg-type]
        (lambda: FIVE.group_by_window(keep, None, 2), "reduce_func must be a function"),  # type: ignore[arg-type]
        (lambda: FIVE.group_by_window(None, keep, 2), "key_func must be a function"),  # type: ignore[arg-type]
        (lambda: FIVE.rejection_resample(None, [1.0]), "class_func must be a function"),  # type: ignore[arg-type]
        (lambda: RAGGED.bucket_by_sequence_length(len, [2, 4], [1, 1]), "got 2 sizes for 2 boundaries"),
        (lambda: RAGGED.bucket_by_sequence_length(len, [4, 2], [1, 1, 1]), r"must ascend, got \[4, 2\]"),
        (lambda: RAGGED.bucket_by_sequence_length(len, [2], [1, 0]), r"must be >= 1, got \[1, 0\]"),
        (lambda: RAGGED.bucket_by_sequence_length(len, [2.5], [1, 1]), "bucket_boundaries must be a whole number"),  # type: ignore[list-item]
        (lambda: RAGGED.bucket_by_sequence_length(len, [], [1], None, None, True), "needs at least one boundary"),
        (lambda: FIVE.shuffle(0), "buffer_size must be >= 1.*got 0"),
        (lambda: FIVE.prefetch(-2), "buffer_size must be >= 0.*got -2"),
        (lambda: Dataset.sample_from_datasets([]), "needs at least one dataset"),
        (lambda: FIVE.unbatch().element_spec, "with a first dimension to split"),
        (lambda: next(iterate(FIVE.unbatch())), "must share their first dimension"),
    ]
    calls: list[tuple[Callable[..., object], str, list[Any]]] = [
        (
            lambda *args: FIVE.interleave(Dataset.from_tensors, *args),
            "must be",
            [(0,), (-2,), (2, 0), (2, 1, 0), (2, 1, 3), (2, 1, -2)],
        ),
        (
            lambda *sizes: FIVE.group_by_window(keep, lambda key, window: window, *sizes),
            "window_size",
            [(None, None), (3, keep), (0, None), (None, 3)],
        ),
        (lambda *args: FIVE.window(*args), "must be >= 1, got", [(0,), (-1,), (2, 0), (2, 1, 0)]),
        (lambda *args: FIVE.shard(*args), "must be", [(0, 0), (-1, 0), (3, 3), (3, -1)]),
        (
            lambda sizes: FIVE.batch(2).rebatch(sizes),
            "sizes of a rebatch must be >= 0",
            [(0,), (-1,), ([],), ([0, 0],), ([2, -1],)],
        ),
        (
            lambda weights: Dataset.sample_from_datasets([FIVE, FIVE], weights),
            "weights must",
            [([1.0],), ([0, 0],), ([-1, -1],), ([float("nan"), 1],), ([float("inf"), 1],), ([],)],
        ),
    ]
    cases += [(partial(call, *args), message) for call, message, tuples in calls for args in tuples]
    check_refused(call, cases)


def test_other_wrong_calls() -> None:
    check_refused(
        call,
        [
            (lambda: FIVE.concatenate([1, 2]), r"concatenate takes a Dataset, got \[1, 2\]"),  # type: ignore[arg-type]
            (lambda: Dataset.zip(), "zip takes datasets"),
            (lambda: Dataset.zip([FIVE, FIVE]), "zip takes datasets"),
            (lambda: Dataset.zip(FIVE, 3), "zip takes datasets"),
            (lambda: Dataset.zip(()), "zip takes datasets"),
            (lambda: Dataset.choose_from_datasets([FIVE], 3), "takes datasets, got 3"),  # type: ignore[arg-type]
            (lambda: FIVE.map(keep, deterministic=1), "must be a bool or None, got 1"),  # type: ignore[arg-type]
            (lambda: FIVE.interleave(keep, deterministic="no"), "deterministic must be a bool"),  # type: ignore[arg-type]
            (lambda: FIVE.with_options({"seed": 1}), r"takes rd\.Options"),  # type: ignore[arg-type]
        ],
        TypeError,
    )
    check_refused(
        call,
        [
            (lambda: FIVE.scan(object(), running), "A leaf must be"),
            (lambda: RAGGED.map(keep, output_spec=np.float32), "output_spec must be a nest"),
            (lambda: FIVE.concatenate(Dataset.zip(FIVE, FIVE)).element_spec, "one structure and dtype"),
            (lambda: Dataset.sample_from_datasets([FIVE, ROWS]).element_spec, "one structure and dtype"),
        ],
        SpecError,
    )
