"""Optimizer states of a checkpoint: compare with the current states, and load with the saved dtypes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from raydist.checkpoints.differences import Difference, tensor_differences
from raydist.checkpoints.optimizer_names import keep_types
from raydist.checkpoints.sharing.restore_orders import StoredMemory
from raydist.checkpoints.tensor_file import FilePlace
from raydist.errors import InvalidArgumentError
from raydist.parameter_servers.optimizers import bare_optimizer

__all__ = ["memory_differences", "taken_options", "taken_state"]

# torch wraps the method for its compiler, which the wrapper would import.
_load = inspect.unwrap(torch.optim.Optimizer.load_state_dict)

_Kind = type[torch.optim.Optimizer]


def memory_differences(
    memories: Sequence[StoredMemory],
    state_of: Callable[[StoredMemory], Mapping[str, Any]],
    places: Mapping[str, Mapping[str, FilePlace]],
    like: Mapping[int, torch.Tensor],
) -> dict[str, tuple[Difference, ...]]:
    """Return, by optimizer name, the differences in shape or dtype between current and saved optimizer states.

    Args:
        memories: The optimizer states to load.
        state_of: Returns the current optimizer state of a slice.
        places: Locations of the tensors, by object of the checkpoint.
        like: A tensor of the slice's shape, by number of the slice.
    """
    found: dict[str, tuple[Difference, ...]] = {}
    for memory in memories:
        common = _common(memory, state_of(memory), places[memory.saved], like[memory.number])
        found[memory.owner] = (*found.get(memory.owner, ()), *tensor_differences(memory.owner, common))
    return {name: several for name, several in found.items() if several}


def _common(
    memory: StoredMemory, now: Mapping[str, Any], places: Mapping[str, FilePlace], like: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor, FilePlace]]:
    """Yield tensors that are in the current and in the saved state, with the shape for the whole variable."""
    for name, value in now.items():
        key = f"{memory.parameter}.{name}"
        if key in places and isinstance(value, torch.Tensor):
            is_like = bool(memory.shape) and value.shape == like.shape
            shape = memory.shape if is_like else tuple(value.shape)
            yield key, torch.empty(shape, dtype=value.dtype, device="meta"), places[key]


def taken_state(memory: StoredMemory, state: Any, kind: _Kind, dtype: torch.dtype) -> Mapping[str, Any]:
    """Return the state of a slice in an optimizer that has loaded `state`.

    Args:
        memory: Description of the optimizer state.
        state: The saved state, with its tensors.
        kind: Class of the optimizer.
        dtype: dtype of the slice.

    Raises:
        InvalidArgumentError: The optimizer rejects the state.
    """
    stand_in = torch.empty(0, dtype=dtype)
    optimizer = bare_optimizer(kind, [(memory.options, [stand_in])])
    _give(memory.owner, optimizer, {0: state}, [{**memory.options, "params": [0]}])
    taken: Mapping[str, Any] = optimizer.state[stand_in]
    return taken


def taken_options(
    owner: str, optimizer: torch.optim.Optimizer, saved: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the options of an optimizer's groups as if it had loaded saved groups. The optimizer is not changed.

    Args:
        owner: Name of the optimizer, for messages.
        optimizer: The optimizer.
        saved: Saved groups; only the length of "params" matters.

    Raises:
        InvalidArgumentError: The optimizer rejects the groups.

    >>> adam = torch.optim.Adam([torch.zeros(1)], lr=0.5)
    >>> taken_options("optimizer", adam, [{"lr": 0.1, "params": ["weight"]}])[0]["lr"]
    0.1
    """
    bare = bare_optimizer(
        type(optimizer), [(group, [torch.empty(0) for _ in group["params"]]) for group in optimizer.param_groups]
    )
    _give(owner, bare, {}, [{**group, "params": list(range(len(group["params"])))} for group in saved])
    return [{name: value for name, value in group.items() if name != "params"} for group in bare.param_groups]


def _give(
    owner: str, optimizer: torch.optim.Optimizer, state: Mapping[int, Any], groups: Sequence[Mapping[str, Any]]
) -> None:
    loaded = {"state": dict(state), "param_groups": list(groups)}
    try:
        _load(optimizer, loaded)
        keep_types(optimizer, loaded)
    except Exception as error:
        raise InvalidArgumentError(
            f"The saved state of {owner!r} must be one that a {type(optimizer).__name__} takes, but load_state_dict "
            f"says: {error!s:.500} ({type(error).__name__}). Restore into one like that which was saved."
        ) from error
