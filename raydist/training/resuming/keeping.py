"""Checkpoints of a `fit` while it runs: when they are saved, and how it goes on from one."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, final

from raydist.training.resuming.fit_state import FitState

if TYPE_CHECKING:
    from raydist.distributed_dataset import DistributedDataset

__all__ = ["Keeper", "Keepers"]


class Keeper(ABC):
    """Saves a `fit`, and restores it."""

    @abstractmethod
    def restore(self) -> str | None:
        """Have everything go on from the newest checkpoint; its path, None where there is none. May be called again."""

    @abstractmethod
    def after_execution(self, num_batches: int) -> None:
        """So many further batches are done, with all that callbacks do: save, if it is time."""

    @abstractmethod
    def after_epoch(self, logs: dict[str, Any]) -> None:
        """An epoch is over, with all that callbacks do: save, if it is time."""

    @abstractmethod
    def finish(self) -> None:
        """Training has ended in order, callbacks were told."""


@final
class Keepers:
    """All keepers of one `fit`. The first that finds a checkpoint restores it.

    Args:
        keepers: In order.
        state: Where the `fit` is.
    """

    def __init__(self, keepers: list[Keeper], state: FitState) -> None:
        self._keepers = keepers
        self._state = state
        self._source: Keeper | None = None

    def restore(self) -> bool:
        """Go on from the newest checkpoint; whether there was one."""
        for keeper in self._keepers:
            if keeper.restore() is not None:
                self._source = keeper
                return True
        return False

    def restore_again(self) -> None:
        """Undo what hooks have changed that an uninterrupted `fit` would not have called here."""
        if self._source is not None:
            self._source.restore()

    def before_draw(self, data: DistributedDataset) -> AbstractContextManager[None]:
        """Inside, the batch whose step is to come counts as not drawn: a hook may save before it."""
        return data._before_draw() if self._keepers else nullcontext()

    def after_execution(self, num_batches: int) -> None:
        """So many further batches are done."""
        for keeper in self._keepers:
            keeper.after_execution(num_batches)

    def after_epoch(self, logs: dict[str, Any]) -> None:
        """An epoch is over."""
        for keeper in self._keepers:
            keeper.after_epoch(logs)

    def finish(self) -> None:
        """Training has ended in order."""
        for keeper in self._keepers:
            keeper.finish()

    def say_nothing_is_left(self, epochs: int) -> None:
        """The checkpoint is of a training that has ended."""
        why = "was stopped then" if self._state.stop else f"ends there (epochs={epochs})"
        warnings.warn(
            f"fit has nothing to train: its checkpoint is that of the end of epoch {self._state.epoch}, and training "
            f"{why}. Give a larger number of epochs, another directory, or resume=False.",
            stacklevel=2,
        )
