"""`rd.SidecarEvaluator`: evaluation of checkpoints in an actor, while training continues."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, final

from raydist.actors.background_actor import BackgroundActor
from raydist.checkpoints.checkpoint import Checkpoint
from raydist.checkpoints.listing import checkpoints_iterator
from raydist.checkpoints.manifest import open_checkpoint
from raydist.core.errors import (
    DataLossError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from raydist.pipelines.formats.files import path_text, shown_uri
from raydist.pipelines.stored.directory_files import directory_files
from raydist.strategies.one_device import OneDeviceStrategy
from raydist.training.model import Model

if TYPE_CHECKING:
    from raydist.context.strategy import Strategy
    from raydist.training.callbacks.callback import Callback

_STOP_LOOK_S = 0.5  # between two checks for a stop
_MODEL, _STEP = "model", "fit.global_step"


@final
@dataclass(frozen=True, slots=True, repr=False)
class Evaluated:
    """The result for one checkpoint.

    Attributes:
        path: Path of the checkpoint.
        step: Global step of the checkpoint; 0 if it has none.
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
    """The work of the evaluator's actor, pickled by value.

    Attributes:
        model_fn: Creates a compiled model, in the scope.
        data: Evaluation data.
        checkpoint_dir: Directory of the training's checkpoints.
        make_strategy: Creates the strategy; None for one CPU.
        steps: Batches of an evaluation; None for all.
        max_evaluations: Number of evaluations after which the work ends.
        callbacks: Callbacks of each evaluation.
    """

    model_fn: Callable[[], Model]
    data: Any
    checkpoint_dir: str
    make_strategy: Callable[[], Strategy] | None = None
    steps: int | None = None
    max_evaluations: int | None = None
    callbacks: Sequence[Callback] = ()

    def __call__(self, stopped: Callable[[], bool], tell: Callable[[Evaluated], None]) -> None:
        """Evaluate the newest checkpoint whenever there is a new one, until `stopped()` returns True."""
        strategy = OneDeviceStrategy("cpu") if self.make_strategy is None else self.make_strategy()
        done = 0
        with strategy:
            with strategy.scope():
                model = self.model_fn()
            if not isinstance(model, Model):
                raise InvalidArgumentError(f"model_fn must make a compiled rd.Model, got {model!r:.80}.")
            for path in checkpoints_iterator(self.checkpoint_dir, timeout=_STOP_LOOK_S, timeout_fn=stopped):
                if stopped():
                    return
                try:
                    tell(self._evaluated(model, path))
                except NotFoundError:  # a newer checkpoint has replaced it meanwhile
                    continue
                done += 1
                if done == self.max_evaluations:
                    return

    def _evaluated(self, model: Model, path: str) -> Evaluated:
        counter = model.strategy._make_counter()
        objects: dict[str, Any] = {_MODEL: model.module}
        if _STEP in open_checkpoint(directory_files(path)).manifest.objects:
            objects["fit"] = {"global_step": counter}
        try:
            Checkpoint(**objects).restore(path, only=list(objects))
        except DataLossError:
            open_checkpoint(directory_files(path))  # NotFoundError if the checkpoint was removed while it was read
            raise
        logs = model.evaluate(self.data, callbacks=self.callbacks, verbose=False, steps=self.steps)
        return Evaluated(path, int(counter.value), logs)


_LOOK_S = 0.2


