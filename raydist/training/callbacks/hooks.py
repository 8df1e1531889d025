"""Hooks of callbacks: when each is called, and with which arguments. The names are Keras's; the defaults do nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class TrainHooks:
    """Hooks of `fit`, its epochs and its batches."""

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """Called at the start of `fit`, before the first epoch.

        Args:
            logs: Empty.

        Source: keras.callbacks.Callback.on_train_begin.

        >>> class Count(rd.Callback):
        ...     def on_train_begin(self, logs):
        ...         self.num_epochs = 0  # a callback may serve several fits
        >>> callback = Count()
        """

    def on_train_end(self, logs: dict[str, Any]) -> None:
        """Called at the end of `fit`. Not called after an error.

        Args:
            logs: Logs of the last epoch, see :meth:`on_epoch_end`; without values added by callbacks.

        Source: keras.callbacks.Callback.on_train_end.

        >>> class Save(rd.Callback):
        ...     def on_train_end(self, logs):
        ...         self.model.save("model.safetensors")
        >>> callback = Save()
        """

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any]) -> None:
        """Called before the first batch of an epoch.

        Args:
            epoch: Number of the epoch, counted from 0.
            logs: Empty.

        Source: keras.callbacks.Callback.on_epoch_begin.

        >>> class WarmUp(rd.Callback):
        ...     def __init__(self, optimizer):
        ...         self.optimizer = optimizer
        ...
        ...     def on_epoch_begin(self, epoch, logs):
        ...         self.optimizer.param_groups[0]["lr"] = min(0.1, 0.02 * (epoch + 1))
        """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Called after an epoch and its validation. All steps of the epoch are done.

        Args:
            epoch: Number of the epoch, counted from 0.
            logs: "loss", the metrics, and the same of the validation data with the prefix "val_"; empty for an epoch
                without data. Later callbacks and the history see values that a callback adds.

        Source: keras.callbacks.Callback.on_epoch_end.

        >>> class Gap(rd.Callback):
        ...     def on_epoch_end(self, epoch, logs):
        ...         logs["gap"] = logs["val_loss"] - logs["loss"]
        >>> logs = {"loss": 0.25, "val_loss": 0.75}
        >>> Gap().on_epoch_end(0, logs)
        >>> logs["gap"]
        0.5
        """

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any]) -> None:
        """Called before an execution of training steps is dispatched.

        Args:
            batch: Number of the execution's first batch in the epoch, counted from 0.
            logs: Empty.

        Source: keras.callbacks.Callback.on_train_batch_begin.

        >>> class Halt(rd.Callback):
        ...     def on_train_batch_begin(self, batch, logs):
        ...         self.model.stop_training = batch >= 100  # ends fit after this execution
        """
        self.on_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any]) -> None:
        """Called after an execution of training steps was dispatched; the steps may still be running.

        Args:
            batch: Number of the execution's last batch in the epoch, counted from 0.
            logs: "loss" and metrics, means over the epoch so far. Reading them blocks until the dispatched steps are
                done, and must happen in the hook: reading later raises FailedPreconditionError.

        Source: keras.callbacks.Callback.on_train_batch_end.

        >>> class Every100(rd.Callback):
        ...     def on_train_batch_end(self, batch, logs):
        ...         if batch % 100 == 99:
        ...             print(batch, logs["loss"])
        >>> Every100().on_train_batch_end(99, {"loss": 0.5})
        99 0.5
        """
        self.on_batch_end(batch, logs)

    def on_batch_begin(self, batch: int, logs: dict[str, Any]) -> None:
        """Alias of :meth:`on_train_batch_begin`.

        Args:
            batch: Number of the execution's first batch in the epoch, counted from 0.
            logs: Empty.

        Source: keras.callbacks.Callback.on_batch_begin.

        >>> rd.Callback().on_train_batch_begin(0, {})  # calls it
        """

    def on_batch_end(self, batch: int, logs: Mapping[str, Any]) -> None:
        """Alias of :meth:`on_train_batch_end`.

        Args:
            batch: Number of the execution's last batch in the epoch, counted from 0.
            logs: See :meth:`on_train_batch_end`.

        Source: keras.callbacks.Callback.on_batch_end.

        >>> rd.Callback().on_train_batch_end(0, {})  # calls it
        """


