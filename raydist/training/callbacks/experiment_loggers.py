"""Callbacks that write the logs of `fit` to experiment trackers: Weights & Biases and MLflow.

A training that resumes from a checkpoint continues the tracker's run: the callback's state has a key of the run.
"""

from __future__ import annotations

import uuid
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, final

from raydist.core.errors import InvalidArgumentError
from raydist.core.optional_packages import optional_module
from raydist.training.callbacks.callback import Callback
from raydist.training.callbacks.learning_rates import rates_of

_KEY = "raydist_key"


class ExperimentLogger(Callback):
    """A base of callbacks that write logs to one run of an experiment tracker.

    The first log opens the run. The run's key is drawn here and kept in checkpoints, so that a training that resumes
    finds its run.

    Args:
        update_freq: "epoch"; or a number of global steps, after which the logs so far are written as `batch/loss` and
            so on. Reading the logs blocks until the dispatched steps are done.

    Raises:
        InvalidArgumentError: `update_freq` is invalid.
    """

    def __init__(self, update_freq: str | int) -> None:
        if not (update_freq == "epoch" or (type(update_freq) is int and update_freq > 0)):
            raise InvalidArgumentError(f'update_freq must be "epoch" or a number of steps >= 1, got {update_freq!r}.')
        self._every = update_freq if isinstance(update_freq, int) else 0
        self._key = uuid.uuid4().hex[:12]
        self._run_id: str | None = None  # None while no run is open
        self._train_step = self._epoch_began_at = 0

    @property
    def run_id(self) -> str | None:
        """The id of the tracker's run; None while no run is open."""
        return self._run_id

    @abstractmethod
    def _open(self, key: str) -> str:
        """Open the run of this key, or make one; return the tracker's id of the run."""

    @abstractmethod
    def _log(self, values: Mapping[str, float], step: int) -> None:
        """Write values at a global step to the open run."""

    @abstractmethod
    def _close(self) -> None:
        """End the open run."""

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any]) -> None:
        """Record the global step at which the epoch begins."""
        self._epoch_began_at = self._train_step = self._global_step()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any]) -> None:
        """Write the logs so far if `update_freq` asks for it."""
        before, self._train_step = self._train_step, self._epoch_began_at + batch + 1
        if self._every and before // self._every < self._train_step // self._every:
            self._write({f"batch/{name}": value for name, value in logs.items()}, self._train_step)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Write the logs of an epoch, with the learning rate."""
        if logs:
            rate = rates_of(self.model.optimizer)[0]
            self._write({"epoch": epoch, "learning_rate": rate, **logs}, self._global_step())

    def on_train_end(self, logs: dict[str, Any]) -> None:
        """End the run."""
        if self._run_id is not None:
            self._close()
            self._run_id = None

    def state_dict(self) -> dict[str, Any]:
        """Return the run's key, and the step at which the epoch began."""
        return {"key": self._key, "epoch_began_at": self._epoch_began_at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the run of a checkpoint."""
        self._key = state["key"]
        self._epoch_began_at = self._train_step = state["epoch_began_at"]

    def _write(self, logs: Mapping[str, Any], step: int) -> None:
        if self._run_id is None:
            self._run_id = self._open(self._key)
        self._log({name: float(value) for name, value in logs.items() if isinstance(value, int | float)}, step)

    def _global_step(self) -> int:
        return int(self.model.strategy._make_counter().value)


@final
class WandbLogger(ExperimentLogger):
    """A callback that writes the logs of `fit` to a run of Weights & Biases.

    Each log carries `global_step`, which is the x axis of all charts. A training that resumes from a checkpoint
    continues the run. The driver alone writes; values are those of all replicas. Needs the extra `raydist[wandb]`.

    Args:
        project: The project; None: wandb's default.
        name: Name of the run; None: wandb draws one.
        config: Hyperparameters that the run shows.
        update_freq: "epoch"; or a number of global steps, after which the logs so far are written as `batch/loss` and
            so on. Reading the logs blocks until the dispatched steps are done.
        **init: Further arguments of `wandb.init`, such as `tags`, `group`, `mode="offline"`.

    Raises:
        FailedPreconditionError: (in `fit`) wandb is not installed.
        InvalidArgumentError: `update_freq` is invalid.

    Source: lightning.pytorch.loggers.WandbLogger and wandb's own WandbMetricsLogger.

    >>> rd.WandbLogger("digits", config={"lr": 0.1}, update_freq=100).run_id is None
    True
    """

    def __init__(
        self,
        project: str | None = None,
        *,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        update_freq: str | int = "epoch",
        **init: Any,
    ) -> None:
        super().__init__(update_freq)
        self._arguments = {"project": project, "name": name, "config": dict(config or {}), **init}
        self._run: Any = None

    def _open(self, key: str) -> str:
        self._run = optional_module("wandb", "Loggers", "'raydist[wandb]'").init(
            id=key, resume="allow", **self._arguments
        )
        self._run.define_metric("*", step_metric="global_step")
        return key

    def _log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "global_step": step})

    def _close(self) -> None:
        self._run.finish()


@final
class MLflowLogger(ExperimentLogger):
    """A callback that writes the logs of `fit` to a run of MLflow.

    The step of each metric is the global step. A training that resumes from a checkpoint continues the run. The driver
    alone writes; values are those of all replicas. Needs the extra `raydist[mlflow]`, or mlflow itself.

    Args:
        experiment: Name of the experiment; None: MLflow's default.
        run_name: Name of the run; None: MLflow draws one.
        params: Parameters that the run shows.
        tracking_uri: Address of the tracking server, or a file: "sqlite:///runs.db"; None: MLflow's setting.
        update_freq: "epoch"; or a number of global steps, after which the logs so far are written as `batch/loss` and
            so on. Reading the logs blocks until the dispatched steps are done.

    Raises:
        FailedPreconditionError: (in `fit`) mlflow is not installed.
        InvalidArgumentError: `update_freq` is invalid.

    Source: lightning.pytorch.loggers.MLFlowLogger.

    >>> rd.MLflowLogger("digits", params={"lr": 0.1}).run_id is None
    True
    """

    def __init__(
        self,
        experiment: str | None = None,
        *,
        run_name: str | None = None,
        params: Mapping[str, Any] | None = None,
        tracking_uri: str | None = None,
        update_freq: str | int = "epoch",
    ) -> None:
        super().__init__(update_freq)
        self._experiment = experiment
        self._run_name = run_name
        self._params = dict(params or {})
        self._tracking_uri = tracking_uri
        self._client: Any = None

    def _open(self, key: str) -> str:
        self._client = optional_module("mlflow", "Loggers", "'raydist[mlflow]'").MlflowClient(
            tracking_uri=self._tracking_uri
        )
        experiment = self._experiment_id()
        found = self._client.search_runs([experiment], filter_string=f"tags.{_KEY} = '{key}'", max_results=1)
        if found:
            self._client.update_run(found[0].info.run_id, status="RUNNING")
        run = found[0] if found else self._client.create_run(experiment, run_name=self._run_name, tags={_KEY: key})
        run_id: str = run.info.run_id
        if not found:
            for name, value in self._params.items():
                self._client.log_param(run_id, name, value)
        return run_id

    def _experiment_id(self) -> str:
        if self._experiment is None:
            return "0"
        found = self._client.get_experiment_by_name(self._experiment)
        made: str = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
        return made

    def _log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run_id, name, value, step=step)

    def _close(self) -> None:
        self._client.set_terminated(self._run_id)
