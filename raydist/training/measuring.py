"""`Model.evaluate` and `Model.predict`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from raydist.foreign_errors import folded
from raydist.training.callbacks.callback import Callback
from raydist.training.callbacks.callback_list import CallbackList
from raydist.training.callbacks.progress_bar import progress_stream
from raydist.training.compiled_model import CompiledModel
from raydist.training.display.reporter import Reporter
from raydist.training.display.views import open_view
from raydist.training.evaluation import Evaluation
from raydist.training.given_data import GivenData
from raydist.training.passes import num_steps, require_at_least
from raydist.training.prediction import Prediction

if TYPE_CHECKING:
    from raydist.dataset import Dataset
    from raydist.distributed_dataset import DistributedDataset

    Data = Dataset | DistributedDataset

__all__ = ["MeasuredModel"]


class MeasuredModel(CompiledModel):
    """Models that are asked how good they are, and for predictions."""

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
        """Loss and metrics over a dataset, with the module in evaluation mode. Waits for the result.

        Args:
            x: Batched by the global batch size; elements as for :meth:`fit`. Or arrays, or a DataLoader, as there.
            y: Targets that belong to arrays x.
            batch_size: Rows of a global batch of arrays; None: 32.
            callbacks: Their `on_test_...` hooks are called.
            verbose: Show progress, as in :meth:`fit`.
            steps: Batches to look at; None: all there are. One warning where there are fewer.
            dataset: What x was called once.

        Returns:
            Name -> value: "loss", and each metric. A float where it is a single number, else a CPU tensor.

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
        """The module's outputs for every row, in the order of the dataset. Waits for them; needs no `compile`.

        Elements may be x alone, or tuples whose first part is x; with `loss="model"` they are as for :meth:`fit`. The
        module runs in evaluation mode, one batch per call to the replicas.

        Args:
            x: Batched by the global batch size. Or arrays, or a DataLoader, as for :meth:`fit`.
            batch_size: Rows of a global batch of arrays; None: 32.
            callbacks: Their `on_predict_...` hooks are called.
            verbose: Show progress, as in :meth:`fit`.
            steps: Batches to look at; None: all there are. One warning where there are fewer.
            dataset: What x was called once.

        Returns:
            A CPU tensor of all rows, or a nest of them as the module returns it (lists as tuples), with None in the
            place of what is no tensor (a text, a number, an object that holds keys and values). Of a module that
            computes its loss (`loss="model"`) a dict, tuple or tensor of the outputs with one entry per row: no loss,
            no cache of keys and values.

        Raises:
            InvalidArgumentError: The dataset has no batch or, without `steps`, never ends; or as for :meth:`fit`.
            SpecError: An output has not one entry per row, or rows of different batches differ in shape.

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
