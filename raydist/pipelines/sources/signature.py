"""Conversion of the values of a generator to its declared output signature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from raydist.errors import InvalidArgumentError, SpecError
from raydist.nest import Structure, flatten, unflatten
from raydist.pipelines.elements.arguments import parts_like
from raydist.pipelines.elements.blocks import Block, Column
from raydist.pipelines.elements.element_nests import flatten_element
from raydist.pipelines.elements.leaf_values import as_leaf
from raydist.pipelines.elements.rows import stack_leaves
from raydist.pipelines.elements.small_floats import dtype_kind
from raydist.pipelines.elements.spec import TensorSpec, spec_of_value

__all__ = ["Signature"]


@final
@dataclass(frozen=True, slots=True)
class Signature:
    """A nest of specs that every value must fit. Numbers are converted to the declared dtype if the value is kept."""

    structure: Structure
    specs: tuple[TensorSpec, ...]

    @classmethod
    def parse(cls, output_signature: Any) -> Signature:
        """Return the signature for a nest of TensorSpec."""
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
        pairs = [_column(values, spec) for values, spec in zip(zip(*rows, strict=True), self.specs, strict=True)]
        columns, specs = zip(*pairs, strict=True)
        return Block(self.structure, specs, columns, len(rows))


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
    if leaf is None or not _has_shape(np.shape(leaf), spec.shape):
        where = f" at {path!r}" if path else ""
        raise SpecError(f"The generator must yield {spec}{where}, as its output_signature says, got {_show(value)}.")
    return leaf


def _has_shape(shape: tuple[int, ...], wanted: tuple[int | None, ...] | None) -> bool:
    if wanted is None or shape == wanted:
        return True
    return len(shape) == len(wanted) and all(w is None or w == n for n, w in zip(shape, wanted, strict=True))


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


def _column(values: Sequence[Any], spec: TensorSpec) -> tuple[Column, TensorSpec]:
    if spec.shape is None:  # of any rank: the specs of the values are more precise
        return stack_leaves(values, set(map(type, values)))
    return _stacked(values, spec), spec


def _stacked(values: Sequence[Any], spec: TensorSpec) -> Column:
    shapes = {np.shape(value) for value in values}
    if len(shapes) == 1 and (spec.dtype.kind not in "SU" or shapes != {()}):
        return np.stack(values)
    column = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):  # assigning the list would iterate over arrays
        column[index] = value
    return column


def _show(value: Any) -> str:
    try:
        spec = spec_of_value(as_leaf(value))
    except (SpecError, ValueError) as error:
        return f"{value!r:.100} ({error})"
    return f"{spec} ({value!r:.100})"
