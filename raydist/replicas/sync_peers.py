"""The synchronous part of a replica: batches, gradients, optimizer steps and reductions with its peers."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final

import torch

from raydist.actors.class_tracking import cloudpickle
from raydist.collectives.base import Communicator
from raydist.collectives.checked import CallLog
from raydist.collectives.delegating import LimitedCommunicator
from raydist.collectives.differentiable import all_gather, all_reduce, promote
from raydist.collectives.reducer.exchange import StepWeight
from raydist.collectives.reducer.nonfinite import NonfinitePolicy, OnNonfinite
from raydist.collectives.reducer.reducer import WIRES, GradientReducer
from raydist.context.replica_context import Peers
from raydist.core.errors import CancelledError, FailedPreconditionError, UnavailableError
from raydist.core.nest import map_structure
from raydist.core.values import ReduceOp
from raydist.mirroring.replica import MirrorReplica
from raydist.options import CommunicationOptions
from raydist.replicas.batch_rows import BatchRows, MergedValue, value_on
from raydist.replicas.in_sync import SyncCheck, WrittenBuffers
from raydist.replicas.rules import StrategyHooks, VariablesView

_LOST = (UnavailableError, CancelledError)


@final
class GlobalClosure:
    """The closure that an optimizer is given instead of the program's closure.

    Args:
        make_global: Exchanges the gradients that the closure computed.
        reduce: Maps the detached loss of this replica to the detached loss of all replicas.
    """

    def __init__(
        self,
        closure: Callable[[], Any],
        make_global: Callable[[], None],
        reduce: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._closure = closure
        self._make_global = make_global
        self._reduce = reduce
        self._values: list[tuple[Any, Any]] = []

    def __call__(self) -> Any:
        """Call the program's closure; reduce a float or floating-point tensor that it returns over all replicas."""
        own: Any = self._closure()
        value: Any
        self._make_global()
        if isinstance(own, torch.Tensor) and own.is_floating_point():
            value = _replaced(own, self._reduce(own.detach()))
        elif isinstance(own, float):
            value = self._reduce(torch.tensor(own, dtype=torch.float64)).item()
        else:
            return own
        self._values.append((value, own))
        return value

    def own_value(self, returned: Any) -> Any:
        """Return the result of `optimizer.step` for the program: this replica's own loss, not the global loss."""
        return next((own for value, own in self._values if value is returned), returned)