class TestHooks:
    """Hooks of `evaluate`, and of the validation in `fit`."""

    def on_test_begin(self, logs: dict[str, Any]) -> None:
        """Called at the start of `evaluate`, and of each validation in `fit`.

        Args:
            logs: Empty.

        Source: keras.callbacks.Callback.on_test_begin.

        >>> class Announce(rd.Callback):
        ...     def on_test_begin(self, logs):
        ...         print("evaluating")
        >>> Announce().on_test_begin({})
        evaluating
        """

    def on_test_end(self, logs: dict[str, Any]) -> None:
        """Called at the end of `evaluate`, and of each validation in `fit`.

        Args:
            logs: Results of the evaluation: "loss" and metrics, without the prefix "val_".

        Source: keras.callbacks.Callback.on_test_end.

        >>> class Best(rd.Callback):
        ...     best = float("inf")
        ...
        ...     def on_test_end(self, logs):
        ...         self.best = min(self.best, logs["loss"])
        >>> callback = Best()
        >>> callback.on_test_end({"loss": 0.5})
        >>> callback.best
        0.5
        """

    def on_test_batch_begin(self, batch: int, logs: dict[str, Any]) -> None:
        """Called before an execution of evaluation steps is dispatched.

        Args:
            batch: Number of the execution's first batch in the evaluation, counted from 0.
            logs: Empty.

        Source: keras.callbacks.Callback.on_test_batch_begin.

        >>> class First(rd.Callback):
        ...     def on_test_batch_begin(self, batch, logs):
        ...         if batch == 0:
        ...             print("the first batch is on its way")
        >>> First().on_test_batch_begin(0, {})
        the first batch is on its way
        """

    def on_test_batch_end(self, batch: int, logs: Mapping[str, Any]) -> None:
        """Called after an execution of evaluation steps was dispatched; the steps may still be running.

        Args:
            batch: Number of the execution's last batch in the evaluation, counted from 0.
            logs: "loss" and metrics, means over the evaluation so far; read as in :meth:`on_train_batch_end`.

        Source: keras.callbacks.Callback.on_test_batch_end.

        >>> class Watch(rd.Callback):
        ...     def on_test_batch_end(self, batch, logs):
        ...         if batch % 100 == 99:
        ...             print(batch, logs["loss"])
        >>> Watch().on_test_batch_end(99, {"loss": 0.25})
        99 0.25
        """


class PredictHooks:
    """Hooks of `predict`."""

    def on_predict_begin(self, logs: dict[str, Any]) -> None:
        """Called at the start of `predict`.

        Args:
            logs: Empty.

        Source: keras.callbacks.Callback.on_predict_begin.

        >>> import torch
        >>> class Announce(rd.Callback):
        ...     def on_predict_begin(self, logs):
        ...         print("predicting with", self.model.module)
        >>> model, data = rd.Model(torch.nn.Identity()), rd.Dataset.range(2).batch(2)
        >>> outputs = model.predict(data, callbacks=[Announce()], verbose=False)
        predicting with Identity()
        """

    def on_predict_end(self, logs: dict[str, Any]) -> None:
        """Called at the end of `predict`, when all outputs are computed.

        Args:
            logs: Empty.

        Source: keras.callbacks.Callback.on_predict_end.

        >>> class Done(rd.Callback):
        ...     def on_predict_end(self, logs):
        ...         print("all outputs are there")
        >>> Done().on_predict_end({})
        all outputs are there
        """

    def on_predict_batch_begin(self, batch: int, logs: dict[str, Any]) -> None:
        """Called before a batch is dispatched in `predict`.

        Args:
            batch: Number of the batch, counted from 0.
            logs: Empty.

        Source: keras.callbacks.Callback.on_predict_batch_begin.

        >>> import torch
        >>> class Number(rd.Callback):
        ...     def on_predict_batch_begin(self, batch, logs):
        ...         print("batch", batch)
        >>> model, data = rd.Model(torch.nn.Identity()), rd.Dataset.range(3).batch(2)
        >>> outputs = model.predict(data, callbacks=[Number()], verbose=False)
        batch 0
        batch 1
        """

    def on_predict_batch_end(self, batch: int, logs: Mapping[str, Any]) -> None:
        """Called after a batch was dispatched in `predict`; the batch may still be running.

        Args:
            batch: Number of the batch, counted from 0.
            logs: "outputs": the batch's prediction, as `predict` returns it. Reading it blocks for the batch.

        Source: keras.callbacks.Callback.on_predict_batch_end.

        >>> import torch
        >>> class Show(rd.Callback):
        ...     def on_predict_batch_end(self, batch, logs):
        ...         print(batch, logs["outputs"].tolist())
        >>> model = rd.Model(torch.nn.Identity())
        >>> outputs = model.predict(rd.Dataset.range(3).batch(2), callbacks=[Show()], verbose=False)
        0 [0, 1]
        1 [2]
        """
