"""Hyperparameter tuning by Ray Tune: trials that train on a strategy, and the callback that reports a `fit` to Tune.

Needs the extra `raydist[tune]`, which is `ray[tune]`.
"""

from __future__ import annotations

import importlib
import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

from raydist.cluster.nodes import connect
from raydist.core.errors import DeadlineExceededError, FailedPreconditionError, InvalidArgumentError
from raydist.core.optional_packages import optional_module
from raydist.strategies.one_node import MirroredStrategy
from raydist.training.callbacks.callback import Callback

if TYPE_CHECKING:
    from raydist.checkpoints.checkpoint import Checkpoint

__all__ = ["trainable"]

_STATE = "fit"  # name of raydist's checkpoint in the directory of Tune's
_CLOSE_S = 120.0  # a strategy closes within Timeouts.close_s, 10 s by default; Tune itself kills a trial after 600 s


def trainable(
    train_fn: Callable[[dict[str, Any], Any], Any],
    *,
    strategy: Callable[..., Any] = MirroredStrategy,
    num_replicas: int = 1,
    resources_per_replica: Mapping[str, float] | None = None,
    num_input_workers: int = 0,
    resources_per_input_worker: Mapping[str, float] | None = None,
    driver_resources: Mapping[str, float] | None = None,
    placement_strategy: str = "STRICT_PACK",
) -> Any:
    """Return a trainable for `ray.tune.Tuner` whose trials train on a strategy. Starts nothing.

    A trial is an actor that makes its strategy and calls `train_fn`. The trial's placement group has a bundle for this
    actor, one for each replica, and one for each input worker: Tune starts a trial when all of them are free. When the
    trial ends, by its own, by an error, or because Tune stops it, the strategy is closed before Tune ends the actor.

    Args:
        train_fn: Called as `train_fn(config, strategy)`, with the trial's hyperparameters. It reports by
            `rd.TuneReportCallback` or `ray.tune.report`; Tune also reports a number or a dict that it returns.
        strategy: Called as `strategy(num_replicas)`, and with `resources_per_replica=` if you give these; returns a
            strategy: a class, or `lambda n, **options: rd.MultiWorkerMirroredStrategy(n, 1, **options)`.
        num_replicas: Number of replicas of a trial, >= 1.
        resources_per_replica: Ray resources of one replica. Default: those of the strategies, a GPU each if a node has
            GPUs, else 1 CPU each.
        num_input_workers: Number of bundles for input workers, >= 0. The workers use these if the input asks for them:
            `rd.InputOptions(num_input_workers=..., resources_per_input_worker=...)`.
        resources_per_input_worker: Ray resources of one input worker. Default: 1 CPU.
        driver_resources: Ray resources of the actor. Default: 1 CPU.
        placement_strategy: Ray's placement strategy of the group. The default places a trial on one node, as
            `rd.MirroredStrategy` needs.

    Returns:
        A class for `ray.tune.Tuner(...)`.

    Raises:
        InvalidArgumentError: A number is too small, or `train_fn` or `strategy` is not a function.
        FailedPreconditionError: Ray Tune cannot be imported.

    Source: ray.tune.with_resources.

    >>> def train(config, strategy):
    ...     return {"loss": config["lr"] * strategy.num_replicas_in_sync}
    >>> trial = rd.tune.trainable(train, num_replicas=2, resources_per_replica={"CPU": 2})
    >>> trial.default_resource_request({}).bundles
    [{'CPU': 1.0}, {'CPU': 2.0}, {'CPU': 2.0}]
    """
    for name, number, least in (("num_replicas", num_replicas, 1), ("num_input_workers", num_input_workers, 0)):
        if type(number) is not int or number < least:
            raise InvalidArgumentError(f"{name} must be an integer >= {least}, got {number!r:.80}.")
    for name, function in (("train_fn", train_fn), ("strategy", strategy)):
        if not callable(function):
            raise InvalidArgumentError(f"{name} must be a function, got {function!r:.80}.")
    tune = _ray_tune()
    options = {} if resources_per_replica is None else {"resources_per_replica": dict(resources_per_replica)}

    def run(config: dict[str, Any]) -> Any:
        with strategy(num_replicas, **options) as made:
            return train_fn(config, made)

    def resources(_: Any) -> Any:
        replica = dict(resources_per_replica or _default_resources())
        worker = dict(resources_per_input_worker or {"CPU": 1.0})
        driver = {"CPU": 1.0} if driver_resources is None else dict(driver_resources)
        bundles = [driver, *[replica] * num_replicas, *[worker] * num_input_workers]
        return tune.PlacementGroupFactory(bundles, strategy=placement_strategy)

    return _trial_class(run, resources, getattr(train_fn, "__name__", "train_fn"))