@final
class SidecarEvaluator:
    """An actor that evaluates the checkpoints of a running training, each at most once.

    If several checkpoints have come since the last evaluation, the newest is evaluated. Training and evaluator share
    only the directory: `fit(checkpoint=directory)`, or a `CheckpointManager` whose checkpoint has the module as
    "model". A context manager: leaving `with` ends the actor.

    Args:
        model_fn: Creates the compiled :class:`Model`. Pickled by value and called in the actor, in the scope of
            `strategy`.
        data: A dataset of batches, as for `Model.evaluate`.
        checkpoint_dir: Directory of the training's checkpoints: a path that the actor's node can read, or a URI that
            fsspec supports.
        strategy: A function that creates the strategy for evaluation, because strategies cannot be pickled; None: one
            CPU.
        steps: Batches of an evaluation; None: all.
        max_evaluations: Number of evaluations after which the actor ends; None: when the evaluator is closed.
        callbacks: Callbacks whose `on_test_...` hooks are called in the actor; `rd.get_global_step()` is the
            checkpoint's.
        resources: Ray resources of the actor; its strategy requests more if it has replicas. Default: 1 CPU.

    Raises:
        InvalidArgumentError: `model_fn` or `strategy` is not a function, or a number is < 1.

    >>> evaluator = rd.SidecarEvaluator(lambda: make_model(), rd.Dataset.range(4).batch(2), "checkpoints")
    >>> evaluator.results()  # nothing was started yet
    []

    Source: tf.keras.utils.SidecarEvaluator.
    """

    def __init__(
        self,
        model_fn: Callable[[], Model],
        data: Any,
        checkpoint_dir: str | os.PathLike[str],
        strategy: Callable[[], Strategy] | None = None,
        steps: int | None = None,
        max_evaluations: int | None = None,
        callbacks: Sequence[Callback] = (),
        *,
        resources: Mapping[str, float] | None = None,
    ) -> None:
        if not callable(model_fn):
            raise InvalidArgumentError(
                f"model_fn must be a function that makes a compiled model, got {model_fn!r:.80}."
            )
        if strategy is not None and not callable(strategy):
            raise InvalidArgumentError(
                f"strategy must be a function that makes one, since strategies don't travel, got {strategy!r:.80}. "
                "Write strategy=lambda: rd.MirroredStrategy(2)."
            )
        for name, number in [("steps", steps), ("max_evaluations", max_evaluations)]:
            if number is not None and number < 1:
                raise InvalidArgumentError(f"{name} must be >= 1 or None, got {number!r}.")
        directory = path_text(checkpoint_dir)
        self._work = SidecarWork(model_fn, data, directory, strategy, steps, max_evaluations, tuple(callbacks))
        self._resources = {"CPU": 1.0} if resources is None else dict(resources)
        self._actor: BackgroundActor | None = None
        self._results: list[Evaluated] = []
        self._ended = False

    def start(self) -> Self:
        """Start the actor. Blocks until it has begun.

        Returns:
            The evaluator itself.

        Raises:
            FailedPreconditionError: The evaluator was started before.

        Source: tf.keras.utils.SidecarEvaluator.start, which evaluates in its caller.

        Example::

            with rd.SidecarEvaluator(make_model, held_out, "checkpoints").start() as evaluator:
                model.fit(data, epochs=10, checkpoint="checkpoints")
                print(evaluator.results()[-1].logs)
        """
        if self._actor is not None or self._ended:
            raise FailedPreconditionError("A SidecarEvaluator must be started once. Make another one.")
        self._actor = BackgroundActor(self._work, "The sidecar evaluator", self._resources)
        self._actor.start()
        return self

    def results(self) -> list[Evaluated]:
        """Return the results so far, in order: each has `path`, `step` and `logs`.

        Returns:
            A new list.

        Raises:
            Exception: An evaluation failed, which has ended the actor.
            UnavailableError: The actor is gone.

        Source: raydist's own; TensorFlow's are read from TensorBoard.
        """
        if self._actor is not None:
            self._ended, new = self._actor.news(len(self._results))
            self._results += new
        return list(self._results)

    def wait(self, num_evaluations: int, timeout_s: float) -> list[Evaluated]:
        """Block until there are `num_evaluations` results.

        Args:
            num_evaluations: Total number of results.
            timeout_s: Limit in seconds.

        Returns:
            The results; fewer only if the actor has ended.

        Raises:
            DeadlineExceededError: There are fewer results after `timeout_s`.

        Source: raydist's own.

        >>> evaluator = rd.SidecarEvaluator(lambda: make_model(), rd.Dataset.range(4).batch(2), "checkpoints")
        >>> evaluator.wait(0, timeout_s=1.0)
        []
        """
        end = time.monotonic() + timeout_s
        while len(found := self.results()) < num_evaluations and not self._ended:
            if time.monotonic() >= end:
                raise DeadlineExceededError(
                    f"{num_evaluations} checkpoints must be evaluated within {timeout_s:g} s, got {len(found)}. Wait "
                    "longer, or see whether the training saves into that directory."
                )
            time.sleep(_LOOK_S)
        return found

    def close(self, limit_s: float = 10.0) -> None:
        """End the actor. May be called twice.

        Args:
            limit_s: Seconds for which a running evaluation may continue.

        Source: raydist's own.

        >>> rd.SidecarEvaluator(lambda: make_model(), rd.Dataset.range(4).batch(2), "checkpoints").close()
        """
        actor, self._actor, self._ended = self._actor, None, True
        if actor is not None:
            actor.stop(limit_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
