"""Dataset.from_generator: the values of a Python generator, converted to its declared output signature."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raydist.core.errors import FailedPreconditionError, InvalidArgumentError, SpecError
from raydist.core.exception_utils import LEAVING, annotate, as_exception
from raydist.core.nest import Structure, flatten, unflatten
from raydist.core.values import UNKNOWN_CARDINALITY
from raydist.pipelines.elements.arguments import parts_like
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.element_nests import flatten_element, map_element
from raydist.pipelines.elements.functions import function_label
from raydist.pipelines.elements.items import ElementError, Item, IteratorState
from raydist.pipelines.elements.leaf_values import as_leaf
from raydist.pipelines.elements.rows import stack_leaves
from raydist.pipelines.elements.small_floats import dtype_kind
from raydist.pipelines.elements.spec import TensorSpec, spec_of_value
from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.op_kinds import SourceOp
from raydist.pipelines.engine.producers import BorderIterator, ResumableProducer

_FILL_S = 0.02  # seconds after which a block is handed on, so that a slow generator does not hold back values
_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class Signature:
    """A nest of specs that every value must fit. Numbers are converted to the declared dtype if the value is kept."""

    structure: Structure
    specs: tuple[TensorSpec, ...]

    @classmethod
    def parse(cls, output_signature: Any) -> Signature:
        specs, structure = flatten_element(output_signature)
        for spec in specs:
            if not isinstance(spec, TensorSpec):
                raise SpecError(
                    f"output_signature must be a nest of rd.TensorSpec, got a leaf {spec!r:.100}. "
                    "Dtypes alone: output_types=."
                )
        if not specs:
            raise SpecError(f"output_signature must have at least one rd.TensorSpec, got {output_signature!r}.")
        return cls(structure, tuple(specs))

    @classmethod
    def of_types(cls, output_types: Any, output_shapes: Any) -> Signature:
        """Return the signature for a nest of dtypes, and a nest of shapes like it (None for an unknown shape)."""
        dtypes, structure = flatten_element(output_types)
        shapes = parts_like(structure, output_shapes, "output_shapes")
        return cls.parse(unflatten(structure, [_spec(*leaf) for leaf in zip(shapes, dtypes, strict=True)]))

    def nest(self) -> Any:
        """Return the nest of specs, as the user wrote it."""
        return unflatten(self.structure, self.specs)

    def of_any_shape(self) -> Signature:
        """Return the signature with the same structure and dtypes, and unknown shapes."""
        return Signature(self.structure, tuple(TensorSpec(None, spec.dtype) for spec in self.specs))

    def leaves(self, value: Any) -> list[Any]:
        """Return copies of the leaves of `value` (generators may reuse buffers); raises SpecError if unfit."""
        leaves, structure = flatten_element(value)
        if structure != self.structure:
            leaves, structure = flatten(value)  # a None in place of a leaf is reported as a leaf
        if structure != self.structure:
            advice = (
                " A tuple is a structure: yield a list for one tensor." if _has_tuple(self.structure, value) else ""
            )
            raise SpecError(
                f"The generator must yield elements of the structure {self.structure}, as its output_signature says, "
                f"got {structure}: {value!r:.200}.{advice}"
            )
        paths = self.structure.paths()
        return [_fit(leaf, spec, path) for leaf, spec, path in zip(leaves, self.specs, paths, strict=True)]

    def block(self, rows: Sequence[Sequence[Any]]) -> Block:
        """Return one block of the elements with these leaves."""
        stacked = [stack_leaves(values, set(map(type, values))) for values in zip(*rows, strict=True)]
        # Where a spec has any rank, that of the values is more precise.
        pairs = zip(self.specs, stacked, strict=True)
        specs = tuple(found if spec.shape is None else spec for spec, (_, found) in pairs)
        return Block(self.structure, specs, tuple(column for column, _ in stacked), len(rows))


def _has_tuple(declared: Structure, value: Any) -> bool:
    """Return True if `value` has a tuple in place of a declared tensor."""
    if declared.kind is None:
        return type(value) is tuple
    if declared.kind is not tuple or type(value) is not tuple or len(value) != len(declared.children):
        return False
    return any(map(_has_tuple, declared.children, value))


def _spec(shape: Any, dtype: Any) -> TensorSpec:
    try:
        return TensorSpec(shape, dtype)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            "output_types must be a nest of dtypes, and output_shapes one of shapes, tuples with None for what varies, "
            f"got {dtype!r:.100} and {shape!r:.100}: {error}"
        ) from None


def _fit(value: Any, spec: TensorSpec, path: str) -> Any:
    """Return `value` as a leaf of `spec`."""
    leaf = _text(value, spec.dtype) if spec.dtype.kind in "SU" else _number(value, spec.dtype)
    shape = np.shape(leaf)
    if leaf is None or not (shape == spec.shape or spec.accepts(TensorSpec(shape, spec.dtype))):
        where = f" at {path!r}" if path else ""
        raise SpecError(f"The generator must yield {spec}{where}, as its output_signature says, got {_show(value)}.")
    return leaf


def _text(value: Any, dtype: np.dtype[Any]) -> Any:
    """Return bytes, str or an object array of them; None for anything else."""
    try:
        leaf = as_leaf(value)
    except SpecError:  # no tensor can hold the value
        return None
    if isinstance(leaf, bytes | str):
        return leaf if isinstance(leaf, bytes) == (dtype.kind == "S") else None
    if leaf.size == 0:
        return np.empty(leaf.shape, dtype=object)
    return leaf.copy() if spec_of_value(leaf).dtype == dtype else None


def _number(value: Any, dtype: np.dtype[Any]) -> Any:
    """Return a new array of `dtype`; None where the conversion would change the meaning of `value`."""
    try:
        # Not by as_leaf: a Python float becomes a float64 if the signature says so.
        array = np.asarray(value if isinstance(value, bool | int | float | complex | list) else as_leaf(value))
    except (SpecError, ValueError):  # no tensor can hold the value; or a list of rows of different lengths
        return None
    if not _converts(array, dtype):
        return None
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes inf
        return array.astype(dtype)


def _converts(array: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> bool:
    source, target = dtype_kind(array.dtype), dtype_kind(dtype)
    if array.dtype == dtype or array.size == 0:
        return True
    if source in "biu" and target in "iu":
        bounds = np.iinfo(dtype)
        return bool(array.min() >= bounds.min and array.max() <= bounds.max)
    return (source in "biuf" and target in "fc") or (source == target == "c")


def _show(value: Any) -> str:
    try:
        spec = spec_of_value(as_leaf(value))
    except (SpecError, ValueError) as error:
        return f"{value!r:.100} ({error})"
    return f"{spec} ({value!r:.100})"


@dataclass(frozen=True, eq=False)
class GeneratorOp(SourceOp):
    """The values of `generator(*args)`, which is called for every pass."""

    generator: Callable[..., Any]
    signature: Signature
    args: tuple[Any, ...] = ()
    name = "from_generator"

    @classmethod
    def of(
        cls, generator: Any, output_signature: Any, args: Any, output_types: Any = None, output_shapes: Any = None
    ) -> GeneratorOp:
        """Return the operation for the arguments of `from_generator`."""
        if not callable(generator):
            raise SpecError(
                f"from_generator needs a function that gives a fresh iterator for every pass, got {generator!r:.100}. "
                "Give the generator function itself, without calling it."
            )
        signature = _signature(output_signature, output_types, output_shapes)
        return cls(generator, signature, map_element(as_leaf, tuple(args or ())))

    @property
    def label(self) -> str:
        return f"from_generator({function_label(self.generator)})"

    def cardinality(self) -> int:
        return UNKNOWN_CARDINALITY

    def element_spec(self) -> Any:
        return self.signature.nest()

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        return BorderIterator(GeneratorValues(self))


def _signature(output_signature: Any, output_types: Any, output_shapes: Any) -> Signature:
    if output_signature is not None:
        if output_types is not None or output_shapes is not None:
            raise InvalidArgumentError(
                "from_generator takes output_signature, or output_types with output_shapes, got both: "
                f"{output_signature!r:.100}, {output_types!r:.100} and {output_shapes!r:.100}. Leave out one of them."
            )
        return Signature.parse(output_signature)
    if output_types is not None:
        return Signature.of_types(output_types, output_shapes)
    raise SpecError(
        "from_generator needs output_signature=, a nest of rd.TensorSpec that describes one element, "
        "e.g. (rd.TensorSpec((28, 28), 'uint8'), rd.TensorSpec((), 'int64')), got None."
    )


class GeneratorValues(ResumableProducer):
    """The values of one call of the generator. The position is a count: resuming calls again and skips values."""

    def __init__(self, op: GeneratorOp) -> None:
        self._op = op
        self._values: Iterator[Any] | None = None
        self._num_taken = 0
        self._over = False

    def make(self, limit: int) -> Sequence[Item]:
        if self._over:
            raise StopIteration
        return self._take(limit)

    def _take(self, limit: int) -> list[Item]:
        """Return up to `limit` elements, and the error after them if there is one."""
        rows: list[list[Any]] = []
        deadline = time.monotonic() + _FILL_S
        while len(rows) < limit and (not rows or time.monotonic() < deadline):
            try:
                value = next(self._open())
            except StopIteration:
                self._over = True
                break
            except LEAVING:
                raise
            except BaseException as error:  # the generator's own error: a generator ends with an error
                self._over = True
                return [*self._blocks(rows), self._noted(error)]
            self._num_taken += 1
            try:
                rows.append(self._op.signature.leaves(value))
            except SpecError as error:
                return [*self._blocks(rows), self._noted(error)]
            if len(rows) == 1:
                limit = min(limit, max(1, _BLOCK_BYTES // max(1, sum(map(_num_bytes, rows[0])))))
        return self._blocks(rows)

    def _blocks(self, rows: list[list[Any]]) -> list[Item]:
        return [self._op.signature.block(rows)] if rows else []

    def _noted(self, error: BaseException) -> ElementError:
        index = self._num_taken if self._over else self._num_taken - 1
        annotate(error, f"In {self._op.label}, element {index}.")
        return ElementError(as_exception(error))

    def _open(self) -> Iterator[Any]:
        """Return the running generator, after the values that were handed out before."""
        if self._values is None:
            made = self._op.generator(*self._op.args)
            try:
                self._values = iter(made)
            except TypeError:
                raise SpecError(f"{self._op.label} must return an iterator, got {made!r:.100}.") from None
            self._pass_over(self._values, self._num_taken)
        return self._values

    def _pass_over(self, values: Iterator[Any], count: int) -> None:
        for passed in range(count):
            try:
                next(values)
            except StopIteration:
                raise FailedPreconditionError(
                    f"{self._op.label} must yield the same values again to resume after {count} of them, but it ended "
                    f"after {passed}."
                ) from None

    def border(self) -> IteratorState:
        return {"taken": self._num_taken, "over": self._over}

    def restore(self, border: IteratorState) -> None:
        self._num_taken = int(border["taken"])
        self._over = bool(border["over"])

    def close(self) -> None:
        self._over = True
        stop = getattr(self._values, "close", None)
        self._values = None
        if stop is not None:
            stop()


def _num_bytes(leaf: Any) -> int:
    return len(leaf) if isinstance(leaf, bytes | str) else int(leaf.nbytes)
