"""Progress of a `fit`: the state from which it resumes as if it had never been interrupted."""

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
    """The progress of one `fit`, as an object of a checkpoint. Model and counters are separate objects.

    Args:
        callbacks: Callbacks whose states are included.
        held_out: The validation data.

    Attributes:
        epoch: Number of the current or next epoch, counted from 0.
        batches: Batches done in that epoch.
        drawn: Batches done in all epochs.
        total: Batches of an epoch, if known.
        saw_data: True once there was any batch.
        logs: Logs of the epoch's training once that has ended and the validation is running; otherwise None.
        last_logs: Logs of the last completed epoch.
        stop: True if training stops after this execution, or has stopped.
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
        """True if an epoch has begun and not ended."""
        return self.batches > 0 or self.logs is not None

    @contextlib.contextmanager
    def without_callbacks(self) -> Iterator[None]:
        """Leave callbacks out for the `with` block: before `on_train_begin` their counters may not exist."""
        self._with_callbacks = False
        try:
            yield
        finally:
            self._with_callbacks = True

    def end_training(self, logs: dict[str, Any]) -> None:
        """Record the end of the epoch's training, before its validation."""
        self.logs = dict(logs)
        self._before_validation = None if self._held_out is None else self._held_out.state_dict()

    def end_epoch(self, logs: dict[str, Any]) -> None:
        """Record the end of the epoch."""
        self.epoch, self.batches, self.logs, self.last_logs = self.epoch + 1, 0, None, dict(logs)
        self._before_validation = None

    def state_dict(self) -> dict[str, Any]:
        """Return the progress, with the states of the callbacks."""
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
        """Return the position of the validation data outside of validations: an interrupted validation is repeated."""
        if self._held_out is None or self._before_validation is not None:
            return self._before_validation
        return self._held_out.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the progress. Callbacks take saved states by class name, in order.

        Raises:
            InvalidArgumentError: The state has another version.
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
