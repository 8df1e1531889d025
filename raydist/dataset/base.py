"""What every part of :class:`raydist.Dataset` shares: one graph of operations."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import cloudpickle

from raydist.actors.workers.executors import Executors
from raydist.errors import InvalidArgumentError
from raydist.pipelines.engine.op import DatasetOp
from raydist.pipelines.metering.iteration_meters import IterationMeters

__all__ = ["DatasetBase", "graphs"]


class DatasetBase:
    """An immutable graph, and how often this object was iterated over.

    The parts of the facade inherit from it; `Dataset` puts them together.
    """

    def __init__(self, op: DatasetOp) -> None:
        self._op = op
        self._epochs = itertools.count()
        self._drawn_seed: int | None = None
        self._meters: IterationMeters | None = None  # of the iteration that was begun last
        self._executors = Executors()

    def __reduce__(self) -> tuple[Any, ...]:
        # cloudpickle, because the functions of a pipeline are often lambdas. Epochs are counted anew.
        return _unpickle, (type(self), cloudpickle.dumps(self._op))

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<Dataset {self._op.label}, cardinality {self._op.cardinality()}>"


def graphs(datasets: Sequence[DatasetBase], caller: str) -> tuple[DatasetOp, ...]:
    """The operations of one or more datasets.

    Raises:
        TypeError: One of them is no dataset.
        InvalidArgumentError: There is none.
    """
    for dataset in datasets:
        if not isinstance(dataset, DatasetBase):
            raise TypeError(f"{caller} takes datasets, got {dataset!r:.100}.")
    if not datasets:
        raise InvalidArgumentError(f"{caller} needs at least one dataset, got none.")
    return tuple(dataset._op for dataset in datasets)


def _unpickle(kind: type[DatasetBase], op: bytes) -> DatasetBase:
    return kind(cloudpickle.loads(op))
