"""Where a `fit` is: what it must remember to go on as if it had never been interrupted."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

from raydist.distributed_dataset import DistributedDataset
from raydist.errors import InvalidArgumentError
from raydist.training.callbacks.callback import Callback

__all__ = ["FitState"]

_VERSION = 1


@final
class FitState:
    """The place of one `fit`, for a checkpoint; what is trained and counted is saved beside it.

    Args:
        callbacks: Whose states belong to it.
        held_out: The validation data.

    Attributes:
        epoch: Number of the epoch that is under way, or comes next, counted from 0.
        batches: Of that epoch, how many are done.
        drawn: Batches of all epochs that are done.
        total: Batches of an epoch, where that is known.
        saw_data: Whether there was any batch.
        logs: Of the epoch's training, once that is over: then its validation is under way.
        last_logs: Of the last epoch that has ended.
        stop: Whether training stops after this execution, or has stopped.
    """

    def __init__(self, callbacks: Sequence[Callback] = (), held_out: DistributedDataset | None = None) -> None:
        self._callbacks = tuple(callbacks)
        self._held_out = held_out
        self._before_validation: Mapping[str, Any] | None = None
        self._with_callbacks = True
        self._is_told = False
        self.epoch = 0
        self.batches = 0
        self.drawn = 0
        self.total: int | None = None
        self.saw_data = False
        self.logs: dict[str, Any] | None = None
        self.last_logs: dict[str, Any] = {}
        self.stop = False

    @property
    def is_within_epoch(self) -> bool:
        """Whether an epoch has begun and not ended."""
        return self.batches > 0 or self.logs is not None

    @contextlib.contextmanager
    def without_callbacks(self) -> Iterator[None]:
        """Inside, callbacks are not asked: before `on_train_begin` they need not have what they count."""
        self._with_callbacks = False
        try:
            yield
        finally:
            self._with_callbacks = True

    def end_training(self, logs: dict[str, Any]) -> None:
        """The epoch's training is over, its validation comes."""
        self.logs = dict(logs)
        self._before_validation = None if self._held_out is None else self._held_out.state_dict()

    def end_epoch(self, logs: dict[str, Any]) -> None:
        """The epoch is over."""
        self.epoch, self.batches, self.logs, self.last_logs = self.epoch + 1, 0, None, dict(logs)
        self._before_validation = None

    def state_dict(self) -> dict[str, Any]:
        """All of it, with the states of the callbacks."""
        return {
            "version": _VERSION,
            "epoch": self.epoch,
            "batches": self.batches,
            "drawn": self.drawn,
            "total": self.total,
            "saw_data": self.saw_data,
            "logs": self.logs,
            "last_logs": self.last_logs,
            "stop": self.stop,
            "callbacks": [[type(one).__name__, one.state_dict()] for one in self._asked()],
            "held_out": self._held_out_state(),
        }

    def _asked(self) -> Sequence[Callback]:
        return self._callbacks if self._with_callbacks else ()

    def _held_out_state(self) -> Mapping[str, Any] | None:
        """Where the validation data was when no validation was under way: one that is interrupted is done again."""
        if self._held_out is None or self._before_validation is not None:
            return self._before_validation
        return self._held_out.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there. A callback takes the state of the one of its class at the same place among these.

        Raises:
            InvalidArgumentError: It is no such state.
        """
        if state.get("version") != _VERSION:
            raise InvalidArgumentError(
                f"The state of a fit must be of version {_VERSION}, got {state.get('version')!r:.80}. Resume with the "
                "version of raydist that saved it."
            )
        self.epoch, self.batches, self.drawn = state["epoch"], state["batches"], state["drawn"]
        self.total, self.saw_data, self.stop = state["total"], state["saw_data"], state["stop"]
        self.logs = None if state["logs"] is None else dict(state["logs"])
        self.last_logs = dict(state["last_logs"])
        if self._held_out is not None and state["held_out"] is not None:
            self._held_out.load_state_dict(dict(state["held_out"]))
        self._before_validation = None
        self._load_callbacks(state["callbacks"])

    def _load_callbacks(self, saved: Sequence[Sequence[Any]]) -> None:
        left, without = list(saved), []
        for callback in self._asked():
            found = next((one for one in left if one[0] == type(callback).__name__), None)
            if found is not None:
                left.remove(found)
                callback.load_state_dict(found[1])
            elif callback.state_dict():
                without.append(type(callback).__name__)
        lost = [name for name, state in left if state]
        if lost and without and not self._is_told:
            self._is_told = True
            warnings.warn(
                f"fit goes on without the saved states of the callbacks {', '.join(lost)}, and {', '.join(without)} "
                "begin anew: a state is given to the class of that name. Was one renamed?",
                stacklevel=2,
            )
