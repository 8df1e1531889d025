"""Checks of a function's results against its declaration (`output_spec=`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from raydist.core.errors import SpecError
from raydist.core.nest import Structure, unflatten
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.element_nests import flatten_element
from raydist.pipelines.elements.items import ElementError, Item, count_items
from raydist.pipelines.elements.spec import ObjectSpec, TensorSpec, spec_of_value


@final
@dataclass(frozen=True, slots=True)
class DeclaredOutput:
    """A nest of specs that every element must match."""

    structure: Structure
    specs: tuple[TensorSpec, ...]

    @classmethod
    def parse(cls, output_spec: Any) -> DeclaredOutput | None:
        """Parse a nest of TensorSpec; None for None."""
        if output_spec is None:
            return None
        leaves, structure = flatten_element(output_spec)
        for leaf in leaves:
            if not isinstance(leaf, TensorSpec):
                raise SpecError(f"output_spec must be a nest of rd.TensorSpec, got a leaf {leaf!r}.")
        return cls(structure, tuple(leaves))

    def nest(self) -> Any:
        """Return the nest of specs, as the user wrote it."""
        return unflatten(self.structure, self.specs)

    def conform(self, items: Sequence[Item], start: int) -> list[Item]:
        """Return `items` with the declared specs, and a SpecError in place of each element that does not match."""
        checked: list[Item] = []
        for item in items:
            at = start + count_items(checked)
            checked.extend([item] if isinstance(item, ElementError) else self._check(item, at))
        return checked

    def _check(self, block: Block, start: int) -> list[Item]:
        if block.structure == self.structure and all(map(TensorSpec.accepts, self.specs, block.specs)):
            specs = zip(self.specs, block.specs, strict=True)
            kept = tuple(found if isinstance(found, ObjectSpec) else spec for spec, found in specs)
            return [Block(self.structure, kept, block.columns, block.num_rows)]
        if block.num_rows > 1:  # rows may have different shapes: check each alone
            rows = [block.slice(row, row + 1) for row in range(block.num_rows)]
            return [item for row, one in enumerate(rows) for item in self._check(_narrow(one), start + row)]
        got = unflatten(block.structure, block.specs)
        return [ElementError(SpecError(f"The function must return {self.nest()}, got {got}."), start)]


def _narrow(row: Block) -> Block:
    """Return a block of one row with the specs of that row."""
    specs = [
        spec
        if spec.is_fixed or isinstance(spec, ObjectSpec)
        else TensorSpec(spec_of_value(column[0]).shape, spec.dtype)
        for spec, column in zip(row.specs, row.columns, strict=True)
    ]
    return Block(row.structure, tuple(specs), row.columns, 1)
