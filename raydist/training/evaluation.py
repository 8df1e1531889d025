"""`evaluate`, the validation in `fit`, and `predict`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

import torch

from raydist.core.errors import SpecError
from raydist.core.nest import NOTHING, flatten, map_structure, unflatten
from raydist.training.elements import unpack
from raydist.training.passes import (
    Executions,
    in_evaluation_mode,
    num_batches,
    num_steps,
    opened,
    require_finite,
    require_steps,
    run_executions,
    warn_out_of_data,
)
from raydist.training.settings import Trainee
from raydist.training.steps import evaluation_step

if TYPE_CHECKING:
    from torch import nn

    from raydist.context.strategy import Strategy
    from raydist.distributed_dataset import DistributedDataset
    from raydist.training.callbacks.callback import CallbackList
    from raydist.training.progress import Reporter

MAX_UNREAD = 8
"""Batches whose outputs are not read yet: reading them late keeps the replicas busy."""


@final
class Evaluation:
    """A computation of loss and metrics over whole datasets."""

    def __init__(self, trainee: Trainee, callbacks: CallbackList, reporter: Reporter) -> None:
        self._trainee = trainee
        self._trackers = trainee.compiled.trackers
        self._step = evaluation_step(trainee)
        self._callbacks = callbacks
        self._reporter = reporter

    def run(self, data: DistributedDataset, label: str, limit: int | None = None) -> dict[str, Any]:
        """Evaluate at most `limit` batches of `data`, with `label` in the progress display. Blocks until all are done.

        Warns once if `data` has fewer batches.
        """
        require_finite(data, label.lower(), limit)
        if self._trainee.compiled.loss is not None:
            unpack(data.element_spec)
        self._trackers.reset()
        self._reporter.start(label, num_steps(data, limit))
        self._callbacks.call("on_test_begin", {})
        with in_evaluation_mode(self._trainee.module), opened(data) as iterator:
            steps = run_executions(
                Executions(
                    self._trainee.strategy,
                    self._step,
                    iterator,
                    steps_per_execution=self._trainee.compiled.steps_per_execution,
                    num_batches=num_batches(data),
                ),
                limit=limit,
                begin=lambda step: self._callbacks.call("on_test_batch_begin", step, {}),
                end=self._after_execution,
            )
            require_steps(steps, label.lower())
            rows, logs = self._trackers.rows_and_logs()
        self._reporter.stop(steps, rows)
        self._callbacks.call("on_test_end", logs)
        if limit is not None and steps < limit:
            warn_out_of_data("steps", limit, steps, f"for {label.lower()}.")
        return logs

    def _after_execution(self, done: int) -> None:
        self._callbacks.batch_end("on_test_batch_end", done - 1, self._trackers.read)
        self._reporter.step(done, self._trackers.rows_and_logs)


@final
class Prediction:
    """One call of `Model.predict`."""

    def __init__(
        self,
        strategy: Strategy,
        module: nn.Module,
        callbacks: CallbackList,
        reporter: Reporter,
        step: Callable[[Any], Any],
    ) -> None:
        self._strategy = strategy
        self._module = module
        self._step = step
        self._callbacks = callbacks
        self._reporter = reporter
        self._unread: deque[Any] = deque()
        self._outputs: list[Any] = []  # one nest of CPU tensors per batch
        self._rows = 0

    def run(self, data: DistributedDataset, limit: int | None = None) -> Any:
        """Return the outputs for at most `limit` batches of `data`. Blocks; warns once if there are fewer batches."""
        require_finite(data, "predict", limit)
        self._reporter.start("Predict", num_steps(data, limit))
        self._callbacks.call("on_predict_begin", {})
        with in_evaluation_mode(self._module), opened(data) as iterator:
            calls = Executions(self._strategy, self._step, iterator)

            def after_execution(done: int) -> None:
                self._collect(calls.result, done)

            steps = run_executions(
                calls,
                limit=limit,
                begin=lambda step: self._callbacks.call("on_predict_batch_begin", step, {}),
                end=after_execution,
            )
            self._read_until(0)
        require_steps(steps, "predict")
        self._reporter.stop(steps, self._rows)
        self._callbacks.call("on_predict_end", {})
        self._reporter.result({})
        if limit is not None and steps < limit:
            warn_out_of_data("steps", limit, steps, "for predict.")
        return joined(self._outputs)

    def _collect(self, result: Any, done: int) -> None:
        self._unread.append(result)
        self._callbacks.batch_end("on_predict_batch_end", done - 1, lambda: {"outputs": self._strategy.gather(result)})
        self._read_until(MAX_UNREAD)
        self._reporter.step(len(self._outputs), lambda: (self._rows, {}))

    def _read_until(self, left: int) -> None:
        while len(self._unread) > left:
            output = self._strategy.gather(self._unread.popleft())
            self._outputs.append(output)
            self._rows += len(flatten(output, NOTHING)[0][0])


def joined(outputs: list[Any]) -> Any:
    """Concatenate the nests of all batches. None stays None.

    >>> joined([{"y": torch.tensor([1, 2])}, {"y": torch.tensor([3])}])
    {'y': tensor([1, 2, 3])}
    """
    try:
        return map_structure(lambda *parts: torch.cat(parts), *outputs, none=NOTHING)
    except RuntimeError:
        _, structure = flatten(outputs[0], NOTHING)
        leaves = zip(*(flatten(output, NOTHING)[0] for output in outputs), strict=True)
        shapes = unflatten(structure, [sorted({tuple(part.shape[1:]) for part in parts}) for parts in leaves])
        raise SpecError(
            f"Predictions of all batches must agree in all but their first dimension, got rows of the shapes {shapes}. "
            "Pad them in the module, or predict with a loop of your own."
        ) from None
