"""What one of several replicas does together with the others: in lock step, through a communicator."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any, final

import cloudpickle
import numpy as np
import torch

from raydist.collectives.base import Communicator
from raydist.collectives.delegating import LimitedCommunicator
from raydist.collectives.differentiable import all_gather, promote, reduce_promoted
from raydist.collectives.gradients import WIRES, GradientReducer
from raydist.collectives.nonfinite.policy import NonfinitePolicy, OnNonfinite
from raydist.context.peers import Peers
from raydist.mirroring.on_replica.replica import MirrorReplica
from raydist.nest import map_structure
from raydist.options import CommunicationOptions
from raydist.replicas.in_sync import SyncCheck
from raydist.replicas.rules import ReplicaRules
from raydist.replicas.variables_view import VariablesView
from raydist.replicas.written_buffers import WrittenBuffers
from raydist.values import PerReplica, ReduceOp

__all__ = ["Connected"]


@final
class Connected(Peers):
    """One of several replicas in lock step.

    During a run it follows the batch at hand: its rows weigh gradients and collectives, and once a batch is done that
    some replicas had no rows of, it brings their buffers in line.

    Attributes:
        num_rows_seen: Rows here of the run's batch argument, else of all batches that it drew; None without any.
        variables: What rules see of the replica.
    """

    def __init__(
        self,
        communicator: Communicator,
        reducer: GradientReducer,
        device: torch.device,
        mirror: MirrorReplica,
        policy: NonfinitePolicy,
        rules: ReplicaRules | None = None,
    ) -> None:
        self.rank, self.world_size, self.device = communicator.rank, communicator.world_size, device
        self._stand_in = True
        self._set_rows(None)
        self.num_rows_seen: int | None = None
        self._argument_rows: tuple[int, ...] | None = None
        self._communicator = communicator
        self._reducer = reducer
        self._mirror = mirror
        self._reduce_op = ReduceOp.MEAN
        self._open_step = contextlib.ExitStack()
        self._held_metrics: dict[int, dict[str, Any]] = {}
        self._num_batches = 0
        self._check_in_sync = 0
        self._policy = policy
        self._sync_check = SyncCheck(communicator, self._gather_objects, mirror.objects)
        self._held_buffers: list[torch.Tensor] = []
        self._rules = rules or ReplicaRules()
        self.variables = VariablesView(communicator, mirror, self._gather_objects, lambda: self.rows)
        self._written = WrittenBuffers(mirror, self._gather_all)

    @contextlib.contextmanager
    def run(
        self,
        rows: tuple[int, ...] | None,
        reduce_op: ReduceOp,
        *,
        stand_in: bool,
        check_in_sync: int = 0,
        on_nonfinite: OnNonfinite = "pass",
    ) -> Iterator[None]:
        """Around one run of a step function; see `StepHeader` for the arguments."""
        self._reduce_op, self._stand_in, self._check_in_sync = reduce_op, stand_in, check_in_sync
        if not self._rules.exchanges_gradients:
            self._check_in_sync = 0
        self._argument_rows = rows
        self.num_rows_seen = None if rows is None else rows[self.rank]
        self._reducer.attach(self._mirror.parameters())
        with self._policy.run(on_nonfinite), contextlib.ExitStack() as self._open_step:
            self._begin_batch(rows)
            try:
                yield
            except BaseException:
                self._undo_stand_in()
                raise
            self._end_batch()
            self._rules.after_run(self.variables)

    def step_optimizer(
        self, optimizer: torch.optim.Optimizer, step: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Do what the program asks an optimizer for, as the rules want it done."""
        return self._rules.step_optimizer(self.variables, optimizer, step, *args, **kwargs)

    def next_batch(self, rows: tuple[int, ...]) -> None:
        """A loop inside the step function drew its next batch: what follows is weighted by its rows."""
        self._end_batch(begun=self.rows is not None)
        self._open_step.close()
        if self._argument_rows is None:
            self.num_rows_seen = (self.num_rows_seen or 0) + rows[self.rank]
        self._begin_batch(rows)

    def leave_run(self) -> None:
        """Do what is done at the end of a run: this one is left at a draw."""
        self._end_batch(begun=self.rows is not None)
        self._rules.after_run(self.variables)

    def settle_batch(self) -> None:
        """Have the replicas agree now on what they agree on after the batch at hand, which may go on."""
        self._written.agree(self._present)
        self._align_stand_ins()
        self._written.begin()

    def largest(self, number: float) -> float:
        """The largest number of all replicas."""
        return float(self._gather_all(torch.tensor([number], dtype=torch.float64)).max())

    @property
    def stands_in(self) -> bool:
        """This replica has no rows of the batch at hand and works on others': nothing it produces counts."""
        return self._stand_in and self.rows is not None and self.rows[self.rank] == 0

    @property
    def share(self) -> float | None:
        """What values of this replica weigh beside those of others: its rows; None where it stands in."""
        if self.stands_in:
            return None
        return 1.0 if self.rows is None else float(self.rows[self.rank])

    def _begin_batch(self, rows: tuple[int, ...] | None) -> None:
        self._set_rows(rows)
        weight = self._shares[self.rank]
        if not self._rules.exchanges_gradients:
            weight = float(weight > 0)  # gradients are this replica's own, and those of no rows are none
        # Under MEAN zero rows weigh nothing; zeroing them keeps a NaN of an empty mean away from the others.
        empty = self.stands_in or (weight == 0.0 and self._reduce_op is ReduceOp.MEAN)
        self._open_step.enter_context(self._reducer.step(weight=weight, op=self._reduce_op, empty=empty))
        self._held_metrics = self._mirror.hold_metrics() if self.stands_in else {}
        self._held_buffers = self._mirror.export_buffers() if self.stands_in else []
        self._written.begin()

    def _end_batch(self, *, begun: bool = True) -> None:
        """`begun`: there was one; what a loop does before its first draw is none."""
        self._written.agree(self._present)
        self._align_stand_ins()
        self._num_batches += 1
        if begun:
            self._rules.after_batch(self.variables)
        if self._check_in_sync and self._num_batches % self._check_in_sync == 0:
            self._sync_check.compare()

    def _align_stand_ins(self) -> None:
        """Give replicas that stood in the buffers of the first replica with rows, and their own metrics of before."""
        if not self._stand_in or self.rows is None or all(self.rows) or not any(self.rows):
            return
        root = next(rank for rank, count in enumerate(self.rows) if count)
        buffers = self._mirror.export_buffers()
        for buffer in buffers:
            self._communicator.broadcast(buffer, root).wait()
        if self.stands_in:
            self._mirror.import_buffers(buffers, own=self._held_buffers)
            self._mirror.restore_metrics(self._held_metrics)

    def _undo_stand_in(self) -> None:
        """After an error nobody has buffers to give: what others' rows did here is as if it had not been."""
        if self.stands_in:
            self._mirror.import_buffers(self._held_buffers)
            self._mirror.restore_metrics(self._held_metrics)

    def _set_rows(self, rows: tuple[int, ...] | None) -> None:
        """Note what follows from the rows of a batch for all that is done with it."""
        self.rows = rows
        self._shares = weights_of(rows, self.world_size)
        # Which replicas count: all but those that stand in.
        counts = rows if self._stand_in and rows is not None and any(rows) else (1,) * self.world_size
        self._present = tuple(count > 0 for count in counts)
        self._all_present = all(self._present)

    def weights(self) -> tuple[float, ...] | None:
        """Each replica's weight in the global objective; None where contributions are plainly added."""
        if self._reduce_op is ReduceOp.MEAN:
            return self._shares
        return None if self._all_present else tuple(map(float, self._present))

    def all_reduce(self, op: ReduceOp, value: Any, options: CommunicationOptions | None = None) -> Any:
        tensor = promote(torch.as_tensor(value, device=self.device), op)
        wire = None if options is None or options.compression is None else WIRES[options.compression]
        if wire is None or tensor.dtype is not torch.float32:
            return self._all_reduce(op, tensor, options)
        return self._all_reduce(op, tensor.to(wire), options).to(torch.float32)

    def _all_reduce(self, op: ReduceOp, tensor: torch.Tensor, options: CommunicationOptions | None) -> torch.Tensor:
        group = self._communicator if options is None else self._within(options)
        if self._all_present:
            return reduce_promoted(group, tensor, op, self.weights())
        if self.stands_in:
            tensor = _without_effect(tensor, op)
        if op is not ReduceOp.MEAN:
            return reduce_promoted(group, tensor, op, self.weights())
        return reduce_promoted(group, tensor, ReduceOp.SUM, self.weights()) / sum(self._present)

    def _within(self, options: CommunicationOptions | None) -> Communicator:
        """What carries a call that may have a limit of its own."""
        limit_s = None if options is None else options.timeout_seconds
        return self._communicator if limit_s is None else LimitedCommunicator(self._communicator, limit_s)

    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        tensor = torch.as_tensor(value, device=self.device)
        if self.stands_in and -tensor.dim() <= axis < tensor.dim():
            tensor = tensor.narrow(axis, 0, 0)
        return all_gather(self._within(options), tensor, axis, self.weights())

    def merge_call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        gathered = self._gather_objects((args, kwargs))
        all_args, all_kwargs = map_structure(lambda *values: PerReplica(values), *gathered)
        merged = fn(*all_args, **all_kwargs)
        mine = self.rank
        return map_structure(lambda leaf: leaf.values[mine] if isinstance(leaf, PerReplica) else leaf, merged)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self._reducer.no_sync()

    def _gather_objects(self, value: Any) -> list[Any]:
        """Every replica's `value`, pickled; through the same checked path as tensors."""
        payload = np.frombuffer(cloudpickle.dumps(value), dtype=np.uint8).copy()
        # Every replica's, those that stand in included: the function that is to be merged runs on all of them.
        sizes = self._gather_all(torch.tensor([len(payload)])).tolist()
        everything = self._gather_all(torch.from_numpy(payload)).cpu().numpy().tobytes()
        ends = np.cumsum(sizes)
        return [pickle.loads(everything[end - size : end]) for size, end in zip(sizes, ends, strict=True)]

    def _gather_all(self, tensor: torch.Tensor) -> torch.Tensor:
        return all_gather(self._communicator, tensor.to(self.device), 0)


def _without_effect(tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """What changes nothing in a reduction, with the autograd edge of `tensor` (whose values may be NaN)."""
    if op in (ReduceOp.SUM, ReduceOp.MEAN):
        identity: Any = 0
    elif op is ReduceOp.PRODUCT:
        identity = 1
    elif tensor.dtype is torch.bool:
        identity = op is ReduceOp.MIN
    else:
        limits = torch.finfo(tensor.dtype) if tensor.is_floating_point() else torch.iinfo(tensor.dtype)
        identity = limits.max if op is ReduceOp.MIN else limits.min
    never = torch.zeros_like(tensor, dtype=torch.bool)
    return torch.where(never, tensor, torch.full_like(tensor, identity))


def weights_of(rows: tuple[int, ...] | None, world_size: int) -> tuple[float, ...]:
    """Share of each replica in the global batch; equal shares without one.

    >>> weights_of((3, 1), 2), weights_of(None, 2)
    ((0.75, 0.25), (0.5, 0.5))
    """
    total = sum(rows) if rows else 0
    if not rows or not total:
        return (1.0 / world_size,) * world_size
    return tuple(count / total for count in rows)
