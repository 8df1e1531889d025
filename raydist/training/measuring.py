"""`Model.evaluate` and `Model.predict`."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

import torch

from raydist.errors import SpecError
from raydist.foreign_errors import folded
from raydist.nest import NOTHING, flatten, map_structure, unflatten
from raydist.training.callbacks.callback import Callback
from raydist.training.callbacks.callback_list import CallbackList
from raydist.training.callbacks.progress_bar import progress_stream
from raydist.training.compiled_model import CompiledModel
from raydist.training.display.reporter import Reporter
from raydist.training.display.views import open_view
from raydist.training.evaluation import Evaluation
from raydist.training.executions import executions
from raydist.training.given_data import GivenData
from raydist.training.passes import (
    in_evaluation_mode,
    num_steps,
    opened,
    require_at_least,
    require_finite,
    require_steps,
    run_pass,
    warn_out_of_data,
)
from raydist.training.precision import Precision
from raydist.training.steps import prediction_step

if TYPE_CHECKING:
    from raydist.dataset import Dataset
    from raydist.distributed_dataset import DistributedDataset

    Data = Dataset | DistributedDataset
    from torch import nn

    from raydist.context.strategy import Strategy

__all__ = ["MeasuredModel"]

MAX_UNREAD = 8
"""Batches whose outputs are not read yet: reading them late keeps the replicas busy."""


@final
class Prediction:
    """One call of `Model.predict`."""

    def __init__(
        self,
        strategy: Strategy,
        module: nn.Module,
        callbacks: CallbackList,
        reporter: Reporter,
        precision: Precision = None,
        *,
        own_loss: bool = False,
    ) -> None:
        self._strategy = strategy
        self._module = module
        self._step = prediction_step(module, precision, by_keyword=own_loss)
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
            calls = executions(self._strategy, self._step, iterator)

            def after_execution(done: int) -> None:
                self._collect(calls.result, done)

            steps = run_pass(
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


class MeasuredModel(CompiledModel):
    """The part of `Model` that evaluates and predicts."""

    @folded
    def evaluate(
        self,
        x: Data | Any = None,
        y: Any = None,
        batch_size: int | None = None,
        callbacks: Sequence[Callback] = (),
        *,
        verbose: bool = True,
        steps: int | None = None,
        dataset: Data | None = None,
    ) -> dict[str, Any]:
        """Return loss and metrics over a dataset, with the module in evaluation mode. Blocks until the result is there.

        Args:
            x: A dataset batched by the global batch size, with elements as for :meth:`fit`; or arrays, or a DataLoader.
            y: Targets for arrays x.
            batch_size: Rows of a global batch of arrays; None: 32.
            callbacks: Callbacks whose `on_test_...` hooks are called.
            verbose: Show progress, as in :meth:`fit`.
            steps: Number of batches; None: all batches. Warns once if there are fewer.
            dataset: Former name of x.

        Returns:
            Name -> value: "loss", and each metric. A float for a single number, otherwise a CPU tensor.

        Raises:
            FailedPreconditionError: `compile` was not called.
            InvalidArgumentError: The dataset has no batch or, without `steps`, never ends; or as for :meth:`fit`.
            SpecError: Elements are not (x, y) or (x, y, sample_weight).

        >>> import numpy as np, torch
        >>> x = np.arange(8, dtype=np.float32)[:, None]
        >>> with rd.OneDeviceStrategy("cpu").scope():
        ...     model = rd.Model(torch.nn.Linear(1, 1))
        ...     model.compile(torch.optim.SGD(model.parameters(), lr=0.01), torch.nn.MSELoss())
        >>> list(model.evaluate(rd.Dataset.from_tensor_slices((x, x)).batch(3), verbose=False))
        ['loss']

        Source: keras.Model.evaluate.
        """
        trainee = self._trainee()
        require_at_least("steps", steps)
        own_loss = trainee.compiled.loss is None
        data = GivenData(x, y, batch_size, dataset, "evaluate", own_loss).distributed(self._strategy)
        hooks = CallbackList(callbacks, self._whole(), {"epochs": None, "steps": num_steps(data, steps)})
        with open_view(*progress_stream(callbacks, verbose=verbose)) as view:
            reporter = Reporter(view)
            logs = Evaluation(trainee, hooks, reporter).run(data, "Evaluate", steps)
            reporter.result(logs)
        return logs

    @folded
    def predict(
        self,
        x: Data | Any = None,
        batch_size: int | None = None,
        callbacks: Sequence[Callback] = (),
        *,
        verbose: bool = True,
        steps: int | None = None,
        dataset: Data | None = None,
    ) -> Any:
        """Return the module's outputs for every row, in the order of the dataset. Blocks; does not need `compile`.

        Elements may be x alone, or tuples whose first part is x; with `loss="model"` elements are as for :meth:`fit`.
        The module runs in evaluation mode, one batch per call to the replicas.

        Args:
            x: A dataset batched by the global batch size; or arrays, or a DataLoader, as for :meth:`fit`.
            batch_size: Rows of a global batch of arrays; None: 32.
            callbacks: Callbacks whose `on_predict_...` hooks are called.
            verbose: Show progress, as in :meth:`fit`.
            steps: Number of batches; None: all batches. Warns once if there are fewer.
            dataset: Former name of x.

        Returns:
            A CPU tensor of all rows, or a nest of tensors as the module returns it (lists as tuples), with None for
            values that are not tensors (a text, a number, a key-value cache). For a module that computes its loss
            (`loss="model"`), a dict, tuple or tensor of the outputs with one entry per row, without loss and caches.

        Raises:
            InvalidArgumentError: The dataset has no batch or, without `steps`, never ends; or as for :meth:`fit`.
            SpecError: An output does not have one entry per row, or rows of different batches differ in shape.

        >>> import torch
        >>> rd.Model(torch.nn.Flatten()).predict(rd.Dataset.range(4).batch(2).batch(2), verbose=False)
        tensor([[0, 1],
                [2, 3]])

        Source: keras.Model.predict.
        """
        require_at_least("steps", steps)
        compiled = self._compiled
        precision, own_loss = (None, False) if compiled is None else (compiled.precision, compiled.loss is None)
        data = GivenData(x, None, batch_size, dataset, "predict", own_loss).distributed(self._strategy)
        hooks = CallbackList(callbacks, self._whole(), {"epochs": None, "steps": num_steps(data, steps)})
        with open_view(*progress_stream(callbacks, verbose=verbose)) as view:
            prediction = Prediction(self._strategy, self._module, hooks, Reporter(view), precision, own_loss=own_loss)
            return prediction.run(data, steps)
