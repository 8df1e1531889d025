"""`evaluate`, and the validation in `fit`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from raydist.training.elements import unpack
from raydist.training.executions import executions
from raydist.training.passes import (
    in_evaluation_mode,
    num_batches,
    num_steps,
    opened,
    require_finite,
    require_steps,
    run_pass,
    warn_out_of_data,
)
from raydist.training.steps import Trainee, evaluation_step

if TYPE_CHECKING:
    from raydist.distributed_dataset import DistributedDataset
    from raydist.training.callbacks.callback_list import CallbackList
    from raydist.training.display.reporter import Reporter

__all__ = ["Evaluation"]


@final
class Evaluation:
    """A computation of loss and metrics over whole datasets."""

    def __init__(self, trainee: Trainee, callbacks: CallbackList, reporter: Reporter) -> None:
        self._trainee = trainee
        self._trackers = trainee.compiled.trackers
        self._step = evaluation_step(trainee.module, trainee.compiled)
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
            steps = run_pass(
                executions(
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
