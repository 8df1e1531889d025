"""Gradients that a replica has accumulated by itself (`no_sync`) and still has to share.

`.grad` shows them as usual, mixed with what was global before; the two parts are remembered apart until the next
synchronised backward pass sends the local one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

import torch

from raydist.compat.torch_internals import num_writes
from raydist.errors import FailedPreconditionError

__all__ = ["LocalAccumulation", "accumulate"]


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