def _trial_class(run: Callable[[dict[str, Any]], Any], resources: Callable[[Any], Any], name: str) -> Any:
    """Return Tune's class for a function, with an end that waits until the function has closed what it uses.

    Tune stops a function at its next report, by a SystemExit in its thread. Tune's own class does not wait for the
    thread, so that the process would end while the strategy is closing.
    """
    wrap = importlib.import_module("ray.tune.trainable.function_trainable").wrap_function
    running = _Running(run)

    def train(config: dict[str, Any]) -> Any:
        return running.run(config)

    base = wrap(train, name=name)

    class Trial(base):  # type: ignore[misc, valid-type]  # Ray makes the base at run time
        """A trial of Ray Tune."""

        def cleanup(self) -> None:
            """Stop the function, and wait until its strategy is closed."""
            try:
                super().cleanup()
            finally:
                running.wait(_CLOSE_S)

        def reset_config(self, new_config: dict[str, Any]) -> bool:
            """Stop the function, so that another trial may use the actor."""
            if not super().reset_config(new_config):  # Tune's limit is 2 s
                running.wait(_CLOSE_S)
                if not super().reset_config(new_config):
                    raise DeadlineExceededError(
                        f"The strategy of a trial must be closed within {_CLOSE_S:g} s before another trial may use "
                        "its actor, and was not. Set reuse_actors=False."
                    )
            return True

        @classmethod
        def default_resource_request(cls, config: dict[str, Any]) -> Any:
            """Return the bundles of a trial's placement group."""
            return resources(config)

    Trial.__name__ = Trial.__qualname__ = name
    return Trial


@final
class _Running:
    """A function, and the thread that runs it in the process of a trial."""

    def __init__(self, run: Callable[[dict[str, Any]], Any]) -> None:
        self._run = run
        self._thread: threading.Thread | None = None

    def run(self, config: dict[str, Any]) -> Any:
        self._thread = threading.current_thread()
        return self._run(config)

    def wait(self, limit_s: float) -> None:
        if self._thread is not None:
            self._thread.join(limit_s)


@final
class TuneReportCallback(Callback):
    """A callback that reports a `fit` in a trial of Ray Tune: its logs, and a checkpoint from which `fit` resumes.

    A `fit` with this callback begins with the checkpoint that Tune gives to the trial, if there is one: after a failure
    its own last one, under population based training that of another trial. It restores weights, optimizer, metrics,
    callbacks, history and the position in the data. Reports follow all callbacks, wherever this one is in the list.

    Restoring the optimizer also restores its learning rate. If the rate is tuned by population based training, set it
    each epoch: `rd.LearningRateScheduler(lambda epoch, rate: config["lr"])`.

    Args:
        metrics: Names of the logs to report, or reported names with the names of their logs. Default: all logs that are
            numbers.
        report_freq: "epoch": report after every epoch. A number: report after that many batches instead.
        save_checkpoints: Save a checkpoint with each report.

    Raises:
        InvalidArgumentError: `report_freq` is invalid; (in `fit`) a log does not exist.
        FailedPreconditionError: (in `fit`) this process runs no trial, or Ray Tune cannot be imported.

    Source: ray.tune.integration.keras.TuneReportCheckpointCallback.

    >>> callback = rd.TuneReportCallback({"accuracy": "val_multiclass_accuracy"}, report_freq=100)
    """

    def __init__(
        self,
        metrics: Sequence[str] | Mapping[str, str] | None = None,
        report_freq: int | str = "epoch",
        save_checkpoints: bool = True,
    ) -> None:
        if not (report_freq == "epoch" or (type(report_freq) is int and report_freq >= 1)):
            raise InvalidArgumentError(
                f'report_freq must be "epoch" or a number of batches >= 1, got {report_freq!r:.80}.'
            )
        names = [metrics] if isinstance(metrics, str) else metrics
        self._names = None if names is None else dict(names if isinstance(names, Mapping) else zip(names, names))  # noqa: B905
        self._every = report_freq if type(report_freq) is int else None
        self._saves = save_checkpoints
        self._reports: _Reports | None = None

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any]) -> None:
        """Copy the logs if a report is due, which follows all callbacks."""
        if self._reports is not None:
            self._reports.keep_if_due(logs)

    def _saver(self, new_checkpoint: Callable[[], Checkpoint], state: Any) -> _Reports:
        self._reports = _Reports(self, new_checkpoint(), lambda: state.drawn)
        return self._reports

    def _chosen(self, logs: Mapping[str, Any]) -> dict[str, float]:
        numbers = {name: value for name, value in logs.items() if isinstance(value, int | float)}
        if self._names is None:
            return numbers
        missing = sorted(set(self._names.values()) - set(numbers))
        if missing:
            raise InvalidArgumentError(
                f"metrics must name numbers that fit logs, which are {sorted(numbers)}, got {missing}. Correct the "
                "names; those that begin with val_ need validation_data, and an epoch with a validation."
            )
        return {reported: numbers[name] for reported, name in self._names.items()}


