"""Results of steps: how a replica stores them and how the driver's nest of PerReplica reads them."""

from __future__ import annotations

import functools
import pickle
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, final

import numpy as np
import torch

from raydist.actors.class_tracking import cloudpickle
from raydist.context.cross_replica import require_one_structure
from raydist.errors import InvalidArgumentError, SpecError
from raydist.foreign_errors import folded
from raydist.nest import LEAF, NOTHING, Structure, flatten, unflatten
from raydist.pickling.by_fields import by_fields
from raydist.pickling.travelling_tensors import ArrivingTensor, Travelling, begin_packing
from raydist.summaries.record import Record
from raydist.values import Part, PerReplica

__all__ = ["ResultLeaf", "ReturnedStructures", "StepOutcome", "StepResult", "StepValues", "pack_result", "require_nest"]


@final
@dataclass(slots=True)  # not frozen, though nobody changes one: that takes twice as long to be read, in every step
class StepResult:
    """What one replica's step function returned, without graph and device.

    Attributes:
        structure: Its nest.
        leaves: The leaves of that.
        absent: The replica had no rows and worked on others': nobody is to see this.
        rows: Of how many rows it is; None where the step had no distributed batch.
        summaries: What the step recorded by `rd.summary`.
    """

    structure: Structure
    leaves: tuple[Any, ...]
    absent: bool = False
    rows: int | None = None
    summaries: tuple[Record, ...] = ()

    __reduce__ = by_fields

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors and arrays, about."""
        return sum(_num_bytes(leaf) for leaf in self.leaves) + sum(each.shown.num_bytes for each in self.summaries)

    @property
    def is_none(self) -> bool:
        """The step function returned None."""
        return self.structure == LEAF and self.leaves[0] is None

    def without_summaries(self) -> StepResult:
        """What the program may keep for long: summaries have been written."""
        return replace(self, summaries=()) if self.summaries else self

    def arrived(self) -> StepResult:
        """Return the result with all its tensors on the host; waits for a GPU."""
        if not any(isinstance(leaf, ArrivingTensor) for leaf in self.leaves):
            return self
        return replace(
            self, leaves=tuple(leaf.arrived() if isinstance(leaf, ArrivingTensor) else leaf for leaf in self.leaves)
        )

    def leaf(self, index: int) -> Any:
        """Leaf `index`, as the step's user sees it."""
        value = self.leaves[index]
        return value.unpack() if isinstance(value, Travelling) else value


def _num_bytes(leaf: Any) -> int:
    size: int = getattr(leaf, "nbytes", 64)
    return size


def pack_result(value: Any, *, absent: bool, rows: int | None = None, summaries: tuple[Record, ...] = ()) -> StepResult:
    """Make a step's result fit to travel. Tensors are detached and copied to the CPU.

    The host does not wait for copies from a GPU: call `arrived` of the result before it travels.

    Args:
        value: What the step function returned.
        absent: See `StepResult`.
        rows: See `StepResult`.
        summaries: See `StepResult`.

    Raises:
        SpecError: A leaf is neither a tensor nor a number and can't be pickled; says where it stands.
    """
    if type(value) is torch.Tensor:  # the nest of most steps, the loss: a dozen calls less
        return StepResult(LEAF, (begin_packing(value),), absent, rows, summaries)
    leaves, structure = flatten(value)
    packed = tuple(_pack_leaf(leaf, path) for leaf, path in zip(leaves, structure.paths(), strict=True))
    return StepResult(structure, packed, absent, rows, summaries)


def _pack_leaf(leaf: Any, path: str) -> Any:
    if isinstance(leaf, torch.Tensor):
        return begin_packing(leaf)
    if leaf is None or isinstance(leaf, int | float | bool | str | bytes | np.generic):
        return leaf
    if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        return leaf.copy()  # the next step, which may run before this travels, may write to it
    try:
        return pickle.loads(cloudpickle.dumps(leaf))
    except Exception as error:
        where = f" at {path!r}" if path else ""
        raise SpecError(
            f"A step must return tensors, numbers or what can be pickled, got {type(leaf).__name__}{where}: {error}. "
            "Return the numbers that you need of it."
        ) from error


class StepOutcome(Protocol):
    """One dispatched step, as its results are read: by the driver, or by another step."""

    @property
    def num_replicas(self) -> int:
        """On how many it runs."""

    def results(self) -> list[StepResult]:
        """Every replica's result; waits for the step and raises its error."""

    def part(self, rank: int, leaf_index: int, nest: str) -> Part:
        """Return the place of one leaf of one replica's result: who reads it there checks that it has this nest."""


@functools.lru_cache(maxsize=64)
def _shown(structure: Structure) -> str:
    """As it is shown: what travels, since its classes may be the program's own, known to one process only."""
    return str(structure)


