"""Values of several replicas: reducing, gathering, local results; counts of steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.core.exception_utils import folded
from raydist.core.nest import Structure, flatten, unflatten
from raydist.core.values import PerReplica, ReduceOp

if TYPE_CHECKING:
    from raydist.parameter_servers.requests import ServerStats


@final
class ValueContext:
    """The replica for which a value function computes a value.

    Attributes:
        replica_id_in_sync_group: The replica's rank, 0 .. num_replicas_in_sync - 1.
        num_replicas_in_sync: Number of replicas.

    Args:
        replica_id_in_sync_group: See above.
        num_replicas_in_sync: See above.

    Source: tf.distribute.experimental.ValueContext.

    >>> context = rd.ValueContext(replica_id_in_sync_group=1, num_replicas_in_sync=3)
    >>> context.replica_id_in_sync_group, context.num_replicas_in_sync
    (1, 3)
    """

    def __init__(self, replica_id_in_sync_group: int, num_replicas_in_sync: int) -> None:
        self.replica_id_in_sync_group = replica_id_in_sync_group
        self.num_replicas_in_sync = num_replicas_in_sync


class StrategyValues(ABC):
    """Methods that make, reduce, gather and read per-replica values."""

    @property
    @abstractmethod
    def num_replicas_in_sync(self) -> int:
        """Number of replicas that reduce their gradients in one step, >= 1.

        If the strategy chooses its devices, the first access may start or join Ray (limit: `Timeouts.start_s`).

        Source: tf.distribute.Strategy.num_replicas_in_sync.

        >>> rd.OneDeviceStrategy("cpu").num_replicas_in_sync
        1
        """

    @abstractmethod
    def distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Compute one value per replica, in this process and at once.

        Args:
            value_fn: Called with a ValueContext once per replica, in rank order.

        Returns:
            The nest that it returned with a PerReplica for each leaf, as an argument of `run`; with one replica its
            plain value.

        Source: tf.distribute.Strategy.experimental_distribute_values_from_function.

        >>> rd.OneDeviceStrategy("cpu").distribute_values_from_function(lambda context: context.num_replicas_in_sync)
        1
        """

    @final
    @folded
    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | Sequence[int] | None = None) -> Any:
        """Reduce a value over replicas.

        Blocks until the steps that computed the value are done (limit: `Timeouts.step_s`), and raises their errors.

        Shapes: (...) on every replica -> (...); an axis removes that dimension, and its lengths may differ.

        Args:
            reduce_op: `ReduceOp.SUM` or `ReduceOp.MEAN`, or its name.
            value: A nest of PerReplica, tensors and numbers. Results of replicas without rows are skipped.
            axis: None adds element by element (shapes must agree). MEAN then weights results of a step by the rows of
                each replica (of its batch argument, or of all batches drawn from an iterator), so that a mean loss is
                that of the global batch; other values have equal weights. An axis, or several, reduces over that
                dimension as well; MEAN then divides by the true number of entries: rows [0, 1, 2, 3] and [4, 5] give
                sum 15, mean 2.5.

        Returns:
            The nest with a tensor on the CPU for each leaf.

        Raises:
            InvalidArgumentError: Another reduction, shapes that do not fit, an invalid axis, a plain value under SUM
                with several replicas, or a value that no replica had rows for.
            SpecError: A leaf is neither a tensor nor a number.

        Source: tf.distribute.Strategy.reduce.

        >>> import torch
        >>> rd.OneDeviceStrategy("cpu").reduce(rd.ReduceOp.MEAN, torch.tensor([1.0, 3.0]), axis=0)
        tensor(2.)
        """
        return reduce(reduce_op, self._read_remote(value), axis, self.num_replicas_in_sync)

    @final
    @folded
    def gather(self, value: Any, axis: int = 0) -> Any:
        """Concatenate a value over replicas in rank order.

        Blocks until the steps that computed the value are done (limit: `Timeouts.step_s`), and raises their errors.

        Shapes: (n_i, ...) on replica i -> (sum of n_i, ...), where n_i is the length along `axis`.

        Args:
            value: A nest of PerReplica and tensors. Results of replicas without rows are skipped.
            axis: The dimension to concatenate along; negative values count from the end.

        Returns:
            The nest with a tensor on the CPU for each leaf. A leaf that is None on every replica stays None.

        Raises:
            InvalidArgumentError: Scalars, other dimensions that differ, or a value that no replica had rows for.
            SpecError: A leaf is neither a tensor nor a number.

        Source: tf.distribute.Strategy.gather.

        >>> import torch
        >>> rd.OneDeviceStrategy("cpu").gather(torch.tensor([1, 2]))
        tensor([1, 2])
        """
        return gather(self._read_remote(value), axis)

    @final
    @folded
    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the values of single replicas.

        Blocks until the steps that computed the values are done (limit: `Timeouts.step_s`), and raises their errors.

        Args:
            value: A nest of PerReplica and other values.

        Returns:
            One nest per replica in rank order, without results of replicas without rows; a value without any PerReplica
            alone in a tuple.

        Source: tf.distribute.Strategy.experimental_local_results.

        >>> rd.OneDeviceStrategy("cpu").local_results(rd.PerReplica([3, 4]))
        (3, 4)
        """
        return local_results(self._read_remote(value))

    def _read_remote(self, value: Any) -> Any:
        """Return `value` with all remote values in it fetched, except PerReplica."""
        return value


def reduce(op: ReduceOp | str, value: Any, axis: int | Sequence[int] | None, num_replicas: int) -> Any:
    """Reduce every PerReplica of a nest, see `Strategy.reduce`."""
    reduction = ReduceOp.parse(op)
    if reduction not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise InvalidArgumentError(
            f"strategy.reduce takes SUM or MEAN, got {reduction.name}. Gather and reduce locally: "
            "strategy.gather(value, axis=0)."
        )
    axes = None if axis is None else _axes(axis)
    return _map_leaves(lambda leaf: _reduce_leaf(reduction, leaf, axes, num_replicas), value)


def _map_leaves(fn: Callable[[Any], torch.Tensor | None], value: Any) -> Any:
    """Apply `fn` to the leaves like `map_structure`; an error names the leaf."""
    leaves, structure = flatten(value)
    found = []
    for leaf, path in zip(leaves, structure.paths(), strict=True):
        try:
            found.append(fn(leaf))
        except (SpecError, InvalidArgumentError) as error:
            if not path:
                raise
            raise type(error)(
                f"In the leaf {path!r} of the {type(value).__name__}: {error} Or take only the leaves that are meant."
            ) from None
    return unflatten(structure, found)


def _axes(axis: Any) -> tuple[int, ...]:
    axes = tuple(axis) if isinstance(axis, list | tuple) else (axis,)
    for one in axes:
        require_int(one)
    return axes


def require_int(axis: Any) -> None:
    """Raise InvalidArgumentError unless `axis` is an int."""
    if not isinstance(axis, int | np.integer) or isinstance(axis, bool):
        raise InvalidArgumentError(
            f"A dimension must be given as an int (to reduce, also as several), got {axis!r:.80}."
        )


def _reduce_leaf(op: ReduceOp, leaf: Any, axes: tuple[int, ...] | None, num_replicas: int) -> Any:
    tensors = _tensors(_parts(op, leaf, num_replicas))
    weights = leaf.weights if isinstance(leaf, PerReplica) and op is ReduceOp.MEAN else None
    if not tensors:
        raise InvalidArgumentError(
            "Nothing to reduce: no replica had rows, so that all results are absent. Skip empty batches, or run with "
            'RunOptions(empty_batch="zero_rows").'
        )
    if axes is None:
        return _reduce_elementwise(op, tensors, weights)
    return _reduce_axes(op, tensors, axes)


def _parts(op: ReduceOp, leaf: Any, num_replicas: int) -> Sequence[Any]:
    if isinstance(leaf, PerReplica):
        return leaf.values
    if op is ReduceOp.SUM and num_replicas > 1:
        raise InvalidArgumentError(
            f"A SUM over replicas needs a PerReplica (what strategy.run returned), got {type(leaf).__name__}: "
            "one value can't be told from its copies. Multiply it yourself, or reduce with MEAN."
        )
    return (leaf,)


def _tensors(parts: Sequence[Any]) -> list[torch.Tensor]:
    several = len(parts) > 1
    return [
        tensor_of(part, f"value {number} of {len(parts)}" if several else "").detach().cpu()
        for number, part in enumerate(parts, 1)
    ]


def regroup(values: Sequence[Any]) -> Any:
    """Combine one nest per replica into a nest with a PerReplica for each leaf.

    Raises:
        SpecError: Two nests have different structures; shows both.

    Source: tf.distribute's `regroup`.

    >>> regroup([{"x": 1}, {"x": 2}])["x"].values
    (1, 2)
    """
    columns, structures = zip(*map(flatten, values), strict=True)
    require_one_structure(dict(enumerate(structures)), "The function of the values")
    return unflatten(structures[0], [PerReplica(leaves) for leaves in zip(*columns, strict=True)])


def require_one_structure(structures: Mapping[int, Structure], what: str) -> None:
    """Raise if replicas have nests of different structures; `what` names their source in the message.

    Raises:
        SpecError: Shows two replicas that differ: all of 64 would fill the screen.
    """
    first = next(iter(structures), 0)
    for rank, structure in structures.items():
        if structure != structures[first]:
            raise SpecError(
                f"{what} must return one structure on all replicas, got {structures[first]} from replica {first} and "
                f"{structure} from replica {rank} (* is a value). Return the same nest everywhere."
            )


def tensor_of(part: Any, name: str = "") -> torch.Tensor:
    """Convert a tensor or a number to a tensor; `name` identifies the value in messages.

    Raises:
        SpecError: `part` is neither.
    """
    try:
        return torch.as_tensor(part)
    except (TypeError, ValueError, RuntimeError):
        raise SpecError(
            f"Only tensors and numbers can be reduced or gathered, got {type(part).__name__}: {part!r:.80}"
            f"{name and f' as {name}'}. Return one on every replica, or use strategy.local_results for other values."
        ) from None


def _reduce_elementwise(op: ReduceOp, tensors: Sequence[torch.Tensor], weights: Sequence[int] | None) -> torch.Tensor:
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if len(set(shapes)) > 1:
        raise InvalidArgumentError(
            f"axis=None adds element by element, so all replicas must have one shape, got {shapes}. "
            "Give axis=0 to reduce over rows, or reduce inside the step."
        )
    addends = [_accumulable(tensor) for tensor in tensors]
    if weights is not None and len(set(weights)) > 1:
        return _weighted_mean(addends, weights)
    total = torch.stack(addends).sum(0)
    return total / len(tensors) if op is ReduceOp.MEAN else total


def _weighted_mean(tensors: Sequence[torch.Tensor], weights: Sequence[int]) -> torch.Tensor:
    """Return sum(w * t) / sum(w). Values of weight 0 are left out: a mean over no rows is NaN."""
    total = sum(weights)
    counted = [(tensor, weight) for tensor, weight in zip(tensors, weights, strict=True) if weight]
    return torch.stack([tensor * (weight / total) for tensor, weight in counted]).sum(0)


def _reduce_axes(op: ReduceOp, tensors: Sequence[torch.Tensor], axes: tuple[int, ...]) -> torch.Tensor:
    for tensor in tensors:
        bad = [axis for axis in axes if not -tensor.ndim <= axis < tensor.ndim]
        if bad:
            raise InvalidArgumentError(
                f"axis must be one of {tensor.ndim} dimensions, got {bad[0]} for shape {tuple(tensor.shape)}."
            )
        if len({axis % tensor.ndim for axis in axes}) < len(axes):
            raise InvalidArgumentError(
                f"Each dimension must be named once, got axis={axes} for shape {tuple(tensor.shape)}."
            )
    sums = [_accumulable(tensor).sum(axes) for tensor in tensors]
    shapes = [tuple(part.shape) for part in sums]
    if len(set(shapes)) > 1:
        raise InvalidArgumentError(
            f"All dimensions but {axes} must agree over replicas, what remains is {shapes}. Give more axes."
        )
    total = torch.stack(sums).sum(0)
    if op is ReduceOp.SUM:
        return total
    # The true number of reduced entries, so that uneven and empty replicas count by their entries.
    count = sum(tensor.numel() for tensor in tensors)
    return total / (count / max(1, total.numel()))


def _accumulable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.int64) if tensor.dtype is torch.bool else tensor


def gather(value: Any, axis: int) -> Any:
    """Concatenate every PerReplica of a nest along `axis`, see `Strategy.gather`."""
    require_int(axis)
    return _map_leaves(lambda leaf: _gather_leaf(leaf, axis), value)


def _gather_leaf(leaf: Any, axis: int) -> torch.Tensor | None:
    parts = leaf.values if isinstance(leaf, PerReplica) else (leaf,)
    if parts and all(part is None for part in parts):
        return None
    tensors = _tensors(parts)
    if not tensors:
        raise InvalidArgumentError(
            "Nothing to gather: no replica had rows, so that all results are absent. Skip empty batches, or run with "
            'RunOptions(empty_batch="zero_rows").'
        )
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if any(not -tensor.ndim <= axis < tensor.ndim for tensor in tensors):
        raise InvalidArgumentError(
            f"gather needs values with dimension {axis}, got shapes {shapes}. Scalars: stack them."
        )
    others = {shape[: axis % len(shape)] + shape[axis % len(shape) + 1 :] for shape in shapes}
    if len(others) > 1:
        raise InvalidArgumentError(f"All dimensions but {axis} must agree over replicas, got shapes {shapes}.")
    return torch.cat(tensors, dim=axis)


def local_results(value: Any) -> tuple[Any, ...]:
    """Return one nest per replica, with that replica's part of every PerReplica; see `Strategy.local_results`."""
    leaves, structure = flatten(value)
    parts = [leaf.values for leaf in leaves if isinstance(leaf, PerReplica)]
    if not parts:
        return (value,)
    count = min(map(len, parts))
    rows = ([leaf.values[i] if isinstance(leaf, PerReplica) else leaf for leaf in leaves] for i in range(count))
    return tuple(unflatten(structure, row) for row in rows)


@final
@dataclass(frozen=True, slots=True)
class StrategyStats:
    """Counts of a strategy so far, from `strategy.stats()`; later versions may count more.

    Attributes:
        steps: Number of calls of `strategy.run`.
        nonfinite_backwards: Number of backward passes with NaN or infinities in the global gradients, in runs with
            `RunOptions(on_nonfinite="skip")` or `"raise"`; other runs do not check.
        skipped_updates: Number of calls of `optimizer.step()` that therefore changed nothing. A step that a
            `GradScaler` leaves out is no such call.
        servers: Counts of each parameter server: pulls, pushes, bytes, staleness; empty under other strategies.

    >>> strategy = rd.OneDeviceStrategy("cpu")
    >>> strategy.run(lambda: None)
    >>> strategy.stats()
    StrategyStats(steps=1, nonfinite_backwards=0, skipped_updates=0, servers=())
    """

    steps: int = 0
    nonfinite_backwards: int = 0
    skipped_updates: int = 0
    servers: tuple[ServerStats, ...] = ()
