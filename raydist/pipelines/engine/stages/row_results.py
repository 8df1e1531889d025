"""Combination of row-by-row results into the result of the whole block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from raydist.pipelines.elements.blocks import same_kind
from raydist.pipelines.elements.items import ElementError, Item, StageResult
from raydist.pipelines.engine.kernel import StageSpec, other_kind_error


def join_results(spec: StageSpec, rows: Sequence[StageResult]) -> StageResult:
    """Join the results of the rows of a block, each run with `starts` as if no kernel dropped anything.

    As in a whole block, the first result of a kernel sets the signature: a row of another structure or dtype is an
    error.
    """
    signatures = tuple(_first([row.signatures[number] for row in rows]) for number in range(len(spec.kernels)))
    entered = [0] * len(spec.kernels)
    items: list[Item] = []
    for number, row in enumerate(rows):
        # After a filter, the index of a row is lower than the sender assumed.
        items += [_moved(item, entered[_kernel(item)] - number) for item in _checked(spec, row, signatures)]
        entered = [mine + theirs for mine, theirs in zip(entered, row.inputs, strict=True)]
    busy_s, cpu_s = sum(row.busy_s for row in rows), sum(row.cpu_s for row in rows)
    last, is_numbered = rows[-1], any(row.is_numbered for row in rows)
    return StageResult(tuple(items), tuple(entered), signatures, last.begun_at, busy_s, cpu_s, last.worker, is_numbered)


def _first(signatures: Sequence[str]) -> str:
    return next((signature for signature in signatures if signature), "")


def _kernel(item: Item) -> int:
    return item.kernel if isinstance(item, ElementError) else 0


def _moved(item: Item, distance: int) -> Item:
    if not isinstance(item, ElementError) or item.index is None:
        return item
    return replace(item, index=item.index + distance)


def _checked(spec: StageSpec, row: StageResult, signatures: Sequence[str]) -> Sequence[Item]:
    for kernel, wanted, got in zip(spec.kernels, signatures, row.signatures, strict=True):
        if wanted and got and not same_kind(wanted, got):
            return [ElementError(other_kind_error(kernel.label, wanted, got))]
    return row.items
