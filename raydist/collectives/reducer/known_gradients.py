"""Distinguish global gradients from gradients made by hand and from local gradients of no_sync().

After an exchange `.grad` of each parameter holds a known tensor, written a known number of times. A gradient that is
still that tensor, not written since, is global. Any other gradient falls into one of three classes:

- *Changed*: a backward pass has exchanged the gradient, and the program has changed it since (clipping, unscaling). The
  gradient is not exchanged again. The trailer of the next backward pass has checksums of the gradient, and all replicas
  raise an error if they have changed it differently. Nothing waits for the device, unless checksums differ.
- *Made by hand*: nothing was exchanged since an optimizer used or cleared the gradient. Each replica has computed its
  own gradient with `torch.autograd.grad` or `torch.func`, and an exchange is due before an optimizer uses it.
- *Accumulated* under `no_sync()`: `.grad` shows the sum of a global and a local part. Copies of the two parts are kept
  until the next synchronised backward pass sends the local one.
"""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch

from raydist.collectives.base import Communicator
from raydist.collectives.translation import describe_each
from raydist.compat.torch_internals import num_writes
from raydist.core.errors import CollectiveMismatchError, FailedPreconditionError

# Relative tolerance, as in the periodic comparison of parameters: last bits may differ between machines.
_LAST_BITS = 1e-5
_SAMPLE = 4096

_Row = tuple[float, float, float]
"""Number of a parameter, and sum and approximate norm of the parameter's gradient."""


@final
@dataclass(frozen=True, slots=True)
class _Record:
    """The local part of one parameter's gradient."""

    base: torch.Tensor | None  # global part of `.grad`
    contribution: torch.Tensor  # weighted local part, which the next synchronised pass sends
    shown: torch.Tensor  # the tensor in `.grad` when the record was made
    version: int  # number of writes to `shown` at that time
    by_hand: bool  # the program has made the local part without a backward pass


