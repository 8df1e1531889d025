"""How a tensor travels: what a backend can add up, and the plain contiguous memory it is given.

A backend sees contiguous tensors of dtypes it knows. The caller's tensor may be a strided view or of a dtype that a
backend lacks; then a stand-in travels and its result is copied back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch

from raydist.collectives.wires.flat_bytes import flat_bytes
from raydist.errors import InvalidArgumentError
from raydist.values import ReduceOp

__all__ = ["Staged", "check_reducible", "stage_bytes", "stage_reduction"]

# gloo refuses these dtypes ("Invalid scalar type"); the wider one holds every value and every sum of a few of them.
_CARRIERS = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.bool: torch.uint8,
}


@final
@dataclass(slots=True, eq=False)  # not frozen: one is made for every collective, and that would take twice as long
class Staged:
    """A tensor on its way. Nobody changes it.

    Attributes:
        target: The caller's tensor, without its autograd history.
        values: The same values in contiguous memory of a dtype that travels; `target` itself where that is possible.
        carrier: What the backend works on in place: `values`, or the bytes of it.
        divisor: What the result is divided by before it is handed back (MEAN), 1 for no division.
    """

    target: torch.Tensor
    values: torch.Tensor
    carrier: torch.Tensor
    divisor: int = 1

    def deliver(self) -> None:
        """Make `target` hold the result. Call once, when the backend is done."""
        if self.divisor != 1:
            self.values.div_(self.divisor)
        if self.values is not self.target:
            self.target.copy_(self.values)


def check_reducible(dtype: torch.dtype, op: ReduceOp) -> None:
    """Raise InvalidArgumentError where `op` has no meaning in `dtype`.

    >>> check_reducible(torch.int64, ReduceOp.MEAN)
    Traceback (most recent call last):
    raydist.errors.InvalidArgumentError: MEAN needs a floating-point tensor, got torch.int64. Convert it, or use SUM.
    """
    if op is ReduceOp.MEAN and not (dtype.is_floating_point or dtype.is_complex):
        raise InvalidArgumentError(f"MEAN needs a floating-point tensor, got {dtype}. Convert it, or use SUM.")
    if op is ReduceOp.SUM and dtype is torch.bool:
        raise InvalidArgumentError(
            f"A SUM of truth values does not fit {dtype}. Convert to torch.int64, or use MAX (any) or MIN (all)."
        )
    if op in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT) and dtype.is_complex:
        raise InvalidArgumentError(f"{op.value} needs real values, got {dtype}. Gather them and reduce locally.")


def stage_reduction(tensor: torch.Tensor, op: ReduceOp, world_size: int) -> Staged:
    """Prepare `tensor` for a reduction in place (`op` MEAN travels as a sum)."""
    if op is not ReduceOp.SUM or tensor.dtype is torch.bool:
        check_reducible(tensor.dtype, op)
    target = tensor.detach() if tensor.requires_grad else tensor
    carrier = _CARRIERS.get(target.dtype)
    values = (_plain(target) if carrier is None else target.to(carrier)).contiguous()
    return Staged(target, values, values, world_size if op is ReduceOp.MEAN else 1)


def stage_bytes(tensor: torch.Tensor) -> Staged:
    """Prepare `tensor` to be moved: as plain bytes, whatever its dtype."""
    target = tensor.detach()
    values = _plain(target).contiguous()
    return Staged(target, values, flat_bytes(values))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of a view that shows its memory conjugated or negated."""
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor
