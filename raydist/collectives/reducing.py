"""Reduction of tensors in the order of ranks, on one thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from raydist.values import ReduceOp

__all__ = ["COMBINERS", "HALVES", "reduce_parts"]

COMBINERS: dict[ReduceOp, Callable[..., torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.MEAN: torch.add,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.PRODUCT: torch.mul,
}
"""Functions that combine two tensors; MEAN also divides in the end."""

# torch uses several threads for larger tensors, but ranks that share cores have no core to spare.
_SERIAL_ELEMENTS = 1 << 15
HALVES = (torch.float16, torch.bfloat16)
"""Dtypes whose sums are computed in float32 and rounded once."""


def reduce_parts(parts: Sequence[torch.Tensor], out: torch.Tensor, op: ReduceOp) -> None:
    """Reduce `parts` into `out` in rank order, so that equal inputs give the same bits.

    Sums of float16 and bfloat16 are computed in float32 and rounded once.

    Args:
        parts: One contiguous, flat tensor per rank.
        out: A tensor of the same length; may be one of the first two parts, but no later one.
        op: The reduction; MEAN divides by the number of parts.

    >>> out = torch.empty(2)
    >>> reduce_parts([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])], out, ReduceOp.MEAN)
    >>> out.tolist()
    [2.0, 4.0]
    """
    if out.numel() > _SERIAL_ELEMENTS and (torch.get_num_threads() > 1 or out.dtype in HALVES):
        for start in range(0, out.numel(), _SERIAL_ELEMENTS):
            block = slice(start, start + _SERIAL_ELEMENTS)
            _reduce_block([part[block] for part in parts], out[block], op)
    else:
        _reduce_block(parts, out, op)


def _reduce_block(parts: Sequence[torch.Tensor], out: torch.Tensor, op: ReduceOp) -> None:
    combine = COMBINERS[op]
    if out.dtype in HALVES and op in (ReduceOp.SUM, ReduceOp.MEAN):
        out.copy_(_sum_of_halves(parts, op))
        return
    if len(parts) == 1:
        out.copy_(parts[0])
    else:
        combine(parts[0], parts[1], out=out)
        for part in parts[2:]:
            combine(out, part, out=out)
    if op is ReduceOp.MEAN:
        out.div_(len(parts))


def _sum_of_halves(parts: Sequence[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total.add_(part)
    return total.div_(len(parts)) if op is ReduceOp.MEAN else total
