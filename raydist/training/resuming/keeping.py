"""The keepers of a `fit`, which save checkpoints while it runs and resume from them."""

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
    """A strategy for saving and restoring a `fit`."""

    @abstractmethod
    def restore(self) -> str | None:
        """Restore the newest checkpoint; return its path, or None if there is none. May be called again."""

    @abstractmethod
    def after_execution(self, num_batches: int) -> None:
        """Save if due, after `num_batches` further batches and all callbacks."""

    @abstractmethod
    def after_epoch(self, logs: dict[str, Any]) -> None:
        """Save if due, after an epoch and all callbacks."""

    @abstractmethod
    def finish(self) -> None:
        """Clean up after training has ended normally and callbacks were called."""


@final
class Keepers:
    """All keepers of one `fit`. The first keeper that finds a checkpoint restores it.

    Args:
        keepers: The keepers, in order.
        state: Progress of the `fit`.
    """

    def __init__(self, keepers: list[Keeper], state: FitState) -> None:
        self._keepers = keepers
        self._state = state
        self._source: Keeper | None = None

    def restore(self) -> bool:
        """Restore the newest checkpoint; return True if there was one."""
        for keeper in self._keepers:
            if keeper.restore() is not None:
                self._source = keeper
                return True
        return False

    def restore_again(self) -> None:
        """Undo changes by hooks that an uninterrupted `fit` would not have called here."""
        if self._source is not None:
            self._source.restore()

    def before_draw(self, data: DistributedDataset) -> AbstractContextManager[None]:
        """Count the next step's batch as not drawn during the `with` block, because a hook may save before the step."""
        return data._before_draw() if self._keepers else nullcontext()

    def after_execution(self, num_batches: int) -> None:
        """Let all keepers save after `num_batches` further batches."""
        for keeper in self._keepers:
            keeper.after_execution(num_batches)

    def after_epoch(self, logs: dict[str, Any]) -> None:
        """Let all keepers save after an epoch."""
        for keeper in self._keepers:
            keeper.after_epoch(logs)

    def finish(self) -> None:
        """Let all keepers clean up after a normal end."""
        for keeper in self._keepers:
            keeper.finish()

    def say_nothing_is_left(self, epochs: int) -> None:
        """Warn that the checkpoint is of a training that has ended."""
        why = "was stopped then" if self._state.stop else f"ends there (epochs={epochs})"
        warnings.warn(
            f"fit has nothing to train: its checkpoint is that of the end of epoch {self._state.epoch}, and training "
            f"{why}. Give a larger number of epochs, another directory, or resume=False.",
            stacklevel=2,
        )