def require_nest(found: Structure, nest: str) -> None:
    """Raise where the result of a step has another structure than the one that is shown as `nest`.

    Raises:
        InvalidArgumentError: Shows both.

    >>> require_nest(flatten({"a": 1})[1], "{'a': '*'}")
    """
    if _shown(found) != nest:
        raise InvalidArgumentError(
            f"A step must return the same structure in every call, got {nest} before and {_shown(found)} now. Return "
            "the same keys always, with None where there is nothing."
        )


@final
class StepValues:
    """The results of one step on all replicas, fetched together once and shared by the leaves of its nest.

    Args:
        outcome: The step.
        learn: Told of the result of a replica with rows, when the results are fetched.
    """

    def __init__(self, outcome: StepOutcome, learn: Callable[[StepResult], None] | None = None) -> None:
        self.outcome = outcome
        self._learn = learn
        self._results: list[StepResult] | None = None
        self._failure: Exception | None = None

    def results(self) -> list[StepResult]:
        """Every replica's result; waits for the step and raises its error.

        Each call raises the error of the first one: Python reads a property again that raises an AttributeError.
        """
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        if self._results is None:
            try:
                results = self.outcome.results()
            except Exception as error:
                self._failure = error
                raise
            present = {rank: result.structure for rank, result in enumerate(results) if not result.absent}
            require_one_structure(present, "A step")
            self._results = results
            if self._learn is not None:
                self._learn(results[min(present, default=0)])
        return self._results

    def rows(self) -> tuple[int, ...] | None:
        """Rows of each replica whose result counts; None where the step had no distributed batch."""
        rows = [result.rows for result in self.results() if not result.absent]
        return None if None in rows else tuple(count for count in rows if count is not None)

    def structure(self) -> Structure:
        """The nest that the replicas with rows returned."""
        results = self.results()
        return next((result.structure for result in results if not result.absent), results[0].structure)

    def nest(self) -> Any:
        """The result as it turned out: None where every replica returned None."""
        structure = self.structure()
        leaves = [ResultLeaf(self, index, structure) for index in range(structure.num_leaves)]
        return unflatten(structure, [None if all(v is None for v in leaf.values) else leaf for leaf in leaves])

    def plain_nest(self) -> Any:
        """The result of the only replica as the function returned it."""
        result = self.results()[0]
        return unflatten(result.structure, [result.leaf(index) for index in range(result.structure.num_leaves)])

    def expected_nest(self, structure: Structure) -> Any:
        """The result as it will be if the function returns `structure` again: nothing is waited for."""
        return unflatten(structure, [ResultLeaf(self, index, structure) for index in range(structure.num_leaves)])


@final
class ResultLeaf(PerReplica):
    """One leaf of a step's result; the values are on their way until they are read."""

    def __init__(self, step: StepValues, index: int, structure: Structure) -> None:
        super().__init__(())
        self._values = None
        self.step = step
        self.index = index
        self._structure = structure

    @property
    def num_parts(self) -> int:
        return self.step.outcome.num_replicas

    @property
    @folded
    def weights(self) -> tuple[int, ...] | None:
        return self.step.rows()

    def part_on(self, rank: int, *, stand_in: bool = False) -> Part:
        return self.step.outcome.part(rank, self.index, _shown(self._structure))

    def _fetch(self) -> tuple[Any, ...]:
        require_nest(self.step.structure(), _shown(self._structure))
        return tuple(result.leaf(self.index) for result in self.step.results() if not result.absent)

    def _ranks(self) -> list[int]:
        return [rank for rank, result in enumerate(self.step.results()) if not result.absent]


_REMEMBERED = 1024


@final
class ReturnedStructures:
    """The structure that each step function returned in its last call, as far as its results were read."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], tuple[tuple[Callable[[], Any], ...], Structure]] = {}

    def expected(self, fn: Any) -> Structure | None:
        """Return the structure of the next result of `fn`: NOTHING for None, None where only the result can tell.

        Before its first result is read that is NOTHING for a function that is annotated `-> None`.
        """
        parts = _parts(fn)
        weak, structure = self._known.get(tuple(map(id, parts)), ((), None))
        if weak and all(ref() is part for ref, part in zip(weak, parts, strict=True)):
            return structure
        declared = getattr(fn, "__annotations__", {}).get("return", fn)
        return NOTHING if declared is None or declared == "None" else None

    def learn(self, fn: Any, result: StepResult) -> None:
        """Remember the structure of a result of `fn`. A None inside may be a value next time: it is not remembered."""
        parts = _parts(fn)
        key = tuple(map(id, parts))
        self._known.pop(key, None)
        if not result.is_none and any(leaf is None for leaf in result.leaves):
            return
        try:
            weak = tuple(weakref.ref(part) for part in parts)
        except TypeError:  # an object with slots
            return
        self._known[key] = weak, NOTHING if result.is_none else result.structure
        if len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]


def _parts(fn: Any) -> tuple[Any, ...]:
    """A bound method is another object each time that the program reads it."""
    return (fn.__func__, fn.__self__) if type(fn) is types.MethodType else (fn,)