def _replaced(own: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the value with the derivative of `own`, for optimizers that call backward() themselves."""
    if not own.requires_grad:
        return value
    apply: Any = _Replaced.apply  # torch leaves it untyped
    replaced: torch.Tensor = apply(own, value)
    return replaced


class _Replaced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, None]:
        return upstream, None


@final
class SyncPeers(Peers):
    """One of several replicas that run in lock step.

    During a run it tracks the current batch. The rows of the batch weight gradients and collectives. After a batch,
    replicas without rows of the batch get the buffers of a replica with rows.
    """

    def __init__(
        self,
        communicator: Communicator,
        reducer: GradientReducer,
        device: torch.device,
        mirror: MirrorReplica,
        policy: NonfinitePolicy,
        rules: StrategyHooks | None = None,
        calls: CallLog | None = None,
    ) -> None:
        self._calls = calls or CallLog()
        self.rank, self.world_size, self.device = communicator.rank, communicator.world_size, device
        self._on_cpu = device.type == "cpu"
        self._padding = True
        self._batch = BatchRows.of(None, self.world_size, padding=True)
        self.rows = None
        self._weights: tuple[float, ...] | None = None
        # rows on this replica of the run's batch argument, or of all batches drawn; None without a batch
        self.num_rows_seen: int | None = None
        self._argument_rows: tuple[int, ...] | None = None
        self._communicator = communicator
        self._reducer = reducer
        self._mirror = mirror
        self._reduce_op = ReduceOp.MEAN
        self._weighed: tuple[BatchRows | None, ReduceOp] = None, ReduceOp.MEAN
        self._step_weight = StepWeight(1.0, counts=True)
        self._step_is_open = False
        self._attached: tuple[torch.nn.Parameter, ...] | None = None
        self._num_gradients_set = 0
        self._held_metrics: dict[int, dict[str, Any]] = {}
        self._num_batches = 0
        self._param_sync_every = 0
        self._policy = policy
        self._rules = rules or StrategyHooks()
        self._sync_check = SyncCheck(communicator, self._gather_objects, self._compared)
        self._held_buffers: list[torch.Tensor] = []
        self.recovers = False  # True if the driver replaces lost replicas
        self.on_weight: Callable[[float], None] | None = None  # called with the weight of each batch's gradients
        self._has_rules = type(self._rules) is not StrategyHooks  # otherwise there is nothing to call between steps
        # the view of this replica that its rules get
        self.variables = VariablesView(communicator, mirror, self._gather_objects, lambda: self.rows)
        self._written = WrittenBuffers(mirror.written_buffers, self._gather_all)

    @contextmanager
    def run(
        self,
        rows: tuple[int, ...] | None,
        reduce_op: ReduceOp,
        *,
        padding: bool,
        param_sync_every: int = 0,
        on_nonfinite: OnNonfinite = "pass",
    ) -> Iterator[None]:
        """Return the context of one run of a step function; see `StepHeader` for the arguments."""
        self._reduce_op, self._padding = reduce_op, padding
        self._param_sync_every = param_sync_every if self._rules.exchanges_gradients else 0
        self._argument_rows = rows
        self.num_rows_seen = None if rows is None else rows[self.rank]
        parameters = self._mirror.parameters()
        if parameters is not self._attached:
            self._attached = parameters
            self._reducer.attach(parameters)
        if self._mirror.num_gradients_set != self._num_gradients_set:
            self._num_gradients_set = self._mirror.num_gradients_set
            self._reducer.note_gradients()
        with nullcontext() if on_nonfinite == "pass" else self._policy.run(on_nonfinite):
            try:
                self._begin_batch(rows)
                try:
                    yield
                except BaseException:
                    self._undo_padding()
                    raise
                self._end_batch()
                if self._has_rules:
                    self._rules.after_run(self.variables)
            finally:
                self._close_step()

    def step_optimizer(
        self, optimizer: torch.optim.Optimizer, step: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run `optimizer.step` as the rules require.

        Gradients that no backward pass exchanged are exchanged first. The loss that a closure returns becomes global.
        """
        if self.world_size == 1 or not self._rules.exchanges_gradients or not self._step_is_open:
            return self._rules.step_optimizer(self.variables, optimizer, step, *args, **kwargs)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._make_global(optimizer, parameters)
        closure = args[0] if args else kwargs.get("closure")
        if not callable(closure):
            return self._rules.step_optimizer(self.variables, optimizer, step, *args, **kwargs)
        seen = GlobalClosure(closure, lambda: self._make_global(optimizer, parameters), self._global_loss)
        given = ((seen, *args[1:]), kwargs) if args else (args, {**kwargs, "closure": seen})
        return seen.own_value(self._rules.step_optimizer(self.variables, optimizer, step, *given[0], **given[1]))

    def _make_global(self, optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]) -> None:
        exchanged = self._reducer.make_global(parameters)
        if exchanged and any(group.get("differentiable") for group in optimizer.param_groups):
            raise FailedPreconditionError(
                f"An optimizer with differentiable=True needs gradients of backward(create_graph=True) on replicas, "
                f"but this {type(optimizer).__name__} was given some that were made by hand: their exchange cannot be "
                "differentiated. Call backward(create_graph=True) instead of torch.autograd.grad."
            )

    def make_global(self, parameters: Iterable[torch.Tensor]) -> None:
        """Exchange the gradients that no backward pass has exchanged, before the program reads them."""
        if self.world_size > 1 and self._rules.exchanges_gradients and self._step_is_open:
            given = [parameter for parameter in parameters if isinstance(parameter, torch.nn.Parameter)]
            self._reducer.make_global(given, used=False)

    def _global_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the sum of all replicas' losses, with the weights of their gradients."""
        weight = self._step_weight
        own = (loss * weight.scale if weight.counts else torch.zeros_like(loss)).to(self._communicator.device)
        self._communicator.all_reduce(own, ReduceOp.SUM).wait()
        return own.to(loss.device)

    def note_cleared(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Note that the program called `zero_grad` of an optimizer or a module with these parameters."""
        if self.world_size > 1:
            self._reducer.note_cleared(parameters)

    def next_batch(self, rows: tuple[int, ...]) -> None:
        """Begin the batch that a loop inside the step function drew; its rows weight what follows."""
        self._end_batch(begun=self.rows is not None)
        self._close_step()
        if self._argument_rows is None:
            self.num_rows_seen = (self.num_rows_seen or 0) + rows[self.rank]
        self._begin_batch(rows)

    def leave_run(self) -> None:
        """End the run at a draw from an iterator, as at the end of its function."""
        self._end_batch(begun=self.rows is not None)
        self._rules.after_run(self.variables)

    def settle_batch(self) -> None:
        """Synchronize the buffers of all replicas now; the current batch may continue."""
        self._agree_on_buffers()
        self._written.begin()

    def largest(self, number: float) -> float:
        """Return the maximum of `number` over all replicas."""
        return float(self._gather_all(torch.tensor([number], dtype=torch.float64)).max())

    @property
    def is_padded(self) -> bool:
        """True if this replica has no rows of the current batch and runs on padding rows: its results do not count."""
        return self._batch.padding[self.rank]

    @property
    def share(self) -> float | None:
        """The weight of this replica's values: its number of rows; None if it runs on padding rows."""
        if self.is_padded:
            return None
        return 1.0 if self.rows is None else float(self.rows[self.rank])

    def _begin_batch(self, rows: tuple[int, ...] | None) -> None:
        self._calls.begin_step()
        self._batch = batch = BatchRows.of(rows, self.world_size, padding=self._padding)
        self.rows = rows
        weighed, op = self._weighed
        if batch is not weighed or op is not self._reduce_op:
            self._weigh(batch)
        self._reducer.begin_step(self._step_weight, self._reduce_op is ReduceOp.SUM)
        if self.on_weight is not None:
            self.on_weight(self._step_weight.scale if self._step_weight.counts else 0.0)
        self._step_is_open = True
        is_padded = batch.padding[self.rank]
        self._held_metrics = self._mirror.hold_metrics() if is_padded else {}
        self._held_buffers = self._mirror.export_buffers() if is_padded else []
        if self._mirror.aggregates_buffers or self._written.are_any:
            self._written.begin()

    def _weigh(self, batch: BatchRows) -> None:
        """Compute the weights of a batch. The caller skips this when rows and reduction are those of the last batch."""
        self._weights = batch.weights(adds_up=self._reduce_op is not ReduceOp.MEAN)
        weight = batch.shares[self.rank]
        if not self._rules.exchanges_gradients:
            weight = float(weight > 0)  # gradients are local; without rows there are none
        # Under MEAN no rows have weight 0; zeroing the gradients keeps a NaN of an empty mean from spreading.
        empty = batch.padding[self.rank] or (weight == 0.0 and self._reduce_op is ReduceOp.MEAN)
        self._step_weight = self._reducer.weigh(weight, self._reduce_op, empty=empty)
        self._weighed = batch, self._reduce_op

    def _close_step(self) -> None:
        if self._step_is_open:
            self._step_is_open = False
            self._reducer.end_step()

    def _end_batch(self, *, begun: bool = True) -> None:
        """End the current batch. `begun` is False in a loop before its first draw, when there was no batch."""
        if self._step_is_open and self._rules.exchanges_gradients and self.world_size > 1:
            self._reducer.make_global(self._attached or (), used=False, batch_ends=True)
        if self._written.are_any or not self._batch.all_present:
            self._agree_on_buffers()
        self._num_batches += 1
        if begun and self._has_rules:
            self._rules.after_batch(self.variables)
        # The batch is done: its comparison must not fail because another replica is lost, which the next batch notices.
        with contextlib.suppress(*(_LOST if self.recovers else ())):
            if self._param_sync_every and self._num_batches % self._param_sync_every == 0:
                self._sync_check.compare()
            elif self._param_sync_every and self._num_batches & (self._num_batches - 1) == 0:  # 1, 2, 4, 8, ...
                self._sync_check.compare_buffers()

    def exchanges_late(self, rows: tuple[int, ...] | None) -> bool:
        """Return True if the end of a batch with these rows exchanges values of buffers."""
        return (rows is not None and 0 in rows) or self._mirror.aggregates_buffers

    def _compared(self) -> list[Any]:
        """Return the objects that all replicas have alike."""
        objects = self._mirror.objects()
        if self._rules.replicates_optimizer_state:
            return objects
        return [obj for obj in objects if not isinstance(obj, torch.optim.Optimizer)]

    def _agree_on_buffers(self) -> None:
        self._written.agree(self._batch.present)
        if not self._batch.all_present:
            self._align_padding()

    def _align_padding(self) -> None:
        """Give replicas on padding rows the buffers of the first replica with rows, and their own previous metrics."""
        root = self._batch.present.index(True)
        buffers = self._mirror.export_buffers()
        for place, buffer in enumerate(buffers):
            if buffer.layout is torch.strided:
                self._communicator.broadcast(buffer, root).wait()
            else:  # collectives carry strided tensors only
                buffers[place] = self._gather_objects(buffer if self.rank == root else None)[root].to(self.device)
        if self.is_padded:
            self._mirror.import_buffers(buffers, own=self._held_buffers)
            self._mirror.restore_metrics(self._held_metrics)

    def _undo_padding(self) -> None:
        """Restore buffers and metrics after an error: no replica can broadcast its buffers then."""
        if self.is_padded:
            self._mirror.import_buffers(self._held_buffers)
            self._mirror.restore_metrics(self._held_metrics)

    def all_reduce(self, op: ReduceOp, value: Any, options: CommunicationOptions | None = None) -> Any:
        here = self._on_cpu and type(value) is torch.Tensor and value.is_cpu  # `as_tensor` with a device is slower
        tensor = promote(value if here else torch.as_tensor(value, device=self.device), op)
        wire = None if options is None or options.compression is None else WIRES[options.compression]
        if wire is None or tensor.dtype is not torch.float32:
            return self._all_reduce(op, tensor, options)
        return self._all_reduce(op, tensor.to(wire), options).to(torch.float32)

    def _all_reduce(self, op: ReduceOp, tensor: torch.Tensor, options: CommunicationOptions | None) -> torch.Tensor:
        group = self._communicator if options is None else self._within(options)
        if self._batch.all_present:
            return all_reduce(group, tensor, op, self._weights, self._calls)
        if self.is_padded:
            tensor = _without_effect(tensor, op)
        if op is not ReduceOp.MEAN:
            return all_reduce(group, tensor, op, self._weights, self._calls)
        return all_reduce(group, tensor, ReduceOp.SUM, self._weights, self._calls) / sum(self._batch.present)

    def _within(self, options: CommunicationOptions | None) -> Communicator:
        """Return the communicator for a call that may have its own time limit."""
        limit_s = None if options is None else options.timeout_seconds
        return self._communicator if limit_s is None else LimitedCommunicator(self._communicator, limit_s)

    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        tensor = torch.as_tensor(value, device=self.device)
        if self.is_padded and -tensor.dim() <= axis < tensor.dim():
            tensor = tensor.narrow(axis, 0, 0)
        return all_gather(self._within(options), tensor, axis, self._weights)

    def merge_call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        gathered = self._gather_objects((args, kwargs))
        ranks = [rank for rank, present in enumerate(self._batch.present) if present]
        all_args, all_kwargs = map_structure(lambda *values: MergedValue(values, ranks), *gathered)
        merged = fn(*all_args, **all_kwargs)
        return map_structure(lambda leaf: value_on(leaf, self.rank, ranks), merged)

    def no_sync(self) -> AbstractContextManager[None]:
        return self._reducer.no_sync()

    def _gather_objects(self, value: Any) -> list[Any]:
        """Return the `value` of every replica. Replicas without rows call this function, too."""
        everyones = self._communicator.exchange_on_host(cloudpickle.dumps(value), "all_gather of objects")
        return [pickle.loads(each) for each in everyones]

    def _gather_all(self, tensor: torch.Tensor) -> torch.Tensor:
        return all_gather(self._communicator, tensor.to(self.device), 0)


def _without_effect(tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """Return the identity element of `op`, with the autograd edge of `tensor` (whose values may be NaN)."""
    if op in (ReduceOp.SUM, ReduceOp.MEAN):
        identity: Any = 0
    elif op is ReduceOp.PRODUCT:
        identity = 1
    elif tensor.dtype is torch.bool:
        identity = op is ReduceOp.MIN
    elif tensor.is_floating_point():
        identity = torch.inf if op is ReduceOp.MIN else -torch.inf
    else:
        limits = torch.iinfo(tensor.dtype)
        identity = limits.max if op is ReduceOp.MIN else limits.min
    never = torch.zeros_like(tensor, dtype=torch.bool)
    return torch.where(never, tensor, torch.full_like(tensor, identity))
