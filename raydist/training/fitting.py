"""`Model.fit`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raydist.foreign_errors import folded
from raydist.training.callbacks.callback import Callback, History
from raydist.training.callbacks.callback_list import CallbackList
from raydist.training.callbacks.progress_bar import progress_stream
from raydist.training.class_weights import ClassWeights
from raydist.training.compiled_model import CompiledModel
from raydist.training.display.reporter import Reporter
from raydist.training.display.views import open_view
from raydist.training.evaluation import Evaluation
from raydist.training.fit import Fit, FitPlan
from raydist.training.given_data import GivenData, held_out_data
from raydist.training.passes import require_at_least
from raydist.training.resuming.fit_checkpoints import FitCheckpoints
from raydist.training.resuming.fit_state import FitState

if TYPE_CHECKING:
    from raydist.checkpoints.manager import CheckpointManager
    from raydist.dataset import Dataset
    from raydist.distributed_dataset import DistributedDataset

    Data = Dataset | DistributedDataset

__all__ = ["FittedModel"]


class FittedModel(CompiledModel):
    """The part of `Model` that trains with `fit`."""

    @folded
    def fit(
        self,
        x: Data | Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        steps_per_epoch: int | None = None,
        validation_data: Data | Any | None = None,
        callbacks: Sequence[Callback] = (),
        *,
        verbose: bool = True,
        shuffle: bool = True,
        initial_epoch: int = 0,
        validation_freq: int | Container[int] = 1,
        validation_steps: int | None = None,
        class_weight: Mapping[int, float] | None = None,
        checkpoint: str | os.PathLike[str] | CheckpointManager | None = None,
        resume: bool = True,
        dataset: Data | None = None,
    ) -> History:
        """Train for several epochs.

        With `compile(loss="model")` an element holds the arguments of the module: a dict of keyword arguments,
        including labels, a tuple of arguments, or a single argument.

        Args:
            x: A dataset, batched by the global batch size; each epoch iterates it anew. Or arrays or tensors, one or a
                nest of them. Or a torch DataLoader with global batches: see `Dataset.from_torch`.
            y: Targets for arrays x; datasets contain their targets.
            batch_size: Rows of a global batch of arrays; None: 32.
            epochs: Number of the last epoch, >= 1, counted from 1.
            steps_per_epoch: Batches per epoch, >= 1; None: all batches. With a number the iterator continues from epoch
                to epoch; if it ends early, `fit` warns once and stops training.
            validation_data: Data to evaluate after epochs; the names of the results get the prefix "val_". A dataset or
                a DataLoader, or arrays (x, y), in batches of `batch_size`.
            callbacks: Callbacks, called in this order.
            verbose: Show progress: a bar in a terminal, one changing line in a notebook, plain lines in a log.
            shuffle: Shuffle arrays anew every epoch, with a seed that follows `torch.manual_seed`. Datasets and
                DataLoaders keep their own order.
            initial_epoch: Number of the first epoch, counted from 0, to continue after an earlier `fit`.
            validation_freq: Epochs between validations, or a container of the epochs to validate, counted from 1.
            validation_steps: Batches of a validation; None: all batches.
            class_weight: Weights of training rows by class number; other classes have weight 1. As with sample weights,
                the loss is sum(w * loss) / sum(w) of losses per row.
            checkpoint: A directory (or a URI that fsspec supports) for checkpoints: one after each epoch, and one on
                preemption; the last 3 are kept. Or a manager, which decides when to save and how many to keep, and
                whose checkpoint contains your objects; `fit` adds its own state as "fit".
            resume: Resume from the newest checkpoint if there is one: from the batch after the last one in the
                checkpoint, with the same result as an uninterrupted training, including history, metrics, callbacks and
                random numbers. With a checkpoint of the end of training, `fit` trains nothing, and warns.
            dataset: Former name of x.

        Returns:
            The history of the logs: `.history["loss"]` has one value per epoch.

        Raises:
            FailedPreconditionError: `compile` was not called.
            InvalidArgumentError: A dataset has no batch or never ends, a number is < 1, arguments are incompatible, or
                a DataLoader has a DistributedSampler; the message says what to write.
            SpecError: Elements are not (x, y) or (x, y, sample_weight).
            UnavailableError: A replica or the input pipeline is gone; the message names it.

        Blocking: returns when all steps are done. An error of user code is raised here, with its type.

        >>> import numpy as np, torch
        >>> x = np.arange(8, dtype=np.float32)[:, None]
        >>> data = rd.Dataset.from_tensor_slices((x, 2 * x)).batch(4)
        >>> with rd.OneDeviceStrategy("cpu").scope():
        ...     model = rd.Model(torch.nn.Linear(1, 1))
        ...     model.compile(torch.optim.SGD(model.parameters(), lr=0.01), torch.nn.MSELoss())
        >>> history = model.fit(data, epochs=2, validation_data=data, verbose=False)
        >>> sorted(history.history)
        ['loss', 'val_loss']

        Source: keras.Model.fit.
        """
        trainee = self._trainee()
        own_loss = trainee.compiled.loss is None
        data = GivenData(x, y, batch_size, dataset, own_loss=own_loss).distributed(self._strategy, shuffle=shuffle)
        weights = ClassWeights.parse(class_weight)
        plan = FitPlan(data, epochs, steps_per_epoch, initial_epoch, validation_freq, weights)
        require_at_least("validation_steps", validation_steps)
        validation = None if validation_data is None else held_out_data(validation_data, batch_size, own_loss=own_loss)
        held_out = None if validation is None else validation.distributed(self._strategy)
        history = History()
        params = {"epochs": epochs, "steps": plan.total()}
        hooks = CallbackList((*callbacks, history), self._whole(), params)
        hooks.call("_set_data", data)
        state = FitState((*callbacks, history), held_out)
        checkpoints = FitCheckpoints(trainee, self.checkpoint_objects(), data, state)
        if not self._module.training:
            self._module.train()
        with contextlib.ExitStack() as stack:
            view = stack.enter_context(open_view(*progress_stream(callbacks, verbose=verbose)))
            evaluation = Evaluation(trainee, hooks, Reporter(view))
            Fit(
                trainee,
                plan,
                model=self._whole(),
                callbacks=hooks,
                reporter=Reporter(view),
                validate=None if held_out is None else lambda label: evaluation.run(held_out, label, validation_steps),
                state=state,
                keepers=checkpoints.opened(checkpoint, callbacks, resume, stack),
            ).run()
        return history
