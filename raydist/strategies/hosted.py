"""Base class of strategies whose steps and input pipelines run in actors."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
import uuid
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

from raydist.actors.epochs.input_pipeline_actors import InputPipelineActors
from raydist.actors.metric_counters import TrainingMetrics
from raydist.checkpoints.shards import DispatchedSave
from raydist.context.current import open_strategies
from raydist.context.strategy import Strategy, require_dataset
from raydist.core.exception_utils import collect_errors, folded, user_line
from raydist.core.values import InputContext, ReduceOp
from raydist.dataset import Dataset
from raydist.distributed_dataset import DistributedDataset, InputSide, distribute, distribute_from_function
from raydist.options import InputOptions, RunOptions, Timeouts
from raydist.replicas.function_calls import ReplicaView
from raydist.replicas.step_summaries import StepSummaries

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from raydist.actors.epochs.job import InputJob, MergedJob
    from raydist.actors.epochs.link import PipelineLink
    from raydist.actors.readers.driver_epoch import EpochOpener
    from raydist.mirroring.driver import MirrorDriver

_log = logging.getLogger("raydist")


@final
class WhenDropped:
    """Resources to close, newest first, if their owner is garbage collected without being closed.

    A finalizer runs on the thread that collects garbage, which may be the Ray thread that delivers all replies. If the
    finalizer waits there for a reply (as the removal of a placement group does), it waits for ever, and so does every
    other call of Ray in this process. Hence a new thread closes the resources.

    The resources must not refer to their owner.
    """

    def __init__(self, owner: object) -> None:
        self._closers: list[Callable[[], None]] = []
        self._finalizer = weakref.finalize(owner, _close_elsewhere, self._closers)

    def add(self, close: Callable[[], None]) -> None:
        """Add a function that closes one more resource."""
        self._closers.append(close)

    def forget(self) -> None:
        """Forget the resources, which are closed."""
        self._finalizer.detach()


def _close_elsewhere(closers: list[Callable[[], None]]) -> None:
    if not closers:
        return
    if not threading.main_thread().is_alive():  # the interpreter is ending: no thread can start any more
        _close(closers)
    else:
        threading.Thread(target=_close, args=(closers,), name="raydist-closes-dropped", daemon=False).start()


def _close(closers: list[Callable[[], None]]) -> None:
    with contextlib.ExitStack() as stack:
        for close in closers:
            stack.callback(close)


class HostedStrategy(Strategy):
    """Base class of strategies that start actors for their steps and input pipelines."""

    def __init__(self, kind: str, timeouts: Timeouts | None) -> None:
        super().__init__()
        self._name = f"{kind}-{uuid.uuid4().hex[:8]}"
        self._title = f"{type(self).__name__} made at {user_line()}, {time.strftime('%H:%M:%S')},"
        self._timeouts = timeouts or Timeouts()
        self._options = RunOptions(gradient_reduce_op=ReduceOp.MEAN)
        self._input_pipelines: InputPipelineActors | None = None
        self._pending_saves: list[DispatchedSave] = []
        self._summaries = StepSummaries(weakref.WeakMethod(self._await_steps), weakref.WeakMethod(self._until_now))
        self._metrics = TrainingMetrics(self._name)
        self._when_dropped = WhenDropped(self)

    @abstractmethod
    def _drain(self) -> None:
        """Wait for all dispatched steps; raise the first error."""

    @abstractmethod
    def _finish(self) -> None:
        """Wait for all dispatched steps and saves before closing, and collect the counts; raise the first error."""

    @abstractmethod
    def _release_variables(self, *, fetch: bool) -> None:
        """Make variables plain; with `fetch` they get their final values if possible."""

    @abstractmethod
    def _stop(self) -> None:
        """Stop the actors that run steps, if any were started."""

    @abstractmethod
    def _input_side(self) -> InputSide:
        """Return the input side of distributed datasets. May start the input host."""

    @abstractmethod
    def _num_readers(self) -> int:
        """Return how many actors read batches at the same time."""

    @abstractmethod
    def _first_node(self) -> str | None:
        """Return the node of the single input pipeline; None for any."""

    def _worker_nodes(self) -> Sequence[str | None]:
        """Return the node of each worker that has its own input pipeline. May wait for the placement."""
        return ()

    @final
    def _await_steps(self) -> None:
        if not self._closed:
            self._drain()

    def _until_now(self) -> Callable[[], None]:
        """Return a function that waits, in any thread, for the steps dispatched so far; it raises no errors."""
        return lambda: None

    @final
    def _set_gradient_reduce_op(self, options: RunOptions) -> None:
        self._options = options

    @final
    def _gradient_reduce_op(self, options: RunOptions) -> ReduceOp:
        """Return the reduction of gradients in a step with these options."""
        return options.gradient_reduce_op or self._options.gradient_reduce_op or ReduceOp.MEAN

    @final
    def _pipelines(self) -> InputPipelineActors:
        """Return the input pipelines, which may still be starting."""
        self._require_open("distribute a dataset")
        if self._input_pipelines is None:
            self._input_pipelines = InputPipelineActors(
                self._name,
                num_replicas=self._num_readers(),
                timeouts=self._timeouts,
                node_id=self._first_node(),
                # These outlive a strategy that is dropped: they must not keep the strategy alive.
                worker_nodes=functools.partial(_call_living, weakref.WeakMethod(self._worker_nodes)),
            )
            self._when_dropped.add(self._input_pipelines.close)
        self._input_pipelines.start()  # its process starts while the others do
        return self._input_pipelines

    @final
    def distribute_dataset(
        self, dataset: Dataset | DataLoader[Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        return distribute(require_dataset(dataset), self._open_input_side(), options or InputOptions())

    @final
    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Dataset], options: InputOptions | None = None
    ) -> DistributedDataset:
        def checked_fn(context: InputContext) -> Dataset:
            return require_dataset(dataset_fn(context))

        return distribute_from_function(checked_fn, self._open_input_side(), options or InputOptions())

    def _open_input_side(self) -> InputSide:
        side = self._input_side()
        return replace(side, opener=_OpenHost(side.opener, weakref.WeakMethod(self._require_open)))

    @final
    def _note_save(self, save: DispatchedSave) -> DispatchedSave:
        """Remember a save, so that closing the strategy waits for it."""
        self._pending_saves = [*(each for each in self._pending_saves if not each.is_done), save]
        return save

    @final
    def _await_saves(self) -> None:
        for save in self._pending_saves:
            with contextlib.suppress(Exception):  # the caller of the save gets the error
                save.wait()

    @final
    @folded
    def close(self) -> None:
        self._process.require("closed")
        if self._closed:
            return
        try:
            self._finish()
        finally:
            self._abort(fetch=True)

    @final
    def _abort(self, *, fetch: bool) -> None:
        if self._closed or not self._process.is_this:
            return
        with contextlib.ExitStack() as stack:
            stack.callback(self._stop)
            if self._input_pipelines is not None:
                stack.callback(self._input_pipelines.close)
            # Callbacks run in reverse order: the variables get their final values while the actors are alive.
            stack.callback(self._release_variables, fetch=fetch)
        self._when_dropped.forget()
        self._closed = True


def release_mirrored(
    mirror: MirrorDriver, name: str, holders: str, *, started: bool, answer: Callable[[], bool] = lambda: True
) -> None:
    """Make variables plain, with their final values if the actors that hold them answer; warn if newer values are lost.

    `name` is the strategy's, `holders` names the actors in the warning. Before actors are `started`, the driver has the
    values. `answer` returns False if the actors do not answer soon.
    """
    is_behind = started and mirror.is_behind
    if started and answer():
        with contextlib.suppress(Exception):  # an earlier error is on its way to the user
            mirror.release()
            is_behind = False
    if is_behind:
        _log.warning("Variables of %s keep values of before: %s are gone. Load your last checkpoint.", name, holders)
    mirror.release(fetch=False)


@final
@dataclass(frozen=True, slots=True)
class _OpenHost:
    """An opener of iterations that requires an open strategy: nothing would stop actors that are started later.

    It does not keep the strategy alive, because batches of steps that may run again refer to it.
    """

    host: EpochOpener
    require_open: weakref.WeakMethod[Callable[[str], None]]

    def open(self, job: InputJob | MergedJob) -> PipelineLink:
        """Begin an iteration."""
        require_open = self.require_open()
        if require_open is not None:
            require_open("read a distributed dataset")
        return self.host.open(job)


def _call_living(method: weakref.WeakMethod[Callable[[], Sequence[str | None]]]) -> Sequence[str | None]:
    found = method()
    return () if found is None else found()


def close_all() -> None:
    """Close every open strategy of this process.

    For notebooks, where a cell that runs again makes a strategy while the previous one still has its replicas. Blocks
    as `strategy.close()` of each strategy does; variables get their final values and are plain tensors afterwards.

    Raises:
        Exception: The first error of a step that was not raised before, once all strategies are closed.

    >>> strategy = rd.OneDeviceStrategy("cpu")
    >>> rd.close_all()
    >>> strategy.run(len, args=([1],))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    raydist.core.errors.FailedPreconditionError: This OneDeviceStrategy is closed and can't run a step. Make a new one.

    Source: raydist's own.
    """
    found = [each for each in open_strategies() if isinstance(each, Strategy) and not isinstance(each, ReplicaView)]
    collect_errors([each.close for each in found if each._process.is_this])
