"""Buffers that differ between replicas: `rd.set_aggregation`, combining the values of replicas, dividing one value.

A module keeps its choices in an attribute, so that copies, pickles and the replicas' modules have them too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.nn.parameter import is_lazy

from raydist.compat.torch_internals import buffer_table
from raydist.context.current import has_strategy, in_cross_replica_context
from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.core.values import ReduceOp
from raydist.pickling.attribute_table import attributes


def aggregate(values: Sequence[torch.Tensor], how: str) -> torch.Tensor:
    """Return the aggregate of the values of all replicas, in rank order.

    >>> aggregate([torch.tensor(1), torch.tensor(2)], "sum"), aggregate([torch.tensor(1), torch.tensor(2)], "first")
    (tensor(3), tensor(1))
    """
    if how == "first" or len(values) == 1:
        return values[0]
    if how == "mean":
        return average(values)
    return (_added(values[1:]) + wide(values[0])).to(values[0].dtype)


def share_of(value: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """Return one replica's share of a value: an N-th part; rank 0 gets the remainder, so that the sum is exact.

    >>> [share_of(torch.tensor(8), rank, 3).item() for rank in range(3)]
    [4, 2, 2]
    """
    whole = wide(value)
    is_integer = not (value.is_floating_point() or value.is_complex())
    part = torch.div(whole, world_size, rounding_mode="trunc" if is_integer else None).to(value.dtype)
    if rank or world_size == 1:
        return part
    # The sum of the other shares, added in the order of `aggregate`, is at least half of the whole: the difference has
    # no rounding error.
    missing = (whole - _added([part] * (world_size - 1))).to(value.dtype)
    return missing if is_integer else torch.where(torch.isfinite(whole), missing, part)


def _added(values: Sequence[torch.Tensor]) -> torch.Tensor:
    total = wide(values[0])
    for value in values[1:]:
        total = total + wide(value)
    return total


def wide(value: torch.Tensor) -> torch.Tensor:
    """Return a value in the widest type of its kind, so that a sum is rounded once."""
    if value.is_complex():
        return value.to(torch.complex128)
    return value.to(torch.float64 if value.is_floating_point() else torch.int64)


def average(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elementwise mean; elements that are equal everywhere keep their exact value.

    >>> average([torch.tensor([1.0, 0.1]), torch.tensor([3.0, 0.1])])
    tensor([2.0000, 0.1000])
    """
    first = values[0]
    if len(values) == 1:
        return first
    equal = torch.ones_like(first, dtype=torch.bool)
    for value in values[1:]:
        equal &= value == first
    mean = torch.stack([wide(value) for value in values]).mean(0).to(first.dtype)
    return torch.where(equal, first, mean)


_NOTE = "_raydist_aggregation"
_SYNCHRONIZATIONS = ("on_read", "on_write")
_AGGREGATIONS = {"mean": "mean", "sum": "sum", "first": "first", "only_first_replica": "first"}


@final
@dataclass(frozen=True, slots=True)
class Aggregation:
    """The rule that combines the values of one buffer on all replicas.

    Attributes:
        synchronization: "on_read": each replica keeps its own value, and the driver reads all; "on_write": the replicas
            agree on one value after each batch.
        aggregation: "mean", "sum" or "first".
    """

    synchronization: str
    aggregation: str

    @property
    def is_gathered(self) -> bool:
        """True if the driver needs every replica's value."""
        return self.synchronization == "on_read" and self.aggregation != "first"

    @property
    def is_divided(self) -> bool:
        """True if each replica holds a share, and the shares add up to the value."""
        return self.synchronization == "on_read" and self.aggregation == "sum"


_MEAN, _FIRST = Aggregation("on_read", "mean"), Aggregation("on_read", "first")


def is_averaged(tensor: torch.Tensor) -> bool:
    """Return True for a dense floating-point buffer, whose default is that the driver reads the mean."""
    is_dense = tensor.layout is torch.strided
    return is_dense and tensor.is_floating_point() and not isinstance(tensor, torch.nn.Parameter)