@final
class _Reports:
    """The reports of one `fit`, and the checkpoint from which it resumes."""

    def __init__(self, callback: TuneReportCallback, checkpoint: Checkpoint, batches: Callable[[], int]) -> None:
        self._callback = callback
        self._checkpoint = checkpoint
        self._batches = batches
        self._reported = 0
        self._due: dict[str, float] | None = None
        self._tune = _ray_tune()

    def restore(self) -> str | None:
        """Restore the trial's checkpoint; return its path, or None if there is none. May be called again."""
        _require_trial()
        found = self._tune.get_checkpoint()
        if found is None:
            return None
        with found.as_directory() as directory:
            self._checkpoint.restore(os.path.join(directory, _STATE))
        self._reported = self._batches()
        return str(found.path)

    def keep_if_due(self, logs: Mapping[str, Any]) -> None:
        """Copy the logs of a batch if enough batches have passed; reading them waits for the batch's step."""
        every = self._callback._every
        if every is not None and self._batches() - self._reported >= every:
            self._reported = self._batches()
            self._due = self._callback._chosen(logs)

    def after_execution(self) -> None:
        """Report the logs that were copied."""
        if self._due is not None:
            metrics, self._due = self._due, None
            self._report(metrics)

    def after_epoch(self, logs: Mapping[str, Any]) -> None:
        """Report an epoch, unless batches are counted."""
        if self._callback._every is None and logs:
            self._report(self._callback._chosen(logs))

    def finish(self) -> None:
        """Do nothing: the checkpoints are Tune's."""

    def _report(self, metrics: dict[str, float]) -> None:
        """Report to Tune, which keeps a copy of the checkpoint. Blocks until Tune lets the trial go on, or ends it."""
        if not self._callback._saves:
            self._tune.report(metrics)
            return
        with tempfile.TemporaryDirectory(prefix="raydist-tune-") as directory:
            self._checkpoint.save(os.path.join(directory, _STATE))
            self._tune.report(metrics, checkpoint=self._tune.Checkpoint.from_directory(directory))


def _require_trial() -> None:
    """Raise FailedPreconditionError unless this process runs a trial."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray warns where there is no trial
        trial_id = _ray_tune().get_context().get_trial_id()
    if trial_id is None:
        raise FailedPreconditionError(
            "rd.TuneReportCallback reports to a trial of Ray Tune, and this process runs none. Call fit in the "
            "function that you give to rd.tune.trainable, or leave the callback out."
        )


def _default_resources() -> dict[str, float]:
    """Return what a strategy asks for a replica by default."""
    cluster = connect()
    return cluster.replica_resources("GPU" if cluster.best_node().num_gpus else "CPU")


def _ray_tune() -> Any:
    return optional_module("ray.tune", "Trials of Ray Tune", "'raydist[tune]'")
