"""Tell global gradients from gradients that a program made by hand, and from those that no_sync() keeps local.

After an exchange `.grad` of each parameter holds a known tensor, written a known number of times. A gradient that is
still that tensor, not written since, is global. Any other gradient falls into one of three classes:

- *Changed*: a backward pass has exchanged the gradient, and the program has changed it since (clipping, unscaling). It
  stays as it is. A checksum of it travels with the next backward pass: where replicas have changed it differently, all
  of them raise an error then.
- *Made by hand*: nothing was exchanged since an optimizer used or cleared the gradient. Each replica has computed its
  own, with `torch.autograd.grad` or `torch.func`: it is exchanged before an optimizer uses it.
- *Accumulated* under `no_sync()`: `.grad` shows the local part mixed with what was global before. The two parts are
  remembered apart until the next synchronised backward pass sends the local one.
"""

from __future__ import annotations

import functools
import json
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch

from raydist.collectives.base import Communicator
from raydist.compat.torch_internals import num_writes
from raydist.errors import CollectiveMismatchError, FailedPreconditionError

__all__ = ["ChangedGradients", "Checksums", "KnownGradients", "LocalAccumulation", "accumulate", "combined", "compare"]


@final
@dataclass(frozen=True, slots=True)
class _Record:
    """One parameter's local part.

    Attributes:
        base: The global part of what `.grad` shows.
        contribution: The local part, weighted: what will be sent.
        shown: The tensor that was `.grad` then; `version` is how often it had been written.
        by_hand: The program has made the local part without a backward pass.
    """

    base: torch.Tensor | None
    contribution: torch.Tensor
    shown: torch.Tensor
    version: int
    by_hand: bool