def set_aggregation(
    module: torch.nn.Module, name: str, *, aggregation: str | ReduceOp, synchronization: str = "on_read"
) -> None:
    """Choose the rule that combines the values of a buffer on all replicas.

    By default the driver reads a floating-point buffer as the mean over replicas (running statistics), and any other
    buffer from the first replica; replicas with different values warn once, except for torch's BatchNorm. On one
    replica, and under `OneDeviceStrategy`, the choice changes nothing.

    | synchronization | aggregation | on the replicas | on the driver, in `state_dict()` |
    |---|---|---|---|
    | on_read | mean | each keeps its own | the mean |
    | on_read | sum | each keeps its own share | the sum |
    | on_read | first | each keeps its own | the first replica's |
    | on_write | mean | the mean, after each batch | the same |
    | on_write | sum | the sum of all additions since the last batch, after each batch | the same |
    | on_write | first | the first replica's, after each batch | the same |

    Values that the driver writes (`load_state_dict`, `copy_`) reach every replica. If the driver reads a sum, each
    replica gets an N-th part of the written value (rank 0 also the remainder of integers), so that the driver reads the
    same value again. Replicas without rows of a batch are left out. Copies and casts of the module keep the choice; it
    is no part of the `state_dict`. May be called at any time outside of steps: the value on the driver stays the same.

    Args:
        module: The module that has the buffer, or one around it.
        name: The buffer's name in `module.named_buffers()`.
        aggregation: "mean", "sum" or "first" (or "only_first_replica", `ReduceOp.MEAN`, `ReduceOp.SUM`). A mean needs a
            floating-point or complex buffer, a sum any buffer but a boolean one.
        synchronization: "on_read" or "on_write", see above.

    Raises:
        InvalidArgumentError: The module has no buffer of that name, or an argument has none of the values above.
        FailedPreconditionError: The function was called in a step.

    Source: tf.Variable's arguments `synchronization` and `aggregation`.

    >>> import torch
    >>> with rd.OneDeviceStrategy("cpu").scope():
    ...     model = torch.nn.BatchNorm1d(2)
    >>> rd.set_aggregation(model, "num_batches_tracked", aggregation="sum")
    >>> rd.set_aggregation(model, "num_batch", aggregation="sum")
    Traceback (most recent call last):
        ...
    raydist.core.errors.InvalidArgumentError: 'num_batch' must be a buffer of BatchNorm1d, which has 'running_mean', \
'running_var', 'num_batches_tracked'. Register it first, or correct the name.
    """
    if has_strategy() and not in_cross_replica_context():
        raise FailedPreconditionError(
            "rd.set_aggregation must be called by the driver, so that all replicas agree, but this call is in the step "
            "of one replica. Call it where the module is made, under the scope."
        )
    owner, key = _find(module, name)
    chosen = Aggregation(_synchronization(synchronization), _aggregation(aggregation))
    buffer: torch.Tensor | None = buffer_table(owner)[key]
    if buffer is not None and not is_lazy(buffer):
        _require_fit(buffer, name, chosen)
        with torch.no_grad():
            buffer.copy_(buffer.detach().clone())  # a write, so that the present value is divided among the replicas
    others = tuple(note for note in getattr(owner, _NOTE, ()) if note[0] != key)
    setattr(owner, _NOTE, (*others, (key, chosen.synchronization, chosen.aggregation)))


def is_chosen_for(module: torch.nn.Module) -> bool:
    """Return True if an aggregation was set for a buffer of this module itself."""
    return bool(attributes(module).get(_NOTE))


def _find(module: Any, name: str) -> tuple[torch.nn.Module, str]:
    """Return the module that has the buffer itself, and the buffer's name there."""
    if not isinstance(module, torch.nn.Module):
        raise InvalidArgumentError(
            f"A buffer belongs to a torch.nn.Module, got {type(module).__name__}: {module!r:.80}."
        )
    path, _, key = name.rpartition(".")
    owner = dict(module.named_modules(remove_duplicate=False)).get(path)
    if owner is not None and key in buffer_table(owner):
        return owner, key
    if name in dict(module.named_parameters(remove_duplicate=False)):
        raise InvalidArgumentError(
            f"{name!r} of {type(module).__name__} is a parameter: the same on every replica, because all apply the "
            f"same gradients. Only buffers are aggregated; RunOptions(gradient_reduce_op=) says how gradients meet."
        )
    names = ", ".join(repr(found) for found, _ in module.named_buffers(remove_duplicate=False)) or "none"
    raise InvalidArgumentError(
        f"{name!r} must be a buffer of {type(module).__name__}, which has {names}. Register it first, or correct the "
        "name."
    )


