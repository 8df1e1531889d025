"""Results of steps: the form in which replicas send them, and the PerReplica nest that the driver reads."""

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
from raydist.context.strategy_values import require_one_structure
from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.core.exception_utils import folded
from raydist.core.nest import LEAF, NOTHING, Structure, flatten, unflatten
from raydist.core.values import Part, PerReplica
from raydist.pickling.torch_objects import Packed, PendingTensor, begin_packing, by_fields
from raydist.summary.record import Record
from raydist.utils.sharded_tensors import whole


@final
@dataclass(slots=True)  # never changed, but not frozen: unpickling would take twice as long, in every step
class StepResult:
    """The return value of one replica's step function, without autograd graph, on the host."""

    structure: Structure  # structure of the returned nest
    leaves: tuple[Any, ...]  # leaves of the returned nest
    absent: bool = False  # True if the replica had no rows and ran on padding rows: the result is ignored
    rows: int | None = None  # number of rows of the step's batches; None if the step had no distributed batch
    summaries: tuple[Record, ...] = ()  # records of `rd.summary` in the step

    __reduce__ = by_fields

    @property
    def num_bytes(self) -> int:
        """Approximate bytes of the tensors and arrays."""
        return sum(_num_bytes(leaf) for leaf in self.leaves) + sum(each.data.num_bytes for each in self.summaries)

    @property
    def is_none(self) -> bool:
        """True if the step function returned None."""
        return self.structure == LEAF and self.leaves[0] is None

    def without_summaries(self) -> StepResult:
        """Return the result without its summaries, which have been written by then."""
        return replace(self, summaries=()) if self.summaries else self

    def as_absent(self) -> StepResult:
        """Return the result of another replica whose own was lost with it."""
        return StepResult(self.structure, (None,) * len(self.leaves), absent=True, rows=0)

    def arrived(self) -> StepResult:
        """Return the result with all its tensors on the host. Blocks until the GPU has copied them."""
        if not any(isinstance(leaf, PendingTensor) for leaf in self.leaves):
            return self
        return replace(
            self, leaves=tuple(leaf.wait() if isinstance(leaf, PendingTensor) else leaf for leaf in self.leaves)
        )

    def leaf(self, index: int) -> Any:
        """Return leaf `index` as the program sees it."""
        value = self.leaves[index]
        return value.unpack() if isinstance(value, Packed) else value


def _num_bytes(leaf: Any) -> int:
    size: int = getattr(leaf, "nbytes", 64)
    return size


def pack_result(value: Any, *, absent: bool, rows: int | None = None, summaries: tuple[Record, ...] = ()) -> StepResult:
    """Convert the return value of a step for sending. Tensors are detached and copied to the CPU, sharded ones whole.

    Does not wait for copies from a GPU: call `arrived` of the result before sending it.
    """
    if type(value) is torch.Tensor:  # most steps return the loss only: saves a dozen calls
        return StepResult(LEAF, (begin_packing(value),), absent, rows, summaries)
    leaves, structure = flatten(value)
    packed = tuple(_pack_leaf(leaf, path) for leaf, path in zip(leaves, structure.paths(), strict=True))
    return StepResult(structure, packed, absent, rows, summaries)


def _pack_leaf(leaf: Any, path: str) -> Any:
    if isinstance(leaf, torch.Tensor):
        return begin_packing(whole(leaf))
    if leaf is None or isinstance(leaf, int | float | bool | str | bytes | np.generic):
        return leaf
    if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        return leaf.copy()  # the next step may write to the array before the result is sent
    try:
        return pickle.loads(cloudpickle.dumps(leaf))
    except Exception as error:
        where = f" at {path!r}" if path else ""
        raise SpecError(
            f"A step must return tensors, numbers or what can be pickled, got {type(leaf).__name__}{where}: {error}. "
            "Return the numbers that you need of it."
        ) from error


class StepOutcome(Protocol):
    """The results of one dispatched step, as read by the driver or by another step."""

    @property
    def num_replicas(self) -> int:
        """Number of replicas that run the step."""

    def results(self) -> list[StepResult]:
        """Return every replica's result. Blocks until the step ends; raises the step's error."""

    def part(self, rank: int, leaf_index: int, nest: str) -> Part:
        """Return a reference to one leaf of one replica's result; the reader checks that the result has this nest."""


