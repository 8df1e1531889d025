"""Evaluating the checkpoints of a training that goes on elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from raydist.checkpoints.checkpoint import Checkpoint
from raydist.checkpoints.latest import checkpoints_iterator
from raydist.checkpoints.saved_checkpoint import open_checkpoint
from raydist.errors import DataLossError, InvalidArgumentError, NotFoundError
from raydist.pipelines.formats.files import shown_uri
from raydist.pipelines.stored.directory_files import directory_files
from raydist.strategies.global_step import counter_of
from raydist.strategies.one_device import OneDeviceStrategy
from raydist.training.model import Model

if TYPE_CHECKING:
    from raydist.context.strategy import Strategy
    from raydist.training.callbacks.callback import Callback

__all__ = ["Evaluated", "SidecarWork"]

_LOOK_S = 0.5  # between two looks at whether to stop
_MODEL, _STEP = "model", "fit.global_step"


@final
@dataclass(frozen=True, slots=True, repr=False)
class Evaluated:
    """What came of one checkpoint.

    Attributes:
        path: Of the checkpoint.
        step: The global step that it was saved at; 0 where it has none.
        logs: Loss and metrics by name.
    """

    path: str
    step: int
    logs: dict[str, Any]

    def __repr__(self) -> str:
        return f"Evaluated(path={shown_uri(self.path)!r}, step={self.step}, logs={self.logs!r})"


@final
@dataclass(frozen=True, slots=True)
class SidecarWork:
    """What a sidecar does; it travels to where it does it.

    Attributes:
        model_fn: Makes a compiled model, in the scope.
        data: What it is evaluated on.
        checkpoint_dir: Where the training saves.
        make_strategy: Makes the strategy; None for one CPU.
        steps: Batches of an evaluation; None for all.
        max_evaluations: Ends after so many.
        callbacks: Of each evaluation.
    """

    model_fn: Callable[[], Model]
    data: Any
    checkpoint_dir: str
    make_strategy: Callable[[], Strategy] | None = None
    steps: int | None = None
    max_evaluations: int | None = None
    callbacks: Sequence[Callback] = ()

    def __call__(self, stopped: Callable[[], bool], tell: Callable[[Evaluated], None]) -> None:
        """Evaluate each new checkpoint, the newest of those that have come meanwhile, until `stopped()`."""
        strategy = OneDeviceStrategy("cpu") if self.make_strategy is None else self.make_strategy()
        done = 0
        with strategy:
            with strategy.scope():
                model = self.model_fn()
            if not isinstance(model, Model):
                raise InvalidArgumentError(f"model_fn must make a compiled rd.Model, got {model!r:.80}.")
            for path in checkpoints_iterator(self.checkpoint_dir, timeout=_LOOK_S, timeout_fn=stopped):
                if stopped():
                    return
                try:
                    tell(self._evaluated(model, path))
                except NotFoundError:  # a newer one has taken its place meanwhile
                    continue
                done += 1
                if done == self.max_evaluations:
                    return

    def _evaluated(self, model: Model, path: str) -> Evaluated:
        counter = counter_of(model.strategy)
        objects: dict[str, Any] = {_MODEL: model.module}
        if _STEP in open_checkpoint(directory_files(path)).manifest.objects:
            objects["fit"] = {"global_step": counter}
        try:
            Checkpoint(**objects).restore(path, only=list(objects))
        except DataLossError:
            open_checkpoint(directory_files(path))  # NotFoundError where it was removed while it was read
            raise
        logs = model.evaluate(self.data, callbacks=self.callbacks, verbose=False, steps=self.steps)
        return Evaluated(path, int(counter.value), logs)