@final
class LocalAccumulation:
    """The local parts of all parameters of a replica, by parameter index."""

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}

    def add(
        self, index: int, gradient: torch.Tensor | None, new: torch.Tensor, scale: float, *, by_hand: bool = False
    ) -> torch.Tensor:
        """Count a new local gradient, and return what `.grad` shows now (`gradient` is what it showed before)."""
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
        """Return True if this gradient has a local part, and nothing was added by hand since that was counted."""
        record = self._records.get(index)
        if record is None or record.shown is not gradient:
            return False
        return not record.by_hand or num_writes(gradient) == record.version

    def parts_of(self, index: int, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The global and the local part of what `.grad` holds.

        Raises:
            FailedPreconditionError: `.grad` was changed meanwhile in another way than by zeroing or dropping it.
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
        """These parameters' local parts have been sent, or dropped."""
        if self._records:
            for index in indices:
                self._records.pop(index, None)


def accumulate(earlier: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
    """What `.grad` is after `new` was added to it: the earlier tensor itself where PyTorch keeps it as well."""
    if earlier is None:
        return new
    if earlier.requires_grad or new.requires_grad:
        return earlier + new
    if earlier.is_sparse and not new.is_sparse:
        return earlier.to_dense().add_(new)
    return earlier.add_(new)


# How a global gradient came about: nothing of note; made by hand in a batch that is over; set to zero.
_PLAIN, _ADDS_ON, _CLEARED = range(3)
# As in the periodic comparison of parameters: last bits may differ between machines.
_LAST_BITS = 1e-5
_SAMPLE = 4096


@final
class KnownGradients:
    """The gradients of one replica that are global.

    The tensors are held weakly: the memory of a bucket is used again once nobody holds its gradients any more.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int, int]] = {}
        self._used: set[int] = set()
        self._emptied: set[int] = set()
        self._by_hand: dict[int, torch.nn.Parameter] = {}
        self._bases: dict[int, torch.Tensor] = {}

    def note(self, parameters: Collection[torch.nn.Parameter], *, by_hand: bool = False) -> None:
        """Take what `.grad` of these holds now for global; no optimizer has used it yet.

        Args:
            parameters: Whose gradients.
            by_hand: The program has made a part of them by hand.
        """
        self._note(parameters, _PLAIN)
        if by_hand:
            self._by_hand.update((id(parameter), parameter) for parameter in parameters)

    def note_cleared(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """The gradients of these were set to None or zero: what is put there next is new."""
        given = list(parameters)
        zeroed = [parameter for parameter in given if parameter.grad is not None]
        if zeroed:
            self._note(zeroed, _CLEARED)
        self._emptied.update(map(id, given))

    def _note(self, parameters: Collection[torch.nn.Parameter], origin: int) -> None:
        known, reference = self._known, weakref.ref
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                known.pop(id(parameter), None)
            else:
                known[id(parameter)] = reference(gradient), num_writes(gradient), origin
        keys = list(map(id, parameters))
        self._used.difference_update(keys)
        self._emptied.difference_update(keys)
        self._forget_bases(keys)

    def note_changed(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """The gradients of these, which were exchanged earlier, are global in the form that they have now."""
        for parameter in parameters:
            if parameter.grad is not None:
                _, _, origin = self._known[id(parameter)]
                self._known[id(parameter)] = weakref.ref(parameter.grad), num_writes(parameter.grad), origin

    def note_used(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """An optimizer is about to use the gradients of these."""
        keys = list(map(id, parameters))
        self._used.update(keys)
        self._forget_bases(keys)

    def end_batch(self) -> None:
        """Expect that the program adds further gradients to those that it has made by hand in the batch.

        Copies tell later what was added.
        """
        for key, parameter in self._by_hand.items():
            if key in self._known and key not in self._used and parameter.grad is not None:
                reference, version, _ = self._known[key]
                self._known[key] = reference, version, _ADDS_ON
                self._bases[key] = parameter.grad.detach().clone()
        self._by_hand.clear()

    def _forget_bases(self, keys: Iterable[int]) -> None:
        if self._bases:
            for key in keys:
                self._bases.pop(key, None)

    def base_of(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """Return a copy of the global part of a gradient that was made by hand; None where all of it is new."""
        base = None if id(parameter) in self._emptied else self._bases.get(id(parameter))
        return None if base is None else base.clone()

    def is_stale(self, parameter: torch.nn.Parameter) -> bool:
        """Return True if `.grad` holds what an optimizer has used already, unchanged."""
        return id(parameter) in self._used and parameter.grad is not None and not self.unknown([parameter])

    def keep_only(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Forget all other parameters; gradients of new ones have come from the driver, so that they are global."""
        given = {id(parameter): parameter for parameter in parameters}
        for held in (self._known, self._by_hand, self._bases):
            for key in held.keys() - given.keys():
                del held[key]
        self._used &= given.keys()
        self._emptied &= given.keys()
        self.note([parameter for key, parameter in given.items() if key not in self._known])

    def unknown(self, parameters: Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        """Return those whose gradient is another tensor than after the last exchange, or was written since."""
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
            parameter: One of `unknown`.
            adds_up: Gradients are added up, not weighted: one that is global already would be multiplied.
            filled_anew: A tensor that was written since an optimizer has used it holds a new gradient; else it was
                zeroed, say, for a backward pass that adds to it.

        Raises:
            FailedPreconditionError: Gradients are added up, and the gradient may be global.
        """
        entry = self._known.get(id(parameter))
        if entry is None or entry[2] == _CLEARED or id(parameter) in self._emptied:
            return True
        same, used, adds_on = entry[0]() is parameter.grad, id(parameter) in self._used, entry[2] == _ADDS_ON
        if not adds_on and (not used or (same and not filled_anew)):
            return False
        if adds_up and (same or adds_on):
            raise FailedPreconditionError(
                "Under gradient_reduce_op=SUM a gradient that is made by hand must be put into an empty .grad, got one "
                f"of shape {tuple(parameter.shape)} that still held a global gradient. Call optimizer.zero_grad() "
                "first; add up gradients of several batches by backward()."
            )
        return True


_Row = tuple[float, float, float]
"""Number of a parameter, sum and size of its gradient."""


@final
class Checksums:
    """Sums of some gradients, and the norms of their first elements, on the device of the gradients."""

    def __init__(self, indices: Sequence[int], scales: Sequence[float], numbers: torch.Tensor) -> None:
        self._indices, self._scales, self._numbers = tuple(indices), scales, numbers

    @classmethod
    def of(cls, gradients: Mapping[int, torch.Tensor]) -> Checksums:
        """Compute them; the gradients are given by the numbers of their parameters. Does not wait for the device."""
        with torch.no_grad():
            values = [_values(gradient) for gradient in gradients.values()]
            wide = any(one.dtype is torch.float64 for one in values)
            dtype, device = torch.float64 if wide else torch.float32, values[0].device
            parts = [one.sum(dtype=dtype) for one in values]
            parts += [torch.linalg.vector_norm(one[:_SAMPLE], dtype=dtype) for one in values]
            numbers = torch.stack([part.to(device) for part in parts])
        scales = [max(1.0, one.numel() / _SAMPLE) ** 0.5 for one in values]
        return cls(list(gradients), scales, numbers)

    def combined(self) -> torch.Tensor:
        """Return one float64 on the device that differs where a number or a parameter differs."""
        return self._numbers.double() @ _factors(self._indices, self._numbers.device)

    def rows(self) -> list[_Row]:
        """Return parameter, sum and size of each gradient; waits for the device."""
        numbers = self._numbers.tolist()
        sums, norms = numbers[: len(self._indices)], numbers[len(self._indices) :]
        return [
            (index, total, norm * scale)
            for index, total, norm, scale in zip(self._indices, sums, norms, self._scales, strict=True)
        ]


@functools.lru_cache(maxsize=16)
def _factors(indices: tuple[int, ...], device: torch.device) -> torch.Tensor:
    factors = [(index + 1) * ratio % 1 + 0.5 for ratio in (0.6180339887, 0.7548776662) for index in indices]
    values = torch.tensor(factors, dtype=torch.float64)
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


@final
class ChangedGradients:
    """Checksums of the gradients that the program has changed after their exchange.

    The next backward pass takes them: their combination travels in its trailer. Nothing waits for the device.
    """

    def __init__(self) -> None:
        self._noted: list[Checksums] = []

    def add(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Note the present values of these gradients, given by the numbers of their parameters."""
        if gradients:
            self._noted.append(Checksums.of(gradients))

    def take(self) -> list[Checksums]:
        """Return the checksums since the last call."""
        noted, self._noted = self._noted, []
        return noted


def combined(noted: Sequence[Checksums]) -> torch.Tensor | None:
    """Return one float64 for all of these checksums; None for none."""
    total: torch.Tensor | None = None
    for one in noted:
        total = one.combined() if total is None else total * 3 + one.combined()
    return total


def compare(communicator: Communicator, noted: Sequence[Checksums], name_of: Callable[[int], str]) -> None:
    """Return if the replicas differ in last bits only, whose combined checksums differ.

    Blocking: until all replicas call it, at most the communicator's limit.

    Raises:
        CollectiveMismatchError: On every replica alike; names the first parameter whose gradients differ.
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
    """The numbers of a gradient in one row."""
    values = gradient.detach()
    if values.is_sparse:
        values = values.coalesce().values()
    return (torch.view_as_real(values) if values.is_complex() else values).reshape(-1)


def _all_close(rows: Sequence[_Row | None]) -> bool:
    first = rows[0]
    if first is None:
        return False
    for row in rows[1:]:
        if row is None or row[0] != first[0]:
            return False
        for mine, theirs in ((first[1], row[1]), (first[2], row[2])):
            apart = abs(mine - theirs) > _LAST_BITS * (abs(mine) + first[2])  # no comparison with NaN holds
            if apart or math.isnan(mine) != math.isnan(theirs):
                return False
    return True


def _apart(name: str, index: int, rows: Sequence[_Row | None]) -> CollectiveMismatchError:
    said = [f"sum {row[1]:.7g}, norm about {row[2]:.7g}" if row and row[0] == index else "not changed" for row in rows]
    listed = "; ".join(f"replica {rank}: {text}" for rank, text in enumerate(said))
    return CollectiveMismatchError(
        "All replicas must change a gradient alike after the backward() that made it global, but they have changed "
        f"that of {name} differently, got {listed}. Use ctx.all_reduce for what a replica computes from its own rows, "
        "and the same random numbers for noise. To put a replica's own gradient into .grad by hand, call "
        "optimizer.zero_grad() first: optimizer.step() then exchanges it."
    )
