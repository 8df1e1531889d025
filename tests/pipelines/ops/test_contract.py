"""Every operation keeps the contract of operations, alone and in company."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator

import pytest

import raydist.pipelines
from raydist.dataset import Dataset
from raydist.pipelines.engine.build import walk
from raydist.pipelines.engine.op import DatasetOp
from raydist.pipelines.run.plan import make_plan
from tests.contracts.datasets import DATASETS
from tests.contracts.op import check_op

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
