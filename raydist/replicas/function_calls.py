"""Calls of step functions in a replica, with their context, iterators and gradient exchange.

Gradients that the program sets itself are exchanged when an optimizer steps. `GradScaler` and gradient clipping read
gradients before that. torch has no hook there, so raydist wraps these torch functions, once in a replica's process.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn, final

import torch
from torch import nn
from torch.nn.utils import clip_grad

from raydist.actors.readers.replica_iterator import ReplicaIterator
from raydist.checkpoints.loop_commands import IteratorPosition
from raydist.checkpoints.replica_loop import ReplicaLoops
from raydist.checkpoints.shards import ShardTerms, ShardWriter
from raydist.context.current import StepCounter, enter_replica
from raydist.context.replica_context import ReplicaContext, peers_here
from raydist.context.strategy import Strategy
from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.core.fork_guard import call_here
from raydist.core.nest import flatten
from raydist.mirroring.replica import MirrorReplica
from raydist.replicas.device_copies import Accelerator, DeviceCopies
from raydist.replicas.results import StepResult, pack_result
from raydist.replicas.step import StepHeader
from raydist.replicas.sync_peers import SyncPeers
from raydist.sharding import clipping
from raydist.summary.record import Record
from raydist.summary.recording import StepRecorder
from raydist.utils.sharded_tensors import is_sharded
from raydist.utils.stage_tensors import holder_of


def _refused(what: str) -> Callable[..., NoReturn]:
    def refuse(self: ReplicaView, *args: Any, **kwargs: Any) -> NoReturn:
        raise FailedPreconditionError(
            f"{what} is for the driver: this code runs inside of a replica, in strategy.run. Call it around the step."
        )

    return refuse


@final
class ReplicaView(Strategy):
    """The strategy inside a replica: `ctx.strategy` and `rd.get_strategy()`."""

    def __init__(self, worker_devices: tuple[str, ...], objects: Callable[[], Sequence[Any]] = tuple) -> None:
        super().__init__()
        self._worker_devices = worker_devices
        self._objects = objects

    @property
    def num_replicas_in_sync(self) -> int:
        return len(self._worker_devices)

    @property
    def worker_devices(self) -> tuple[str, ...]:
        return self._worker_devices

    def _find_counter(self) -> StepCounter | None:
        return next((found for found in self._objects() if isinstance(found, StepCounter)), None)

    _mark_created = _set_gradient_reduce_op = _refused("strategy.scope")
    run = _refused("strategy.run")
    distribute_dataset = _refused("strategy.distribute_dataset")
    distribute_datasets_from_function = _refused("strategy.distribute_datasets_from_function")
    distribute_values_from_function = _refused("strategy.distribute_values_from_function")
    stats = _refused("strategy.stats")
    close = _abort = _refused("strategy.close")


@functools.cache
def watch_gradient_readers() -> None:
    """Make `GradScaler` and `torch.nn.utils.clip_grad_*_` read global gradients from now on. May be called again."""
    scaler = torch.amp.GradScaler
    for name in ("unscale_", "step"):
        setattr(scaler, name, _after_exchange(getattr(scaler, name), 1, "optimizer", _scaled_parameters))
    clip_grad.clip_grad_norm_ = _for_both_kinds(clip_grad.clip_grad_norm_)
    clipping.clip_grad_norm_ = _after_exchange(clipping.clip_grad_norm_, 0, "parameters", _listed)
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        wrapped = _after_exchange(getattr(clip_grad, name), 0, "parameters", _listed)
        setattr(clip_grad, name, wrapped)
        setattr(torch.nn.utils, name, wrapped)
    torch.nn.Module.zero_grad = _noting_cleared(torch.nn.Module.zero_grad)  # type: ignore[method-assign]


def _after_exchange(
    function: Callable[..., Any], place: int, name: str, find: Callable[[Any], tuple[Any, list[torch.Tensor]]]
) -> Callable[..., Any]:
    """Wrap a function that reads the gradients of its argument `name`, at position `place`."""

    @functools.wraps(function)
    def read(*args: Any, **kwargs: Any) -> Any:
        peers = peers_here()
        if isinstance(peers, SyncPeers):
            if len(args) > place:
                given, parameters = find(args[place])
                args = (*args[:place], given, *args[place + 1 :])
            else:
                kwargs[name], parameters = find(kwargs[name])
            peers.make_global(parameters)
        return function(*args, **kwargs)

    return read


def _for_both_kinds(torchs: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap torch's `clip_grad_norm_`, which refuses whole parameters beside divided ones."""

    @functools.wraps(torchs)
    def clip(parameters: Any, max_norm: float, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
        listed = parameters if isinstance(parameters, list) else []
        kinds = {is_sharded(each.grad) for each in listed if each.grad is not None}
        in_stages = any(holder_of(each) is not None for each in listed)
        if in_stages and (args or kwargs.get("error_if_nonfinite")):
            raise InvalidArgumentError(
                "clip_grad_norm_ of a pipeline's stages takes parameters, max_norm and norm_type only, as "
                "rd.clip_grad_norm_ does."
            )
        if (len(kinds) < 2 and not in_stages) or args or kwargs.get("error_if_nonfinite"):
            return torchs(parameters, max_norm, norm_type, *args, **kwargs)
        return clipping.clip_grad_norm_(parameters, max_norm, norm_type)

    return clip


def _noting_cleared(zero_grad: Callable[..., None]) -> Callable[..., None]:
    """Wrap `Module.zero_grad`: the reducer must know that later values of `.grad` are new."""

    @functools.wraps(zero_grad)
    def clear(module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        zero_grad(module, *args, **kwargs)
        peers = peers_here()
        if isinstance(peers, SyncPeers):
            peers.note_cleared(module.parameters())

    return clear


def _scaled_parameters(optimizer: torch.optim.Optimizer) -> tuple[Any, list[torch.Tensor]]:
    """Return the optimizer and the parameters whose gradients a GradScaler reads; raise if stages hold them."""
    found = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(holder_of(each) is not None for each in found):  # each stage would look at its own gradients only
        raise InvalidArgumentError(
            "A GradScaler does not scale gradients of a pipeline's stages. Use torch.autocast with bfloat16, which "
            "needs no scaler."
        )
    return optimizer, found


def _listed(parameters: torch.Tensor | Iterable[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
    """Return the argument and its parameters; an iterable becomes a list, because it may be exhaustible."""
    if isinstance(parameters, torch.Tensor):
        return parameters, [parameters]
    listed = list(parameters)
    return listed, listed


@final
class LoopSide:
    """The `ReplicaSide` of a loop: access to one replica at the step boundaries inside a run.

    Args:
        launch: Runs the operations that the device has queued.
        take_records: Returns the summaries that the run has recorded since the last call.
    """

    def __init__(
        self,
        mirror: MirrorReplica,
        peers: SyncPeers,
        writer: ShardWriter,
        iterators: Sequence[ReplicaIterator],
        launch: Callable[[], None],
        take_records: Callable[[], tuple[Record, ...]],
    ) -> None:
        self._mirror, self._peers, self._writer, self._iterators = mirror, peers, writer, tuple(iterators)
        self._launch = launch
        self.take_records = take_records

    def object_of(self, handle: int) -> Any:
        return self._mirror.object_of(handle)

    def settle(self) -> None:
        self._peers.settle_batch()
        self._mirror.settle()
        self._launch()

    def leave(self) -> None:
        self._peers.leave_run()
        self._mirror.settle()
        self._launch()

    def agree(self, number: float) -> float:
        return self._peers.largest(number)

    def copy(self, token: str, terms: ShardTerms, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> None:
        self._writer.copy(token, terms, objects, modules)

    def positions(self) -> tuple[IteratorPosition, ...]:
        return tuple(IteratorPosition(each.state_dict(), each.has_ended) for each in self._iterators)


@final
class FunctionCalls:
    """The caller of step functions in one replica.

    Objects that are the same for all steps are built once.

    Args:
        limit_s: How long a step may wait for threads of this process that need other torch modes.
        on_return: Called when a step function has returned.
        on_draw: Called when it has drawn a batch from an iterator.
    """

    def __init__(
        self,
        mirror: MirrorReplica,
        saves: ShardWriter,
        loops: ReplicaLoops,
        copies: DeviceCopies,
        accelerator: Accelerator,
        limit_s: float,
        on_return: Callable[[], None] = lambda: None,
        on_draw: Callable[[], None] = lambda: None,
    ) -> None:
        self._mirror, self._saves, self._loops, self._copies = mirror, saves, loops, copies
        self._on_return, self._on_draw = on_return, on_draw
        self._guard = mirror.guard()
        self._accelerator = accelerator
        self._limit_s = limit_s
        self._peers: SyncPeers | None = None
        self._recorder = StepRecorder(lambda: None if self._peers is None else self._peers.share)
        self._context: ReplicaContext | None = None

    def join(self, view: ReplicaView, peers: SyncPeers) -> None:
        """Call functions as this replica of this process group from now on."""
        self._peers = peers
        self._context = ReplicaContext(view, peers)

    def call(
        self,
        header: StepHeader,
        peers: SyncPeers,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call the step function and return its result."""
        with (
            self.bound((args, kwargs), header, peers) if args or kwargs else contextlib.nullcontext(),
            peers.run(
                header.rows,
                header.gradient_reduce_op,
                padding=header.padding,
                param_sync_every=header.param_sync_every,
                on_nonfinite=header.on_nonfinite,
            ),
            enter_replica(self._context),
            self._recorder.recording(),
        ):
            self._guard.is_on = True
            try:
                if header.modes is None and header.summaries is None and not self._accelerator.defers:
                    value = call_here(fn, *args, **kwargs)
                else:
                    with self._around(header):
                        value = call_here(fn, *args, **kwargs)
                self._mirror.after_run()
                self._on_return()
            finally:
                self._guard.is_on = False
        return value

    @contextlib.contextmanager
    def bound(self, arguments: Any, header: StepHeader, peers: SyncPeers) -> Iterator[None]:
        """Return a context in which iterators in this nest yield this replica's batches and report their rows."""
        leaves, _ = flatten(arguments)
        iterators = [leaf for leaf in leaves if isinstance(leaf, ReplicaIterator)]
        with contextlib.ExitStack() as stack:
            if iterators and header.loop is not None:
                side = LoopSide(
                    self._mirror,
                    peers,
                    self._saves,
                    iterators,
                    self._accelerator.leave,
                    self._recorder.take_records,
                )
                peers.loop = stack.enter_context(self._loops.running(header.step, header.loop, side))
                stack.callback(setattr, peers, "loop", None)
            for iterator in iterators:
                stack.callback(iterator.release)
                iterator.bind(
                    peers.rank,
                    begin=self._copies.begin,
                    place=self._copies.finish,
                    on_batch=lambda batch: self._begin_batch(peers, batch.rows),
                    empty_batch="pad" if header.padding else "zero_rows",
                    before_draw=self._loops.draw,
                )
            yield

    def _begin_batch(self, peers: SyncPeers, rows: tuple[int, ...]) -> None:
        self._on_draw()
        peers.next_batch(rows)

    def _around(self, header: StepHeader) -> AbstractContextManager[Any]:
        """Return the context for summaries, torch modes and devices that queue operations."""
        around = contextlib.ExitStack()
        if header.summaries is not None:
            around.enter_context(self._recorder.following(header.summaries))
        if header.modes is not None or self._accelerator.defers:
            around.enter_context(self._accelerator.working(header.modes, self._limit_s))
        return around

    def pack(self, value: Any, header: StepHeader, peers: SyncPeers) -> StepResult:
        """Convert the result of a call for sending."""
        # A loop over batches returns results of all its batches, so they count even if the last batch had no rows here.
        absent = header.rows is not None and header.is_padded(peers.rank)
        return pack_result(value, absent=absent, rows=peers.num_rows_seen, summaries=self._recorder.take_records())

    def drop_records(self) -> None:
        """Drop the summaries of a step that failed."""
        self._recorder.drop_records()
