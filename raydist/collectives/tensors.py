"""The tensors of collectives: checks of arguments, contiguous copies for the backends, and reductions on one rank.

A backend gets contiguous tensors of dtypes that it supports. If the caller's tensor is a strided view or has another
dtype, the backend works on a converted copy, and raydist copies the result back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch

from raydist.core.errors import InvalidArgumentError
from raydist.core.values import ReduceOp

HALVES = (torch.float16, torch.bfloat16)
"""Dtypes whose sums are computed in float32 and rounded once."""

# gloo refuses these dtypes ("Invalid scalar type"). The wider dtype holds every value, and sums of a few values.
_CARRIERS = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.bool: torch.uint8,
}
# torch can copy all other dtypes (float8, int4, bits8, ...), but cannot add or compare them. An error inside a
# collective would end the group, so raydist rejects these dtypes before the collective.
_REDUCIBLE = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint32, torch.uint16, torch.uint8),
}


@final
@dataclass(slots=True, eq=False)  # a frozen one takes twice as long to create, once per collective
class Staged:
    """A tensor that is prepared for a backend."""

    target: torch.Tensor  # the caller's tensor, detached from autograd
    values: torch.Tensor  # the values in contiguous memory of a supported dtype; `target` itself where possible
    # the tensor on which the backend works in place: `values`, its bytes, or `values` with marks for NaN
    carrier: torch.Tensor
    divisor: int = 1  # divisor of the result (MEAN); 1 for no division
    # converts `carrier` to `values` if the two do not share memory; `deliver` calls this first
    conclude: Callable[[], object] | None = None

    def deliver(self) -> None:
        """Copy the result to `target`. Must be called once, after the collective has run."""
        if self.conclude is not None:
            self.conclude()
        if self.divisor != 1:
            self.values.div_(self.divisor)
        if self.values is not self.target:
            self.target.copy_(self.values)


def check_reducible(dtype: torch.dtype, op: ReduceOp) -> None:
    """Raise InvalidArgumentError if `op` is not defined for `dtype`.

    >>> check_reducible(torch.int64, ReduceOp.MEAN)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    raydist.core.errors.InvalidArgumentError: MEAN needs a floating-point tensor, got ...
    """
    if dtype not in _REDUCIBLE and dtype is not torch.bool:
        raise InvalidArgumentError(
            f"torch cannot reduce values of {dtype}, got {op.value} of them. Convert to a wider type, such as "
            "torch.float32 or torch.int64, or gather them."
        )
    if op is ReduceOp.MEAN and not (dtype.is_floating_point or dtype.is_complex):
        raise InvalidArgumentError(f"MEAN needs a floating-point tensor, got {dtype}. Convert it, or use SUM.")
    if op is ReduceOp.SUM and dtype is torch.bool:
        raise InvalidArgumentError(
            f"A SUM of truth values does not fit {dtype}. Convert to torch.int64, or use MAX (any) or MIN (all)."
        )
    if op in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT) and dtype.is_complex:
        raise InvalidArgumentError(f"{op.value} needs real values, got {dtype}. Gather them and reduce locally.")


def stage_reduction(tensor: torch.Tensor, op: ReduceOp, world_size: int) -> Staged:
    """Prepare `tensor` for a reduction in place. For MEAN, the backend computes a sum."""
    if op is not ReduceOp.SUM or tensor.dtype not in _REDUCIBLE:
        check_reducible(tensor.dtype, op)
    _check_memory(tensor)
    target = tensor.detach() if tensor.requires_grad else tensor
    # The sum may overflow 16 bits although the mean does not.
    needs_float32 = op is ReduceOp.MEAN and target.dtype in HALVES
    carrier = torch.float32 if needs_float32 else _CARRIERS.get(target.dtype)
    values = (_resolved(target) if carrier is None else target.to(carrier)).contiguous()
    return Staged(target, values, values, world_size if op is ReduceOp.MEAN else 1)


def stage_bytes(tensor: torch.Tensor) -> Staged:
    """Prepare `tensor`, of any dtype, for a copy of its bytes."""
    _check_memory(tensor)
    target = tensor.detach()
    values = _resolved(target).contiguous()
    return Staged(target, values, flat_bytes(values))


def _check_memory(tensor: torch.Tensor) -> None:
    """Raise InvalidArgumentError for sparse, quantized and meta tensors, which no backend can read."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "a quantized" if tensor.is_quantized else "a meta" if tensor.is_meta else f"a {tensor.layout}"
        raise InvalidArgumentError(
            f"Collectives need dense tensors with values, got {kind} one of {tensor.dtype} {tuple(tensor.shape)}. "
            "Convert it with to_dense() or dequantize(), or give its parts one by one."
        )


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with lazy conjugation and negation resolved."""
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def stage_comparable(tensor: torch.Tensor, op: ReduceOp, world_size: int) -> Staged:
    """Prepare `tensor` for a reduction by a backend whose MIN and MAX do not always propagate NaN."""
    staged = stage_reduction(tensor, op, world_size)
    if op in (ReduceOp.MIN, ReduceOp.MAX) and staged.values.is_floating_point():
        values, marked = staged.values, mark_nan(staged.values, op)
        staged.carrier, staged.conclude = marked, lambda: values.copy_(put_nan_back(marked))
    return staged


def mark_nan(values: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """Return a tensor for a MIN or MAX of `values`: row 0 has the numbers, row 1 marks for NaN.

    >>> mark_nan(torch.tensor([1.0, float("nan")]), ReduceOp.MAX).tolist()
    [[1.0, -inf], [0.0, 1.0]]
    """
    sign = 1 if op is ReduceOp.MAX else -1
    found = values.isnan()
    return torch.stack([values.masked_fill(found, -sign * math.inf), found.to(values.dtype) * sign])


def put_nan_back(reduced: torch.Tensor) -> torch.Tensor:
    """Return the reduction of the marked values, with NaN wherever any rank had NaN.

    >>> put_nan_back(mark_nan(torch.tensor([1.0, float("nan")]), ReduceOp.MIN)).tolist()
    [1.0, nan]
    """
    return reduced[0].masked_fill(reduced[1] != 0, math.nan)


def describe_tensor(tensor: torch.Tensor) -> str:
    """Return the dtype and shape, for messages.

    >>> describe_tensor(torch.ones(2, 3))
    'torch.float32 (2, 3)'
    """
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def check_parts(name: str, parts: Sequence[torch.Tensor], one: torch.Tensor, world_size: int) -> None:
    """Raise InvalidArgumentError unless `parts` has one tensor per rank, each with the dtype and shape of `one`.

    A backend would write beyond the end of a shorter part.
    """
    wrong = [describe_tensor(part) for part in parts if part.dtype != one.dtype or part.shape != one.shape]
    if wrong or len(parts) != world_size:
        raise InvalidArgumentError(
            f"{name} needs {world_size} tensors of {describe_tensor(one)}, one a rank, got {len(parts)}"
            f"{f', of which one is {wrong[0]}' if wrong else ''}."
        )


def check_root(root: int, group: str, world_size: int) -> None:
    """Raise InvalidArgumentError unless the group has this rank.

    >>> check_root(2, "g", 2)
    Traceback (most recent call last):
    raydist.core.errors.InvalidArgumentError: The root must be a rank of group 'g', 0 to 1, got 2.
    """
    if not 0 <= root < world_size:
        raise InvalidArgumentError(f"The root must be a rank of group {group!r}, 0 to {world_size - 1}, got {root}.")


def check_rows(outputs: Sequence[torch.Tensor], mine: torch.Tensor, rank: int, world_size: int) -> None:
    """Raise InvalidArgumentError unless `outputs` has one tensor per rank, like `mine` except for the length.

    >>> check_rows([torch.ones(2, 3), torch.ones(1, 4)], torch.ones(2, 3), rank=0, world_size=2)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    raydist.core.errors.InvalidArgumentError: all_gather_rows needs 2 tensors of torch.float32 (any, 3), ... got ...
    """
    fits = len(outputs) == world_size and mine.dim() > 0 and outputs[rank].shape == mine.shape
    if not fits or any(
        output.dtype != mine.dtype or output.dim() == 0 or output.shape[1:] != mine.shape[1:] for output in outputs
    ):
        shapes = ", ".join(str(tuple(output.shape)) for output in outputs)
        wanted = ", ".join(("any", *map(str, mine.shape[1:])))
        raise InvalidArgumentError(
            f"all_gather_rows needs {world_size} tensors of {mine.dtype} ({wanted}), one a rank and this rank's of "
            f"length {len(mine) if mine.dim() else 'one'}, got {shapes}."
        )


def rows_name(outputs: Sequence[torch.Tensor]) -> str:
    """Return the name of the call with all lengths, so that a comparison of calls also compares the lengths.

    >>> rows_name([torch.ones(2, 3), torch.ones(0, 3)])
    'all_gather_rows(2, 0)'
    """
    return f"all_gather_rows({', '.join(str(len(output)) for output in outputs)})"


def check_exchange(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], lengths: Sequence[Sequence[int]], rank: int
) -> None:
    """Raise InvalidArgumentError unless an all-to-all has tensors of these lengths, alike except for the length.

    >>> check_exchange([torch.ones(1)], [torch.ones(2)], [[2]], rank=0)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    raydist.core.errors.InvalidArgumentError: all_to_all_rows needs tensors ... of lengths [2] to send and [2] to ...
    """
    sent, received = list(lengths[rank]), [row[rank] for row in lengths]
    fits = [len(each) for each in inputs] == sent and [len(each) for each in outputs] == received
    if not fits or len({(each.dtype, each.shape[1:]) for each in (*inputs, *outputs)}) > 1:
        shown = [[describe_tensor(each) for each in several] for several in (inputs, outputs)]
        raise InvalidArgumentError(
            f"all_to_all_rows needs tensors of one dtype and width, of lengths {sent} to send and {received} to "
            f"receive, got {shown[0]} and {shown[1]}."
        )


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


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor as uint8 (n,): a view of a contiguous tensor, else of a copy.

    torch treats a tensor of at most one element as contiguous whatever its strides are, but `view(torch.uint8)` rejects
    such strides. An example is `batch[:, 1]` of a batch of one row.

    >>> flat_bytes(torch.ones(4, 2, dtype=torch.int8)[:1, 1])
    tensor([1], dtype=torch.uint8)
    """
    dense = tensor.contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
