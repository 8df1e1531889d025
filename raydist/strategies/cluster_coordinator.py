"""Scheduling functions on the workers of a `ParameterServerStrategy`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, final

from raydist.coordinator.per_worker import PerWorkerDataset, PerWorkerValue
from raydist.coordinator.remote_value import RemoteValue, fetched
from raydist.dataset import Dataset
from raydist.errors import InvalidArgumentError
from raydist.foreign_errors import folded
from raydist.options import InputOptions, RunOptions
from raydist.preemption.boundaries import leave
from raydist.strategies.parameter_server import ParameterServerStrategy

__all__ = ["ClusterCoordinator"]


@final
class ClusterCoordinator:
    """Schedules functions on workers, and waits for them. There is one for each strategy: asked again, the same.

    A function runs on any worker, when that is free, and its effect on variables happens once, also when a worker dies
    in it: then another one does it again. The first error of a function is raised by the next call of `schedule`,
    `join`, `done` or `fetch`; what had not begun by then is cancelled, and is to be scheduled again. What a function
    that is run again reads from a per-worker iterator is the iterator's of its new worker.

    Args:
        strategy: Whose workers they are.

    Raises:
        InvalidArgumentError: It is no `ParameterServerStrategy`.

    Source: tf.distribute.coordinator.ClusterCoordinator.

    Example::

        coordinator = rd.ClusterCoordinator(strategy)
        losses = [coordinator.schedule(train_step, args=(batches,)) for _ in range(100)]
        coordinator.join()
        print(coordinator.fetch(losses[-1]))
    """

    _strategy: ParameterServerStrategy

    def __new__(cls, strategy: ParameterServerStrategy) -> ClusterCoordinator:
        """The strategy's coordinator."""
        if not isinstance(strategy, ParameterServerStrategy):
            raise InvalidArgumentError(
                f"A ClusterCoordinator needs an rd.ParameterServerStrategy, got {type(strategy).__name__}. Under other "
                "strategies use strategy.run."
            )
        found = strategy.attached.get(cls)
        if found is None:
            found = strategy.attached[cls] = super().__new__(cls)
            found._strategy = strategy
        coordinator: ClusterCoordinator = found
        return coordinator

    @property
    def strategy(self) -> ParameterServerStrategy:
        """The strategy.

        Source: tf.distribute.coordinator.ClusterCoordinator.strategy.
        """
        return self._strategy

    def schedule(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> RemoteValue:
        """Have `fn` run once, on the next worker that is free.

        Blocks only while many wait already (256 * 1024; 32 where batches are among the arguments). Arguments are what
        they are now.

        Args:
            fn: The function: plain PyTorch, as for `strategy.run`.
            args: A tuple of its positional arguments: also batches, per-worker values and iterators.
            kwargs: Its named arguments.

        Returns:
            What it will have returned.

        Raises:
            InvalidArgumentError: `fn` can't be called, or a RemoteValue is among the arguments: fetch that first.
            FailedPreconditionError: The strategy is closed.
            Exception: What a function raised that was scheduled before; the error is told once.

        Source: tf.distribute.coordinator.ClusterCoordinator.schedule.
        """
        if not callable(fn):
            raise InvalidArgumentError(
                f"schedule needs a function, got {fn!r:.80}. Give the function itself, and its arguments as args."
            )
        return self._strategy.run(fn, args, kwargs, RunOptions())

    @folded
    def join(self, timeout: float | None = None) -> None:
        """Wait until all that was scheduled has ended; under `rd.SyncWithBackups` an incomplete step is applied.

        Args:
            timeout: How many seconds at most. None: as long as something ends within `Timeouts.step_s`.

        Raises:
            DeadlineExceededError: Something has not ended in time; says who is at work on what. Nothing is cancelled.
            Exception: The first error that a function raised; the error is told once, and all goes on.
            UnavailableError: No worker is left; or a server is gone: restore from a checkpoint.
            Preempted: The process is to end: what has begun is in a checkpoint; how much has not, is said.

        Source: tf.distribute.coordinator.ClusterCoordinator.join.
        """
        if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout < 0):
            raise InvalidArgumentError(f"timeout must be None or a number of seconds >= 0, got {timeout!r}.")
        coordinator = self._strategy.open_coordinator("wait for closures")
        if coordinator is not None:
            coordinator.wait_or_leave(timeout)
            leave(before_draw=False)
            coordinator.join(timeout)

    def done(self) -> bool:
        """Whether all that was scheduled has ended. Does not wait.

        Raises:
            Exception: As `join`.

        Source: tf.distribute.coordinator.ClusterCoordinator.done.
        """
        coordinator = self._strategy.open_coordinator("be asked")
        return coordinator is None or coordinator.done()

    @folded
    def fetch(self, values: Any) -> Any:
        """Wait for results, and get them.

        Args:
            values: A nest of RemoteValue (lists count), and of anything else, which stays as it is.

        Returns:
            The nest with the value of each, tensors on the CPU.

        Raises:
            Exception: Of a function that failed, not told before; or why a value is not there.

        Source: tf.distribute.coordinator.ClusterCoordinator.fetch.
        """
        coordinator = self._strategy.open_coordinator("fetch")
        if coordinator is not None:
            coordinator.raise_error()
        return fetched(values)

    def create_per_worker_dataset(
        self,
        dataset: Dataset | Callable[..., Dataset],
        sharding: Literal["static", "dynamic"] | None = None,
        options: InputOptions | None = None,
    ) -> PerWorkerDataset:
        """A dataset of which each worker reads its own copy, or its own part.

        Nothing is read before a function that was scheduled draws from an iterator of it; batches are made on the
        strategy's input pipeline, and travel to a worker some at a time.

        Args:
            dataset: A dataset of batches; or a function that makes it, called here once for each worker with an
                InputContext, or without an argument if it takes none.
            sharding: None: every worker gets all of it, as in TensorFlow (shuffle it differently for each). "static":
                each worker has its part: of a dataset whole files where its `auto_shard_policy` is FILE, else every
                N-th batch; of a function what that makes of `InputContext(N, worker, 1)`. "dynamic": one dataset, of
                which each worker is given some batches when it asks for them, so that each batch is used once; what a
                worker had that died is given to others. Workers ask ahead: one may come to the end (OutOfRangeError
                from `join`) while the last batches lie with another, for functions that are scheduled after that.
            options: Workers and buffers of the input pipeline.

        Returns:
            A PerWorkerDataset: `iter()` of it is an argument for `schedule`.

        Raises:
            InvalidArgumentError: Another sharding.
            SpecError: It is no dataset, or the function gives none.

        Source: tf.distribute.coordinator.ClusterCoordinator.create_per_worker_dataset.
        """
        return self._strategy.per_worker.dataset(dataset, sharding, options or InputOptions())

    def create_per_worker_values(self, fn: Callable[..., Any]) -> PerWorkerValue:
        """A value that each worker makes for itself, when a function first uses it: an argument for `schedule`.

        Args:
            fn: Makes it, on the worker; called with an InputContext that says which, or without an argument if it takes
                none. A worker that is started again makes it again.

        Returns:
            What stands for it in the arguments of `schedule`.

        Raises:
            InvalidArgumentError: `fn` can't be called, or not be pickled.

        Source: tf.distribute.coordinator.ClusterCoordinator.create_per_worker_values.
        """
        return self._strategy.per_worker.value(fn)