@functools.lru_cache(maxsize=64)
def _shown(structure: Structure) -> str:
    """Return the structure as a string. Classes of the program may be unknown to the process that reads it."""
    return str(structure)


def require_nest(found: Structure, nest: str) -> None:
    """Raise if the result of a step has a structure other than the one whose string is `nest`.

    >>> require_nest(flatten({"a": 1})[1], "{'a': '*'}")
    """
    if _shown(found) != nest:
        raise InvalidArgumentError(
            f"A step must return the same structure in every call, got {nest} before and {_shown(found)} now. Return "
            "the same keys always, with None where there is nothing."
        )


@final
class StepValues:
    """The results of one step on all replicas. They are fetched once, and all leaves of the nest share them.

    Args:
        learn: Called with the result of a replica with rows, when the results are fetched.
    """

    def __init__(self, outcome: StepOutcome, learn: Callable[[StepResult], None] | None = None) -> None:
        self.outcome = outcome
        self._learn = learn
        self._results: list[StepResult] | None = None
        self._failure: Exception | None = None

    def results(self) -> list[StepResult]:
        """Return every replica's result. Blocks until the step ends; raises the step's error.

        Every call raises the same error: Python reads a property again if the property raises an AttributeError.
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
        """Return the rows of each replica whose result counts; None if the step had no distributed batch."""
        rows = [result.rows for result in self.results() if not result.absent]
        return None if None in rows else tuple(count for count in rows if count is not None)

    def structure(self) -> Structure:
        """Return the structure that the replicas with rows returned. Blocks until the step ends."""
        results = self.results()
        return next((result.structure for result in results if not result.absent), results[0].structure)

    def nest(self) -> Any:
        """Return the nest of PerReplica leaves; a leaf that is None everywhere is None. Blocks until the step ends."""
        structure = self.structure()
        leaves = [ResultLeaf(self, index, structure) for index in range(structure.num_leaves)]
        return unflatten(structure, [None if all(v is None for v in leaf.values) else leaf for leaf in leaves])

    def plain_nest(self) -> Any:
        """Return the return value of the only replica. Blocks until the step ends."""
        result = self.results()[0]
        return unflatten(result.structure, [result.leaf(index) for index in range(result.structure.num_leaves)])

    def expected_nest(self, structure: Structure) -> Any:
        """Return the nest of PerReplica leaves with the expected `structure`, without blocking."""
        return unflatten(structure, [ResultLeaf(self, index, structure) for index in range(structure.num_leaves)])


@final
class ResultLeaf(PerReplica):
    """One leaf of a step's result. The values are fetched at the first read."""

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

    def part_on(self, rank: int, *, padding: bool = False) -> Part:
        return self.step.outcome.part(rank, self.index, _shown(self._structure))

    def _fetch(self) -> tuple[Any, ...]:
        require_nest(self.step.structure(), _shown(self._structure))
        return tuple(result.leaf(self.index) for result in self.step.results() if not result.absent)

    def _ranks(self) -> list[int]:
        return [rank for rank, result in enumerate(self.step.results()) if not result.absent]


_REMEMBERED = 1024


@final
class ReturnedStructures:
    """The structure that each step function returned in the last call whose result was read."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], tuple[tuple[Callable[[], Any], ...], Structure]] = {}

    def expected(self, fn: Any) -> Structure | None:
        """Return the expected structure of the next result of `fn`: NOTHING for None, or None if it is unknown.

        Before the first result is read, a function with the annotation `-> None` is expected to return None.
        """
        parts = _parts(fn)
        weak, structure = self._known.get(tuple(map(id, parts)), ((), None))
        if weak and all(ref() is part for ref, part in zip(weak, parts, strict=True)):
            return structure
        declared = getattr(fn, "__annotations__", {}).get("return", fn)
        return NOTHING if declared is None or declared == "None" else None

    def learn(self, fn: Any, result: StepResult) -> None:
        """Remember the structure of a result of `fn`, unless a leaf inside is None, which may be a value next time."""
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
    """Return an identity of `fn`: every access to a bound method creates another object."""
    return (fn.__func__, fn.__self__) if type(fn) is types.MethodType else (fn,)