def _synchronization(value: Any) -> str:
    if str(value).lower() not in _SYNCHRONIZATIONS:
        raise InvalidArgumentError(
            f'synchronization must be "on_read" (each replica keeps its own value) or "on_write" (they agree after '
            f"each batch), got {value!r}."
        )
    return str(value).lower()


def _aggregation(value: Any) -> str:
    found = _AGGREGATIONS.get((value.name if isinstance(value, ReduceOp) else str(value)).lower())
    if found is None:
        raise InvalidArgumentError(
            f'aggregation must be "mean", "sum" or "first", got {value!r}. Without one, replicas differ unnoticed.'
        )
    return found


def _require_fit(buffer: torch.Tensor, name: str, chosen: Aggregation) -> None:
    how = chosen.aggregation
    is_mean_of_integers = how == "mean" and not (buffer.is_floating_point() or buffer.is_complex())
    is_sum_of_booleans = how == "sum" and buffer.dtype is torch.bool
    if is_mean_of_integers or is_sum_of_booleans:
        raise InvalidArgumentError(
            f"A {how} must be a value that the buffer can hold, {name!r} is {buffer.dtype}. "
            f'Use "first"{" or " + chr(34) + "sum" + chr(34) if is_mean_of_integers else ""}, or a float buffer.'
        )
    if buffer.layout is not torch.strided and chosen != _FIRST:
        raise InvalidArgumentError(
            f"Only dense buffers are aggregated, {name!r} is {buffer.layout}: it is read from the first replica "
            f'(synchronization="on_read", aggregation="first").'
        )


@final
class Aggregations:
    """The aggregations of the buffers of all modules on one side.

    Attributes:
        are_chosen: True if the program has set any aggregation.
    """

    def __init__(self) -> None:
        self._chosen: dict[int, Aggregation] = {}
        self.are_chosen = False

    def update(self, items: Iterable[tuple[int, Any]], handle_of: Callable[[Any], int | None]) -> None:
        """Read the choices of all modules again.

        Raises:
            FailedPreconditionError: Two modules share a buffer and have different choices for it.
        """
        self._chosen, self.are_chosen = {}, False
        for _, obj in items:
            held = attributes(obj) if isinstance(obj, torch.nn.Module) else {}
            for key, *chosen in held.get(_NOTE, ()):
                handle = handle_of(buffer_table(obj).get(key))
                if handle is not None:
                    self._choose(handle, Aggregation(*chosen), f"{key!r} of {type(obj).__name__}")

    def _choose(self, handle: int, chosen: Aggregation, name: str) -> None:
        before = self._chosen.setdefault(handle, chosen)
        self.are_chosen = True
        if before != chosen:
            raise FailedPreconditionError(
                f"A buffer that modules share must have one aggregation; {name} is {chosen}, and {before} in another "
                f"module. Call rd.set_aggregation alike for both."
            )

    def forget(self, handle: int) -> None:
        """Drop the choice for a buffer that the program has dropped."""
        self._chosen.pop(handle, None)
        self.are_chosen = bool(self._chosen)

    def of(self, handle: int, tensor: torch.Tensor) -> Aggregation:
        """Return the aggregation of a tensor; parameters are equal on all replicas."""
        return self._chosen.get(handle) or (_MEAN if is_averaged(tensor) else _FIRST)

    def written(self) -> list[tuple[int, str]]:
        """Return the handles of buffers that replicas agree on after each batch, each with the aggregation."""
        if not self._chosen:
            return []
        chosen = sorted(self._chosen.items())
        return [(handle, found.aggregation) for handle, found in chosen if found.synchronization == "on_write"]
