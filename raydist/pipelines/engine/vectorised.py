"""Vectorisation of a map function over whole blocks with `torch.func.vmap`, where the results are the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import numpy as np

from raydist.errors import SpecError
from raydist.nest import unflatten
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.declared_output import DeclaredOutput
from raydist.pipelines.elements.element_nests import flatten_element
from raydist.pipelines.elements.items import Item
from raydist.pipelines.elements.small_floats import array_of_tensor, dtype_kind, tensor_of_array
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.engine.kernel import Kernel

__all__ = ["VectorisedKernel"]


@final
@dataclass(eq=False)
class VectorisedKernel(Kernel):
    """A kernel that runs `fn` under vmap while the first and last row of each block equal the results of `plain`.

    Once vmap fails or gives other results, the kernel calls the function for every element.
    """

    preserves_count: ClassVar[bool] = True
    fn: Callable[..., Any]
    plain: Kernel
    output: DeclaredOutput | None
    _refused: bool = field(default=False, init=False)

    @property
    def label(self) -> str:  # type: ignore[override]  # a plain attribute in the base class, never set here
        return self.plain.label

    @property
    def uses_index(self) -> bool:
        return False

    def run(self, block: Block, start: int) -> Sequence[Item]:
        if not self._refused and block.num_rows > 1 and not block.holds_objects:
            try:
                return self._run_whole(block, start)
            except Exception as error:  # any error of vmap: calling the function for each element shows the cause
                self._refused = True
                reason = f"{type(error).__name__}: {error}".split("\n")[0]
        else:
            return self.plain.run(block, start)
        warnings.warn(
            f"map_vectorization must be able to run {self.label} over whole blocks, and cannot ({reason:.120}). "
            "It is called for every element. Use torch functions without Python conditions, or switch the option off.",
            RuntimeWarning,
            stacklevel=2,
        )
        return self.plain.run(block, start)

    def _run_whole(self, block: Block, start: int) -> Sequence[Item]:
        made: Sequence[Item] = [_mapped(self.fn, block)]
        if self.output is not None:
            made = self.output.conform(made, start)
        for row in (0, block.num_rows - 1):
            _require_same(made, row, self.plain.run(block.slice(row, row + 1), start + row))
        return made


def _mapped(fn: Callable[..., Any], block: Block) -> Block:
    # Torch is imported with the first block: pipelines without vectorisation need no torch.
    import torch

    # Copies: `fn` may write to its arguments, and `plain` runs on `block` again for comparison.
    tensors = [tensor_of_array(column.copy(), torch.from_numpy) for column in block.columns]
    nest = unflatten(block.structure, tensors)
    result = torch.func.vmap(fn)(*nest) if block.structure.kind is tuple else torch.func.vmap(fn)(nest)
    leaves, structure = flatten_element(result)
    columns = tuple(array_of_tensor(leaf.detach()) for leaf in leaves)  # modules return tensors with gradients
    specs = tuple(TensorSpec(column.shape[1:], column.dtype) for column in columns)
    return Block(structure, specs, columns, block.num_rows)


def _require_same(made: Sequence[Item], row: int, expected: Sequence[Item]) -> None:
    """Raise SpecError unless row `row` of the one block in `made` equals the one element in `expected`."""
    (whole,), (one,) = made, expected
    if not isinstance(whole, Block) or not isinstance(one, Block):
        raise SpecError(f"elements fail: row {row} gave {one!r:.80}")
    if (whole.structure, whole.specs) != (one.structure, one.specs):
        raise SpecError(f"it gives {whole.signature} {whole.specs} instead of {one.signature} {one.specs}")
    for mine, theirs in zip(whole.columns, one.columns, strict=True):
        if not np.array_equal(mine[row], theirs[0], equal_nan=dtype_kind(mine.dtype) in "fcmM"):
            raise SpecError(f"it gives other values, {mine[row]!r:.50} instead of {theirs[0]!r:.50}")
