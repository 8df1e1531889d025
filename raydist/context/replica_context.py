"""What a step function knows about its replica, and what it can do together with the others."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import torch

from raydist.context.cross_replica import require_int, tensor_of
from raydist.context.current import current
from raydist.context.peers import Peers
from raydist.context.strategy import Strategy
from raydist.errors import InvalidArgumentError
from raydist.nest import map_structure
from raydist.options import CommunicationOptions
from raydist.values import ReduceOp

__all__ = ["ReplicaContext", "loop_here", "peers_here"]


@final
class ReplicaContext:
    """What a step function sees of its replica and of the others.

    A step asks for it with `rd.get_replica_context()`; nothing else makes one.

    Args:
        strategy: What `strategy` is to be.
        peers: This replica's way to the others.

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
        """This replica's rank, 0 .. num_replicas_in_sync - 1.

        >>> rd.get_replica_context().replica_id_in_sync_group  # outside of `run`: the only replica
        0
        """
        return self._peers.rank

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas whose gradients meet in one step.

        >>> rd.get_replica_context().num_replicas_in_sync  # outside of `run`: the only replica
        1
        """
        return self._peers.world_size

    @property
    def strategy(self) -> Strategy:
        """The strategy that runs this replica.

        Its numbers and its arithmetic (`reduce`, `gather`, `local_results`) work in a step; what belongs to the driver
        (`scope`, `run`, `distribute_dataset`, ...) raises FailedPreconditionError there.

        >>> rd.get_replica_context().strategy.worker_devices
        ('CPU:0',)
        """
        return self._strategy

    @property
    def device(self) -> torch.device:
        """Where this replica computes, as a `torch.device` of its own process ("cuda:0" on every GPU replica).

        >>> rd.get_replica_context().device
        device(type='cpu')
        """
        return self._peers.device

    @property
    def num_rows(self) -> int | None:
        """Rows of this replica's piece of the current distributed batch; None without a batch.

        It is 0 for a replica that got none: it works on stand-in rows, and nothing that it produces counts.

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
                rows it has, and gives floating-point numbers; replicas that stand in count nowhere.
            value: A nest of tensors and numbers, with the same structure, shapes and dtypes on all replicas.
            options: For this call, the same on all replicas: `timeout_seconds` is its limit, with `compression` float32
                travels in half the bytes. `implementation` is the strategy's, and `bytes_per_pack` changes nothing.

        Returns:
            The nest with a new tensor on this replica's device for each leaf; what was given is left unchanged.

        Raises:
            InvalidArgumentError: `op` is no reduction, or `options` asks for another implementation.
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
            value: A nest of tensors that differ between replicas at most in their length along `axis`. A replica that
                stands in adds nothing.
            axis: The dimension along which to concatenate; negative ones count from the end.
            options: For this call, as those of `all_reduce`; nothing is compressed.

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

        `fn` runs in each replica on the same values, so it must be deterministic. Blocks until every replica has called
        it (limit: `Timeouts.collective_s`). Not differentiable: arguments travel as pickles.

        Args:
            fn: Called with the strategy, then the arguments, whose leaves are a PerReplica of all replicas' each (the
                plain values where there is one replica only).
            args: Positional arguments, the same nest on all replicas.
            kwargs: Keyword arguments, the same nest on all replicas.

        Returns:
            What `fn` returned, each PerReplica in it replaced by this replica's part.

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
        """Keep the gradients of backwards inside local: they are reduced together with the next one outside.

        Hooks on parameters wait until then, too, and get the sum.

        Waits for nothing. All replicas must use it for the same backwards.

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
    """What draws batches in the run that this code is in; None where it is given them, or is in none.

    >>> loop_here() is None
    True
    """
    peers = peers_here()
    return None if peers is None else peers.loop


def peers_here() -> Peers | None:
    """Return the other replicas, as the replica that runs this code sees them; None outside of a run.

    >>> peers_here() is None
    True
    """
    holder = current()
    return holder._peers if isinstance(holder, ReplicaContext) else None
