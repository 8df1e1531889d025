"""What optimizers remember: as tensors that can lie in shared memory, and as values that cannot. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from raydist.storage.placed import TensorPlace, can_be_placed

__all__ = ["StateImage", "parameters_of", "remembered", "same_memories", "take_state", "tensors_of"]

_PLAIN = (bool, int, float, str, bytes, type(None))


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Every parameter of an optimizer, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def remembered(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, Any, Any]]:
    """(number of the parameter, key, value) of all that is kept by parameter, in an order that its steps keep.

    >>> layer = torch.nn.Linear(1, 1, bias=False)
    >>> sgd = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.5)
    >>> layer(torch.ones(1)).backward(); sgd.step()
    >>> [(number, key) for number, key, _ in remembered(sgd)]
    [(0, 'momentum_buffer')]
    """
    for number, parameter in enumerate(parameters_of(optimizer)):
        if parameter in optimizer.state:
            yield from ((number, key, value) for key, value in optimizer.state[parameter].items())


def tensors_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What it remembers in tensors that can be placed in a shard."""
    return [value for _, _, value in remembered(optimizer) if can_be_placed(value)]


def same_memories(before: Sequence[tuple[int, Any, Any]], after: Sequence[tuple[int, Any, Any]]) -> bool:
    """Whether an optimizer keeps the same tensors and the same plain values; others (lists, say) may have changed."""
    return len(before) == len(after) and all(
        one[:2] == other[:2] and _same(one[2], other[2]) for one, other in zip(before, after, strict=True)
    )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one is other and can_be_placed(one)
    return isinstance(one, _PLAIN) and type(one) is type(other) and bool(one == other)


@final
@dataclass(frozen=True, slots=True)
class StateImage:
    """What an optimizer remembers, for those who map its tensors.

    Attributes:
        entries: (number of the parameter, key, where the tensor lies, or the value itself).
        others: What it keeps under other keys than its parameters.
    """

    entries: tuple[tuple[int, Any, Any], ...]
    others: dict[Any, Any]

    @staticmethod
    def of(optimizer: torch.optim.Optimizer, place_of: Callable[[torch.Tensor], TensorPlace]) -> StateImage:
        """The present state; `place_of` tells where a tensor lies."""
        known = set(parameters_of(optimizer))
        entries = tuple(
            (number, key, place_of(value) if can_be_placed(value) else value)
            for number, key, value in remembered(optimizer)
        )
        return StateImage(entries, {key: value for key, value in optimizer.state.items() if key not in known})


def take_state(
    optimizer: torch.optim.Optimizer, image: StateImage, bind: Callable[[torch.Tensor, TensorPlace], None]
) -> None:
    """Let an optimizer remember what `image` says; `bind` lets a tensor show what lies at a place.

    Tensors that it has under the same key stay the same objects.
    """
    parameters = parameters_of(optimizer)
    held = {(number, key): value for number, key, value in remembered(optimizer)}
    optimizer.state.clear()
    optimizer.state.update(image.others)
    for number, key, value in image.entries:
        if isinstance(value, TensorPlace):
            before = held.get((number, key))
            tensor = before if isinstance(before, torch.Tensor) else torch.empty(0, dtype=value.dtype)
            bind(tensor, value)
            value = tensor
        optimizer.state[parameters[number]][key] = value