@final
class LocalAccumulation:
    """Local parts of the gradients of a replica, by parameter index."""

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}

    def add(
        self, index: int, gradient: torch.Tensor | None, new: torch.Tensor, scale: float, *, by_hand: bool = False
    ) -> torch.Tensor:
        """Add a new local gradient to `gradient`, the present `.grad`, and return the new `.grad`."""
        base, contribution = self.parts_of(index, gradient)
        if contribution is None and base is not None:
            base = base.clone()
        weighted = new.detach() * scale
        shown = accumulate(gradient, new)
        total = weighted if contribution is None else accumulate(contribution, weighted)
        self._records[index] = _Record(base, total, shown, num_writes(shown), by_hand)
        return shown

    def __bool__(self) -> bool:
        return bool(self._records)

    def holds(self, index: int, gradient: torch.Tensor) -> bool:
        """Return True if this gradient has a local part; False if the part was made by hand and written since."""
        record = self._records.get(index)
        if record is None or record.shown is not gradient:
            return False
        return not record.by_hand or num_writes(gradient) == record.version

    def parts_of(self, index: int, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the global and the local part of `gradient`, the present `.grad`.

        Raises:
            FailedPreconditionError: The program has changed `.grad` in another way than by zeroing or dropping it.
        """
        record = self._records.get(index)
        if record is None or gradient is None:
            return gradient, None
        if gradient is record.shown and num_writes(gradient) == record.version:
            return record.base, record.contribution
        if gradient.to_dense().any():
            raise FailedPreconditionError(
                f"Gradients accumulated under no_sync() may only be zeroed before the next synchronised backward(), "
                f"but that of parameter {index} was changed. Scale or clip after the last backward() of the step."
            )
        return gradient, None

    def forget(self, indices: Iterable[int]) -> None:
        if self._records:
            for index in indices:
                self._records.pop(index, None)


def accumulate(earlier: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
    """Return `earlier + new`, in the tensor `earlier` itself in the cases in which PyTorch accumulates in place."""
    if earlier is None:
        return new
    if earlier.requires_grad or new.requires_grad:
        return earlier + new
    if earlier.is_sparse and not new.is_sparse:
        return earlier.to_dense().add_(new)
    return earlier.add_(new)


@final
class KnownGradients:
    """Record of the global gradients of one replica.

    References to the tensors are weak, since a bucket's memory is reused once no reference to its gradients is left.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}  # by id: `.grad` and its number of writes
        self._used: set[int] = set()
        self._emptied: set[int] = set()
        self._by_hand: dict[int, torch.nn.Parameter] = {}  # gradients made by hand in this batch
        self._bases: dict[int, torch.Tensor] = {}  # copies of gradients made by hand in earlier batches

    def note(self, parameters: Collection[torch.nn.Parameter], *, by_hand: bool = False) -> None:
        """Record that `.grad` of these parameters is global now, and that no optimizer has used it yet.

        `by_hand`: the program has made a part of the gradients by hand.
        """
        known, reference = self._known, weakref.ref
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                known.pop(id(parameter), None)
            else:
                known[id(parameter)] = reference(gradient), num_writes(gradient)
        keys = list(map(id, parameters))
        self._used.difference_update(keys)
        self._emptied.difference_update(keys)
        self._forget_bases(keys)
        if by_hand:
            self._by_hand.update(zip(keys, parameters, strict=True))

    def note_cleared(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Record that the gradients of these parameters were set to None or zero; the next contents are new."""
        given = list(parameters)
        zeroed = [parameter for parameter in given if parameter.grad is not None]
        if zeroed:
            self.note(zeroed)
        self._emptied.update(map(id, given))

    def note_changed(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Record the present values of these parameters' gradients, which were exchanged earlier, as global."""
        for parameter in parameters:
            if parameter.grad is not None:
                self._known[id(parameter)] = weakref.ref(parameter.grad), num_writes(parameter.grad)

    def note_used(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Record that an optimizer uses the gradients of these parameters."""
        keys = list(map(id, parameters))
        self._used.update(keys)
        self._forget_bases(keys)

    def end_batch(self) -> None:
        """Keep copies of unused gradients made by hand in this batch, to find what the program adds to them later."""
        for key, parameter in self._by_hand.items():
            if key in self._known and key not in self._used and parameter.grad is not None:
                self._bases[key] = parameter.grad.detach().clone()
        self._by_hand.clear()

    def _forget_bases(self, keys: Iterable[int]) -> None:
        if self._bases:
            for key in keys:
                self._bases.pop(key, None)

    def base_of(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """Return a copy of the global part of a gradient made by hand; None where all of the gradient is new."""
        base = None if id(parameter) in self._emptied else self._bases.get(id(parameter))
        return None if base is None else base.clone()

    def keep_only(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Forget all other parameters. Gradients of new parameters come from the driver, so they count as global."""
        given = {id(parameter): parameter for parameter in parameters}
        for held in (self._known, self._by_hand, self._bases):
            for key in held.keys() - given.keys():
                del held[key]
        self._used &= given.keys()
        self._emptied &= given.keys()
        self.note([parameter for key, parameter in given.items() if key not in self._known])

    def unknown(self, parameters: Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        """Return the parameters whose gradient was replaced or written since the last exchange."""
        found, known = [], self._known
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None:
                entry = known.get(id(parameter))
                if entry is None or entry[0]() is not gradient or entry[1] != num_writes(gradient):
                    found.append(parameter)
        return found

    def is_made_by_hand(self, parameter: torch.nn.Parameter, *, adds_up: bool, filled_anew: bool) -> bool:
        """Return True for an unknown gradient that this replica has made by hand, and False for a changed one.

        Args:
            parameter: A parameter that `unknown` has returned.
            adds_up: Gradients are summed without weights, so a sum that is global already would be multiplied.
            filled_anew: A tensor written since an optimizer has used it holds a new gradient. False before a backward
                pass, where the program may have zeroed the tensor.

        Raises:
            FailedPreconditionError: Gradients are summed without weights, and the gradient may be global.
        """
        entry = self._known.get(id(parameter))
        if entry is None or id(parameter) in self._emptied:
            return True
        same, adds_on = entry[0]() is parameter.grad, id(parameter) in self._bases
        if not adds_on and (id(parameter) not in self._used or (same and not filled_anew)):
            return False
        if adds_up and (same or adds_on):
            raise FailedPreconditionError(
                "Under gradient_reduce_op=SUM a gradient that is made by hand must be put into an empty .grad, got one "
                f"of shape {tuple(parameter.shape)} that still held a global gradient. Call optimizer.zero_grad() "
                "first; add up gradients of several batches by backward()."
            )
        return True


@final
class Checksums:
    """Sums of some gradients, and the norms of their first elements, on the device of the gradients."""

    def __init__(self, gradients: Mapping[int, torch.Tensor]) -> None:
        self._indices = tuple(gradients)
        with torch.no_grad():
            values = [_values(gradient) for gradient in gradients.values()]
            wide = any(one.dtype is torch.float64 for one in values)
            dtype, device = torch.float64 if wide else torch.float32, values[0].device
            parts = [one.sum(dtype=dtype) for one in values]
            parts += [torch.linalg.vector_norm(one[:_SAMPLE], dtype=dtype) for one in values]
            self._numbers = torch.stack([part.to(device) for part in parts])
        self._scales = [max(1.0, one.numel() / _SAMPLE) ** 0.5 for one in values]

    def combined(self) -> torch.Tensor:
        """Return one float64 on the device that depends on all sums and norms."""
        count = len(self._numbers) + 1
        return self._numbers.double() @ torch.arange(1, count, dtype=torch.float64, device=self._numbers.device)

    def rows(self) -> list[_Row]:
        """Return parameter number, sum and approximate norm of each gradient. Waits for the device."""
        numbers = self._numbers.tolist()
        sums, norms = numbers[: len(self._indices)], numbers[len(self._indices) :]
        return [
            (index, total, norm * scale)
            for index, total, norm, scale in zip(self._indices, sums, norms, self._scales, strict=True)
        ]


def combined(noted: Sequence[Checksums]) -> torch.Tensor | None:
    """Combine all checksums into one float64; None for an empty sequence."""
    total: torch.Tensor | None = None
    for one in noted:
        total = one.combined() if total is None else total * 3 + one.combined()
    return total


def compare(communicator: Communicator, noted: Sequence[Checksums], name_of: Callable[[int], str]) -> None:
    """Compare gradients whose combined checksums differ; replicas may differ in the last bits.

    Blocking: until all replicas call it, at most the communicator's limit.

    Raises:
        CollectiveMismatchError: Gradients differ. All replicas raise it; it names the first such parameter.
    """
    mine = json.dumps([row for one in noted for row in one.rows()]).encode()
    received = communicator.exchange_on_host(mine, "gradients that were changed")
    said: list[list[_Row]] = [[(row[0], row[1], row[2]) for row in json.loads(each)] for each in received]
    for place in range(max(map(len, said))):
        rows = [theirs[place] if place < len(theirs) else None for theirs in said]
        if not _all_close(rows):
            index = min(int(row[0]) for row in rows if row is not None)
            raise _apart(name_of(index), index, rows)


def _values(gradient: torch.Tensor) -> torch.Tensor:
    """Return the values of a gradient as a flat real tensor."""
    values = gradient.detach()
    if values.is_sparse:
        values = values.coalesce().values()
    return (torch.view_as_real(values) if values.is_complex() else values).reshape(-1)


def _all_close(rows: Sequence[_Row | None]) -> bool:
    """Return True if all replicas have changed the same gradient to about the same values."""
    first = rows[0]
    return first is not None and all(row is not None and _close(first, row) for row in rows)


def _close(one: _Row, other: _Row) -> bool:
    if one[0] != other[0]:
        return False
    for mine, theirs in zip(one[1:], other[1:], strict=True):
        apart = abs(mine - theirs) > _LAST_BITS * (abs(mine) + one[2])  # comparisons with NaN are False
        if apart or math.isnan(mine) != math.isnan(theirs):
            return False
    return True


def _apart(name: str, index: int, rows: Sequence[_Row | None]) -> CollectiveMismatchError:
    said = [f"sum {row[1]:.7g}, norm about {row[2]:.7g}" if row and row[0] == index else "not changed" for row in rows]
    return CollectiveMismatchError(
        "All replicas must change a gradient alike after the backward() that made it global, but they have changed "
        f"that of {name} differently, got {describe_each(said, 'replica')}. Use ctx.all_reduce for what a replica "
        "computes from its own rows, and the same random numbers for noise. To put a replica's own gradient into .grad "
        "by hand, call optimizer.zero_grad() first: optimizer.step() then exchanges it."
    )
