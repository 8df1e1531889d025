"""The base class of all parts of :class:`raydist.Dataset`: a graph of operations."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import cloudpickle

from raydist.actors.workers.executors import Executors
from raydist.core.errors import InvalidArgumentError
from raydist.pipelines.engine.op import DatasetOp
from raydist.pipelines.metering.iteration_meters import IterationMeters
from raydist.pipelines.run.plan import require_short_chain

# Names of tf.data, past or present, that ported programs may use.
_INSTEAD = MappingProxyType(
    {
        "sparse_batch": "Make sparse tensors in the step: batch their indices and values by padded_batch.",
        "make_one_shot_iterator": "Use iter(dataset).",
        "make_initializable_iterator": "Use iter(dataset).",
        "output_types": "Use element_spec.",
        "output_shapes": "Use element_spec.",
        "output_classes": "Use element_spec.",
    }
)


class DatasetBase:
    """An immutable graph, and what its iterations in this process share: epoch number, seed, executors and meters.

    A copy or pickle has the graph alone. A strategy takes the graph, too, and runs it without
    `Running`: in input pipelines or, on one device, in this process.

    The parts of the interface inherit from this class; `Dataset` combines them.
    """

    __dataset_leaf__: ClassVar[bool] = True  # by which the engine recognises datasets that are elements

    def __init__(self, op: DatasetOp) -> None:
        self._op = require_short_chain(op)
        self._epochs = itertools.count()
        self._drawn_seed: int | None = None
        self._element_seed: int | None = None  # of a dataset that is an element of another
        self._meters: IterationMeters | None = None  # of the latest iteration
        self._executors = Executors()

    def __reduce__(self) -> tuple[Any, ...]:
        # cloudpickle, because the functions of a pipeline are often lambdas. The copy counts epochs anew.
        return _unpickle, (type(self), cloudpickle.dumps(self._op), self._element_seed)

    def _with_element_seed(self, seed: int) -> Self:
        """Return this dataset as an element of another: random choices without their own seed follow from `seed`."""
        element = type(self)(self._op)
        element._drawn_seed = element._element_seed = seed
        return element

    def __bool__(self) -> bool:
        return True

    if not TYPE_CHECKING:  # type checkers report unknown names themselves

        def __getattr__(self, name: str) -> Any:
            found = getattr(type(self), name, None)
            if isinstance(found, property):  # it raised an AttributeError, so Python asks here
                return found.__get__(self)
            hint = f" {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}.{hint}", name=name, obj=self
            )

    def __repr__(self) -> str:
        return f"<Dataset {self._op.label}, cardinality {self._op.cardinality()}>"


def graphs(datasets: Sequence[DatasetBase], caller: str) -> tuple[DatasetOp, ...]:
    """Return the operations of one or more datasets.

    Raises:
        TypeError: A value is not a dataset.
        InvalidArgumentError: There is no dataset.
    """
    for dataset in datasets:
        if not isinstance(dataset, DatasetBase):
            raise TypeError(f"{caller} takes datasets, got {dataset!r:.100}.")
    if not datasets:
        raise InvalidArgumentError(f"{caller} needs at least one dataset, got none.")
    return tuple(dataset._op for dataset in datasets)


def named(op: DatasetOp, name: str | None) -> DatasetOp:
    """Return `op` with the user's name.

    Raises:
        TypeError: The name is not text.
    """
    if name is None:
        return op
    if not isinstance(name, str):
        raise TypeError(f"name must be a str or None, got {name!r:.100}.")
    return dataclasses.replace(op, given_name=name)


def _unpickle(kind: type[DatasetBase], op: bytes, seed: int | None = None) -> DatasetBase:
    dataset = kind(cloudpickle.loads(op))
    return dataset if seed is None else dataset._with_element_seed(seed)
