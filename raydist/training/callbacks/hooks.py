"""The hooks of callbacks: when each is called, and with what. Names and arguments are Keras's; here they do nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["PredictHooks", "TestHooks", "TrainHooks"]


class TrainHooks:
    """Around `fit`, its epochs and its batches."""

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """At the start of `fit`, before the first epoch.

        Args:
            logs: Empty.

        Source: keras.callbacks.Callback.on_train_begin.

        >>> class Count(rd.Callback):
        ...     def on_train_begin(self, logs):
        ...         self.num_epochs = 0  # a callback may serve several fits
        >>> callback = Count()
        """

    def on_train_end(self, logs: dict[str, Any]) -> None:
        """At the end of `fit`. Not called after an error.

        Args:
            logs: Those of the last epoch: see :meth:`on_epoch_end`; without what callbacks have added.

        Source: keras.callbacks.Callback.on_train_end.

        >>> class Save(rd.Callback):
        ...     def on_train_end(self, logs):
        ...         self.model.save("model.safetensors")
        >>> callback = Save()
        """

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any]) -> None:
        """Before the first batch of an epoch.

        Args:
            epoch: Its number, counted from 0.
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
        """After an epoch and its validation. All steps of the epoch are done.

        Args:
            epoch: Its number, counted from 0.
            logs: "loss", the metrics, and the same of the validation data with "val_" in front; empty for an epoch
                without data. What is added to it is seen by later callbacks and by the history.

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
        """Before an execution of training steps is dispatched.

        Args:
            batch: Number of its first batch in the epoch, counted from 0.
            logs: Empty.

        Source: keras.callbacks.Callback.on_train_batch_begin.

        >>> class Halt(rd.Callback):
        ...     def on_train_batch_begin(self, batch, logs):
        ...         self.model.stop_training = batch >= 100  # ends fit after this execution
        """
        self.on_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any]) -> None:
        """After an execution of training steps was dispatched; the steps may still be running.

        Args:
            batch: Number of its last batch in the epoch, counted from 0.
            logs: "loss" and metrics, means over the epoch so far. To look into them waits for the dispatched steps, and
                must be done in the hook: what was not read raises FailedPreconditionError later.

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
        """Another name of :meth:`on_train_batch_begin`.

        Args:
            batch: Number of its first batch in the epoch, counted from 0.
            logs: Empty.

        Source: keras.callbacks.Callback.on_batch_begin.

        >>> rd.Callback().on_train_batch_begin(0, {})  # calls it
        """

    def on_batch_end(self, batch: int, logs: Mapping[str, Any]) -> None:
        """Another name of :meth:`on_train_batch_end`.

        Args:
            batch: Number of its last batch in the epoch, counted from 0.
            logs: As there.

        Source: keras.callbacks.Callback.on_batch_end.

        >>> rd.Callback().on_train_batch_end(0, {})  # calls it
        """


class TestHooks:
    """Around `evaluate`, and the validation in `fit`."""

    def on_test_begin(self, logs: dict[str, Any]) -> None:
        """At the start of `evaluate`, and of each validation in `fit`.

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
        """At the end of `evaluate`, and of each validation in `fit`.

        Args:
            logs: Its results: "loss" and metrics, without "val_".

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
        """Before an execution of evaluation steps is dispatched.

        Args:
            batch: Number of its first batch in the pass, counted from 0.
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
        """After an execution of evaluation steps was dispatched; the steps may still be running.

        Args:
            batch: Number of its last batch in the pass, counted from 0.
            logs: "loss" and metrics, means over the pass so far; read as in :meth:`on_train_batch_end`.

        Source: keras.callbacks.Callback.on_test_batch_end.

        >>> class Watch(rd.Callback):
        ...     def on_test_batch_end(self, batch, logs):
        ...         if batch % 100 == 99:
        ...             print(batch, logs["loss"])
        >>> Watch().on_test_batch_end(99, {"loss": 0.25})
        99 0.25
        """


class PredictHooks:
    """Around `predict`."""

    def on_predict_begin(self, logs: dict[str, Any]) -> None:
        """At the start of `predict`.

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
        """At the end of `predict`, when all outputs are there.

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
        """Before a batch is dispatched in `predict`.

        Args:
            batch: Its number, counted from 0.
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
        """After a batch was dispatched in `predict`; it may still be running.

        Args:
            batch: Its number, counted from 0.
            logs: "outputs": its prediction, as `predict` returns it. To look into it waits for the batch.

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
