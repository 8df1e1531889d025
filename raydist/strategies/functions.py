"""`rd.get_strategy`, `rd.get_replica_context`, `rd.get_global_step`, `rd.compute_average_loss`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from raydist.context.current import StepCounter, current, has_strategy, in_cross_replica_context
from raydist.context.replica_context import ReplicaContext
from raydist.context.strategy import Strategy
from raydist.core.errors import FailedPreconditionError, InvalidArgumentError, SpecError
from raydist.sharding.initial_values import INITIAL_VALUES, InitialValues, is_on_meta, materialize_module
from raydist.strategies.one_device import OneDeviceStrategy, default_strategy


def get_strategy() -> Strategy:
    """Return the strategy whose scope or `run` this code is in. Does not block.

    Returns:
        The strategy. In a step on a replica actor: a view of the strategy with only its numbers and arithmetic. Outside
        of every scope: a new `OneDeviceStrategy("cpu")`.

    Source: tf.distribute.get_strategy.

    >>> strategy = rd.OneDeviceStrategy("cpu")
    >>> with strategy.scope():
    ...     rd.get_strategy() is strategy
    True
    >>> rd.get_strategy().num_replicas_in_sync
    1
    """
    holder = current()
    if isinstance(holder, ReplicaContext):
        return holder.strategy
    return holder if isinstance(holder, Strategy) else default_strategy()


def materialize(module: nn.Module, init: Callable[[nn.Module], object] | None = None, seed: int = 0) -> nn.Module:
    """Give values to a module that was built on the device "meta": no process ever holds it whole, if it is sharded.

    Under the scope of a strategy with replicas nothing happens yet: the replicas make the values when a step first uses
    the module. The driver's parameters stay without memory; each read of one fetches its values anew. Without such a
    strategy the module gets values at once, on the strategy's device.

    Args:
        module: A module without values, as a step will use it. Made under `torch.device("meta")`.
        init: Called with the module once it has memory, to fill parameters and buffers in place, as with
            `torch.nn.init`. None: `reset_parameters()` of each part is called, in the order of `modules()`, which gives
            the values that building the module without "meta" gives after `torch.manual_seed(seed)`, if the order is
            that of their construction and no parameters are shared.
        seed: Seed of the random numbers; the generators of the program do not change.

    Returns:
        The module.

    Raises:
        FailedPreconditionError: (here, or at the first step) A part has no `reset_parameters()`, and there is no
            `init`; the module has values.

    Source: torchdistX's deferred initialisation; `to_empty` and `reset_parameters` as PyTorch's FSDP2 documents.

    >>> with torch.device("meta"):
    ...     layer = torch.nn.Linear(2, 2)
    >>> rd.materialize(layer, seed=1).weight.shape
    torch.Size([2, 2])
    """
    if not is_on_meta(module):
        raise FailedPreconditionError(
            f'materialize must be given a module on the device "meta", but {type(module).__name__} has values.'
        )
    vars(module)[INITIAL_VALUES] = InitialValues(init, seed)
    strategy = get_strategy()
    if isinstance(strategy, OneDeviceStrategy):
        materialize_module(module, torch.device(strategy.worker_devices[0].lower()))
    return module


def get_replica_context() -> ReplicaContext:
    """Return the context of the running step: this replica's rank, rows and collectives. Does not block.

    Returns:
        The context of the replica that runs this code. Outside of every scope: the context of a single replica. Inside
        a scope but outside of `run` (the cross-replica context): None. The annotation leaves None out, so that step
        functions need no check for it.

    Source: tf.distribute.get_replica_context.

    >>> strategy = rd.OneDeviceStrategy("cpu")
    >>> strategy.run(lambda: rd.get_replica_context().replica_id_in_sync_group)
    0
    >>> with strategy.scope():
    ...     print(rd.get_replica_context())
    None
    """
    holder = current()
    if isinstance(holder, ReplicaContext):
        return holder
    if holder is not None:
        return None  # type: ignore[return-value]  # see above
    return default_strategy().make_replica_context()


def get_global_step() -> torch.Tensor:
    """Return the number of global batches trained on: a mirrored int64 scalar, created by the first call.

    `Model.fit` adds 1 for each global batch. Your own loops add to the variable, in the step or on the driver between
    steps. A checkpoint contains the variable if you make the checkpoint in the strategy's scope, if the checkpoint has
    a module of the strategy, or if no other strategy is open. Summaries use the variable as their default step.

    On the driver, reading the variable waits for dispatched steps. In a step, a replica reads its own current value.
    Under `ParameterServerStrategy` only the driver counts, namely the closures that were applied. A closure sees the
    value that the driver read or wrote last, and additions in a closure are lost. Outside of every scope, the process
    has one variable.

    Returns:
        The variable itself: `rd.get_global_step().add_(1)` counts, `int(rd.get_global_step())` reads.

    Raises:
        FailedPreconditionError: The strategy is closed; or a step calls this before the driver has called it.

    Source: tf.compat.v1.train.get_or_create_global_step.

    >>> strategy = rd.OneDeviceStrategy("cpu")
    >>> with strategy.scope():
    ...     step = rd.get_global_step()
    >>> for batch in strategy.distribute_dataset(rd.Dataset.range(5).batch(2)):
    ...     _ = strategy.run(lambda batch: rd.get_global_step().add_(1), args=(batch,))
    >>> int(step)
    3
    """
    strategy = get_strategy()
    if not has_strategy() or in_cross_replica_context():
        return strategy._make_counter().value
    found = strategy._find_counter()
    if found is None:
        raise FailedPreconditionError(
            "The driver must create the global step, so that all replicas share it, but this step called "
            "rd.get_global_step() first. Call rd.get_global_step() in the scope, before the step runs."
        )
    return found.value


def step_counting(strategy: Strategy) -> Callable[[], Any]:
    """Return a function for training steps that adds 1 to the global step. It does nothing if the driver counts."""
    return _Counting(strategy._make_counter()) if strategy._steps_count else _count_nothing


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Counting:
    """A picklable function that adds 1 to the global step."""

    counter: StepCounter

    def __call__(self) -> None:
        self.counter.value.add_(1)


def _count_nothing() -> None:
    """Do nothing: the driver counts."""


def compute_average_loss(
    per_example_loss: torch.Tensor,
    sample_weight: torch.Tensor | float | None = None,
    global_batch_size: int | None = None,
) -> torch.Tensor:
    """Return this replica's share of the global mean: the sum of its losses divided by the *global* number of rows.

    The shares of all replicas add up to the mean over the global batch. Use this function in steps together with
    `RunOptions(gradient_reduce_op=ReduceOp.SUM)`. A step whose loss is the plain mean of its rows needs neither. Does
    not block.

    Shapes: (rows, ...) -> ().

    Args:
        per_example_loss: (rows, ...), one or more values per row; the values of a row are added.
        sample_weight: Multiplies the losses, broadcast from the left: (rows,) or a number.
        global_batch_size: Rows of the global batch, >= 0. None: `ctx.global_num_rows`, or without a distributed batch
            the rows of this replica times the number of replicas.

    Returns:
        A scalar of the losses' dtype; 0 for a global batch without rows. Differentiable.

    Raises:
        FailedPreconditionError: Called in a scope, not in a step.
        InvalidArgumentError: The losses are a single number, or `global_batch_size` is negative.
        SpecError: `global_batch_size` is not an int.

    Source: tf.nn.compute_average_loss.

    >>> compute_average_loss(torch.tensor([1.0, 3.0]), global_batch_size=4)
    tensor(1.)
    """
    if in_cross_replica_context():
        raise FailedPreconditionError(
            f"compute_average_loss must be called in the step function that strategy.run runs, but was called in the "
            f"scope of a {type(get_strategy()).__name__}. Move the call into the step."
        )
    losses = torch.as_tensor(per_example_loss)
    if losses.dim() == 0:
        raise InvalidArgumentError(
            "per_example_loss must have one loss per row, got a single number (shape ()). Create the loss function "
            "with reduction='none'."
        )
    size = _global_size(global_batch_size, len(losses))
    if sample_weight is not None:
        weight = torch.as_tensor(sample_weight, dtype=losses.dtype, device=losses.device)
        losses = losses * weight.reshape(weight.shape + (1,) * (losses.dim() - weight.dim()))
    return losses.sum() / size if size else losses.sum() * 0.0


def _global_size(given: int | None, num_rows: int) -> int:
    if given is None:
        context = get_replica_context()
        rows = context.global_num_rows
        return num_rows * context.num_replicas_in_sync if rows is None else rows
    if not isinstance(given, int) or isinstance(given, bool):
        raise SpecError(f"global_batch_size must be an int, got {given!r}.")
    if given < 0:
        raise InvalidArgumentError(f"global_batch_size must be >= 0, got {given}.")
    return given
