"""The context of a step function: its replica, and collectives with the other replicas."""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import torch

from raydist.collectives.differentiable import promote, require_axis
from raydist.collectives.reducer.reducer import GradientReducer
from raydist.context.current import current
from raydist.context.strategy import Strategy
from raydist.context.strategy_values import require_int, tensor_of
from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.core.nest import map_structure
from raydist.core.values import ReduceOp
from raydist.options import CommunicationOptions


@final
class ReplicaContext:
    """A step function's view of its replica and of the other replicas.

    A step gets it from `rd.get_replica_context()`; the class is not meant to be instantiated.

    Args:
        strategy: The strategy that runs the replica.
        peers: The other replicas, as seen from this one.

    Source: tf.distribute.ReplicaContext.

    >>> def step():
    ...     context = rd.get_replica_context()
    ...     return context.replica_id_in_sync_group, context.num_replicas_in_sync
    >>> rd.OneDeviceStrategy("cpu").run(step)
    (0, 1)
    """

    def __init__(self, strategy: Strategy, peers: Peers) -> None:
        self._strategy = strategy
        self._peers = peers

    @property
    def replica_id_in_sync_group(self) -> int:
        """Rank of this replica, 0 .. num_replicas_in_sync - 1.

        >>> rd.get_replica_context().replica_id_in_sync_group  # outside of `run`: the only replica
        0
        """
        return self._peers.rank

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas that reduce their gradients in one step.

        >>> rd.get_replica_context().num_replicas_in_sync  # outside of `run`: the only replica
        1
        """
        return self._peers.world_size

    @property
    def strategy(self) -> Strategy:
        """The strategy that runs this replica.

        Numbers and arithmetic (`reduce`, `gather`, `local_results`) work in a step; methods for the driver (`scope`,
        `run`, `distribute_dataset`, ...) raise FailedPreconditionError there.

        >>> rd.get_replica_context().strategy.worker_devices
        ('CPU:0',)
        """
        return self._strategy

    @property
    def device(self) -> torch.device:
        """Device of this replica, as a `torch.device` of its own process ("cuda:0" on every GPU replica).

        >>> rd.get_replica_context().device
        device(type='cpu')
        """
        return self._peers.device

    @property
    def device_mesh(self) -> Any:
        """The `torch.distributed.device_mesh.DeviceMesh` of replicas that divide modules.

        Under ShardedStrategy, MeshStrategy and PipelineStrategy.

        Raises:
            FailedPreconditionError: The strategy does not divide modules.

        Example::

            def step(batch):
                rank = rd.get_replica_context().device_mesh.get_local_rank("tensor")
        """
        if self._peers.device_mesh is None:
            raise FailedPreconditionError(
                "There is a device mesh under ShardedStrategy, MeshStrategy and PipelineStrategy, whose replicas "
                "divide modules; this step runs under another strategy."
            )
        return self._peers.device_mesh

    def pipeline_step(self, batch: Any, loss_fn: Callable[..., Any], model: torch.nn.Module | None = None) -> Any:
        """Run the forward and backward passes of a module that is divided into stages, under `rd.PipelineStrategy`.

        The batch is cut into microbatches. The gradients are those of the mean loss over the global batch; they are
        added to `.grad`. Under `torch.no_grad()` only forward passes run. Blocks until all stages are done, so all
        replicas must call it (limit: `Timeouts.collective_s` for each message).

        Args:
            batch: The pair (inputs, targets) with this replica's rows; the rows come first in all of its tensors. A
                tuple of inputs is the module's positional arguments, a dict its keyword arguments.
            loss_fn: Called as `loss_fn(outputs, targets)` for each microbatch, in the last stage only. Returns the
                mean loss of the rows: a tensor without dimensions; or a pair of it and a nest of tensors.
            model: The module, made in the strategy's scope. Default: the only one.

        Returns:
            The mean loss of this replica's rows, detached; or the pair of it and the nest, with the rows of all
            microbatches in each tensor, and the mean over microbatches of tensors without dimensions. The same on the
            replicas of all stages: update metrics with it, not in `loss_fn`.

        Raises:
            FailedPreconditionError: The strategy has no stages, or there are several modules and no `model`.
            InvalidArgumentError: Shapes of `batch`, or the result of `loss_fn`, are not as above; or the module cannot
                be divided so: see `rd.PipelineStrategy`.

        Source: torch.distributed.pipelining.

        Example::

            def step(batch):
                optimizer.zero_grad()
                loss = rd.get_replica_context().pipeline_step(batch, F.cross_entropy)
                rd.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                return loss
        """
        if self._peers.pipelines is None:
            raise FailedPreconditionError(
                "pipeline_step runs the stages of PipelineStrategy, but this step runs under another strategy. Call "
                "the module, and backward()."
            )
        return self._peers.pipelines.step(batch, loss_fn, model)

    @property
    def num_rows(self) -> int | None:
        """Rows of this replica's piece of the current distributed batch; None without a batch.

        A replica with 0 rows runs on padding rows, and its results do not count.

        >>> strategy = rd.OneDeviceStrategy("cpu")
        >>> batches = strategy.distribute_dataset(rd.Dataset.range(5).batch(3))
        >>> [strategy.run(lambda batch: rd.get_replica_context().num_rows, args=(batch,)) for batch in batches]
        [3, 2]
        """
        rows = self._peers.rows
        return None if rows is None else rows[self._peers.rank]

    @property
    def global_num_rows(self) -> int | None:
        """Rows of the current distributed batch on all replicas; None without a batch.

        >>> strategy = rd.OneDeviceStrategy("cpu")
        >>> batches = strategy.distribute_dataset(rd.Dataset.range(5).batch(3))
        >>> [strategy.run(lambda batch: rd.get_replica_context().global_num_rows, args=(batch,)) for batch in batches]
        [3, 2]
        """
        rows = self._peers.rows
        return None if rows is None else sum(rows)

    def all_reduce(self, op: ReduceOp | str, value: Any, options: CommunicationOptions | None = None) -> Any:
        """Reduce a nest of tensors or numbers over the replicas; every replica gets the result.

        Blocks until every replica has called it (limit: `Timeouts.collective_s`). Differentiable: the gradient is that
        of the global objective.

        Shapes: each leaf (...) on every replica -> (...), the same everywhere.

        Args:
            op: `ReduceOp.SUM`, `MEAN`, `MIN`, `MAX` or `PRODUCT`, or its name. MEAN counts each replica once, whatever
                its rows, and returns floating-point numbers; replicas on padding rows do not count.
            value: A nest of tensors and numbers, with the same structure, shapes and dtypes on all replicas.
            options: Options of this call, the same on all replicas: `timeout_seconds` is its limit; `compression` sends
                float32 in half the bytes. `implementation` must be the strategy's, and `bytes_per_pack` has no effect.

        Returns:
            The nest with a new tensor on this replica's device for each leaf; the arguments are not changed.

        Raises:
            InvalidArgumentError: `op` is not a reduction, or `options` asks for another implementation.
            SpecError: A leaf is neither a tensor nor a number.
            CollectiveMismatchError: (on all replicas) shapes, dtypes or operations differ between replicas.
            DeadlineExceededError: (on all replicas) a replica did not call it in time.

        Source: tf.distribute.ReplicaContext.all_reduce.

        >>> rd.get_replica_context().all_reduce(rd.ReduceOp.SUM, {"hits": 3, "rows": torch.tensor([4, 5])})
        {'hits': tensor(3), 'rows': tensor([4, 5])}
        """
        reduction = ReduceOp.parse(op)
        if options is not None:
            self._require_possible(options)
        if type(value) is torch.Tensor:
            return self._peers.all_reduce(reduction, value, options)
        return map_structure(lambda leaf: self._peers.all_reduce(reduction, tensor_of(leaf), options), value)

    def all_gather(self, value: Any, axis: int = 0, options: CommunicationOptions | None = None) -> Any:
        """Concatenate a nest of tensors over the replicas in rank order; every replica gets the result.

        Blocks until every replica has called it (limit: `Timeouts.collective_s`). Differentiable: the gradient is this
        replica's slice of the sum of all replicas' gradients.

        Shapes: each leaf (n_i, ...) on replica i -> (sum of n_i, ...), where n_i is the length along `axis`.

        Args:
            value: A nest of tensors that differ between replicas at most in their length along `axis`. A replica on
                padding rows contributes nothing.
            axis: The dimension to concatenate along; negative values count from the end.
            options: Options of this call, as for `all_reduce`; nothing is compressed.

        Returns:
            The nest with a new tensor on this replica's device for each leaf.

        Raises:
            InvalidArgumentError: A leaf has no such dimension, or `options` asks for another implementation.
            SpecError: A leaf is neither a tensor nor a number.
            CollectiveMismatchError: (on all replicas) other dimensions, dtypes or axes differ between replicas.
            DeadlineExceededError: (on all replicas) a replica did not call it in time.

        Source: tf.distribute.ReplicaContext.all_gather.

        >>> rd.get_replica_context().all_gather(torch.tensor([1, 2]))
        tensor([1, 2])
        """
        require_int(axis)
        if options is not None:
            self._require_possible(options)
        return map_structure(lambda leaf: self._peers.all_gather(tensor_of(leaf), axis, options), value)

    def _require_possible(self, options: CommunicationOptions) -> None:
        if not isinstance(options, CommunicationOptions):
            raise InvalidArgumentError(f"options must be an rd.CommunicationOptions, got {type(options).__name__}.")
        mine = self._peers.implementation
        if options.implementation not in ("auto", mine):
            raise InvalidArgumentError(
                f"Replicas form their group once, so a call must use the implementation of its strategy, {mine!r}, got "
                f"{options.implementation!r}. Give it to the strategy, as communication_options=."
            )

    def merge_call(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Call `fn(strategy, *args, **kwargs)` with every replica's arguments at once.

        Each replica runs `fn` on the same values, so it must be deterministic. Blocks until every replica has called
        this method (limit: `Timeouts.collective_s`). Not differentiable: arguments are pickled.

        Args:
            fn: Called with the strategy, then the arguments, each leaf of which is a PerReplica of all replicas' leaves
                (the plain value if there is only one replica).
            args: Positional arguments, the same nest on all replicas.
            kwargs: Keyword arguments, the same nest on all replicas.

        Returns:
            The return value of `fn`, with this replica's part in place of each PerReplica.

        Raises:
            CollectiveMismatchError: (on all replicas) another replica called another collective.
            DeadlineExceededError: (on all replicas) a replica did not call it in time.

        Source: tf.distribute.ReplicaContext.merge_call.

        >>> rd.get_replica_context().merge_call(lambda strategy, x: strategy.num_replicas_in_sync * x, args=(5,))
        5
        """
        if not callable(fn):
            raise InvalidArgumentError(f"merge_call needs a function of the strategy and the values, got {fn!r:.80}.")
        return self._peers.merge_call(functools.partial(fn, self._strategy), tuple(args), dict(kwargs or {}))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients of backward passes inside local: the next backward pass outside reduces all of them together.

        Hooks on parameters also run then, with the sum. Does not block. All replicas must use the context for the same
        backward passes.

        Source: torch.nn.parallel.DistributedDataParallel.no_sync.

        >>> weight = torch.nn.Parameter(torch.tensor(2.0))
        >>> with rd.get_replica_context().no_sync():
        ...     (3 * weight).backward()
        >>> (4 * weight).backward()  # with several replicas: here both gradients are reduced
        >>> weight.grad
        tensor(7.)
        """
        with self._peers.no_sync():
            yield


def loop_here() -> Any:
    """Return the object that draws batches in the current run; None outside of runs and if steps get their batches."""
    peers = peers_here()
    return None if peers is None else peers.loop


def peers_here() -> Peers | None:
    """Return the peers of the replica that runs this code; None outside of a run."""
    holder = current()
    return holder._peers if isinstance(holder, ReplicaContext) else None


class Peers(ABC):
    """The other replicas, as seen from one of them.

    Attributes:
        rank: Rank of this replica.
        world_size: Number of replicas.
        device: Device of this replica.
        rows: Rows of the current distributed batch on each replica, None without a batch.
        implementation: The requested implementation of collectives, see `CommunicationOptions`.
        loop: The object that draws batches in this run; None if the step gets its batches as arguments.
        device_mesh: The `DeviceMesh` of sharded modules; None without them.
        pipelines: The modules of which this replica computes a stage; None if the strategy has no stages.
    """

    rank: int
    world_size: int
    device: torch.device
    rows: tuple[int, ...] | None
    implementation: str = "auto"
    loop: Any = None
    device_mesh: Any = None
    pipelines: Any = None

    @abstractmethod
    def all_reduce(self, op: ReduceOp, value: Any, options: CommunicationOptions | None = None) -> Any:
        """Reduce one leaf of `ReplicaContext.all_reduce`."""

    @abstractmethod
    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Gather one leaf of `ReplicaContext.all_gather`."""

    @abstractmethod
    def merge_call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return this replica's part of `fn(*args, **kwargs)`, with a PerReplica of all replicas' leaves for each leaf.

        `ReplicaContext.merge_call` has bound the strategy to `fn`.
        """

    @abstractmethod
    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which backward passes keep gradients local."""


@final
class NoPeers(Peers):
    """The peers of the only replica: every collective is the identity. The reducer, if any, checks gradients."""

    def __init__(self, device: torch.device, reducer: GradientReducer | None = None) -> None:
        self._reducer = reducer
        self.rank, self.world_size, self.device = 0, 1, device
        self.rows = None

    def all_reduce(self, op: ReduceOp, value: Any, options: CommunicationOptions | None = None) -> Any:
        return promote(torch.as_tensor(value, device=self.device), op)

    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        tensor = torch.as_tensor(value, device=self.device)
        require_axis(tensor, axis)
        return tensor

    def merge_call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return fn(*args, **kwargs)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._reducer is None else self._reducer.no_sync()
