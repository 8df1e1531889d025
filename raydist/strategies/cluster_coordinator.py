"""Scheduling of functions on the workers of a `ParameterServerStrategy`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, final

from raydist.cluster.preemption import end_if_preempted
from raydist.coordinator.per_worker import PerWorkerDataset, PerWorkerValue
from raydist.coordinator.remote_value import RemoteValue, fetched
from raydist.core.errors import InvalidArgumentError
from raydist.core.exception_utils import folded
from raydist.dataset import Dataset
from raydist.options import InputOptions, RunOptions
from raydist.strategies.parameter_server import ParameterServerStrategy


@final
class ClusterCoordinator:
    """A scheduler of functions on workers. A strategy has one: the constructor returns the same object.

    A function runs on any free worker. Its effect on variables happens once, even if its worker dies and another worker
    runs the function again. The next call of `schedule`, `join`, `done` or `fetch` raises the first error of a
    function; functions that had not begun by then are cancelled, and must be scheduled again. A function that runs
    again reads from the per-worker iterator of its new worker.

    Args:
        strategy: The strategy whose workers run the functions.

    Raises:
        InvalidArgumentError: `strategy` is not a `ParameterServerStrategy`.

    Source: tf.distribute.coordinator.ClusterCoordinator.

    Example::

        coordinator = rd.ClusterCoordinator(strategy)
        losses = [coordinator.schedule(train_step, args=(batches,)) for _ in range(100)]
        coordinator.join()
        print(coordinator.fetch(losses[-1]))
    """

    _strategy: ParameterServerStrategy

    def __new__(cls, strategy: ParameterServerStrategy) -> ClusterCoordinator:
        """Return the coordinator of the strategy."""
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
        """The strategy whose workers run the functions.

        Source: tf.distribute.coordinator.ClusterCoordinator.strategy.
        """
        return self._strategy

    def schedule(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> RemoteValue:
        """Schedule `fn` to run once, on the next free worker.

        Blocks only while many functions wait already (256 * 1024; 32 if batches are among the arguments). Arguments are
        sent with their present values.

        Args:
            fn: The function: plain PyTorch, as for `strategy.run`.
            args: A tuple of positional arguments: also batches, per-worker values and iterators.
            kwargs: Keyword arguments.

        Returns:
            A RemoteValue of the function's result.

        Raises:
            InvalidArgumentError: `fn` can't be called, or a RemoteValue is among the arguments: fetch that first.
            FailedPreconditionError: The strategy is closed.
            Exception: The error of a function scheduled before; each error is raised once.

        Source: tf.distribute.coordinator.ClusterCoordinator.schedule.
        """
        if not callable(fn):
            raise InvalidArgumentError(
                f"schedule needs a function, got {fn!r:.80}. Give the function itself, and its arguments as args."
            )
        return self._strategy.run(fn, args, kwargs, RunOptions())

    @folded
    def join(self, timeout: float | None = None) -> None:
        """Wait until all scheduled functions have ended; under `rd.SyncWithBackups` an incomplete step is applied.

        Args:
            timeout: Longest wait in seconds. None: no limit as long as some function ends within `Timeouts.step_s`.

        Raises:
            DeadlineExceededError: The time is over; names the workers and their functions. Nothing is cancelled.
            Exception: The first error of a function; each error is raised once, and the strategy goes on.
            UnavailableError: No worker is left; or a server is gone: restore from a checkpoint.
            Preempted: The process must end: functions that began are in a checkpoint; the message counts the others.

        Source: tf.distribute.coordinator.ClusterCoordinator.join.
        """
        if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout < 0):
            raise InvalidArgumentError(f"timeout must be None or a number of seconds >= 0, got {timeout!r}.")
        coordinator = self._strategy.open_coordinator("wait for closures")
        if coordinator is not None:
            coordinator.wait_or_leave(timeout)
            end_if_preempted(before_draw=False)
            coordinator.join(timeout)

    def done(self) -> bool:
        """Return True if all scheduled functions have ended. Does not block.

        Raises:
            Exception: See `join`.

        Source: tf.distribute.coordinator.ClusterCoordinator.done.
        """
        coordinator = self._strategy.open_coordinator("be asked")
        return coordinator is None or coordinator.done()

    @folded
    def fetch(self, values: Any) -> Any:
        """Wait for results, and return them.

        Args:
            values: A nest of RemoteValue (lists count as nests); other values stay as they are.

        Returns:
            The nest with the value of each RemoteValue, tensors on the CPU.

        Raises:
            Exception: The error of a function, if it was not raised before; or the reason why a value is missing.

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
        """Make a dataset of which each worker reads its own copy, or its own part.

        Nothing is read before a scheduled function draws from an iterator of the dataset. The strategy's input pipeline
        makes the batches, and sends some at a time to a worker.

        Args:
            dataset: A dataset of batches; or a function that returns one, called here once for each worker with an
                InputContext, or without an argument if it takes none.
            sharding: None: every worker gets all of the dataset, as in TensorFlow (shuffle it differently for each).
                "static": each worker has its part: whole files of a dataset with `auto_shard_policy` FILE, else every
                N-th batch; for a function, its dataset for `InputContext(N, worker, 1)`. "dynamic": workers request
                batches of one dataset, so that each batch is used once; the batches of a worker that died go to others.
                Workers request batches ahead: one may reach the end (OutOfRangeError from `join`) while another worker
                still has the last batches, for functions that are scheduled later.
            options: Workers and buffers of the input pipeline.

        Returns:
            A PerWorkerDataset: `iter()` of it is an argument for `schedule`.

        Raises:
            InvalidArgumentError: `sharding` is none of these.
            SpecError: `dataset` is not a dataset, or the function does not return one.

        Source: tf.distribute.coordinator.ClusterCoordinator.create_per_worker_dataset.
        """
        return self._strategy.per_worker.dataset(dataset, sharding, options or InputOptions())

    def create_per_worker_values(self, fn: Callable[..., Any]) -> PerWorkerValue:
        """Make a value that each worker computes for itself when a function first uses it: an argument for `schedule`.

        Args:
            fn: Returns the value, on the worker; called with the worker's InputContext, or without an argument if it
                takes none. A worker that is restarted calls it again.

        Returns:
            A PerWorkerValue for the arguments of `schedule`.

        Raises:
            InvalidArgumentError: `fn` can't be called, or can't be pickled.

        Source: tf.distribute.coordinator.ClusterCoordinator.create_per_worker_values.
        """
        return self._strategy.per_worker.value(fn)
