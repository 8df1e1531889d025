"""An optimizer's state of a variable, cut into states of the variable's slices, and joined again."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from raydist.parameter_servers.slices import ServedSlice

__all__ = ["cut_state", "joined_state"]


def cut_state(
    state: Mapping[str, Any], shape: Sequence[int], slices: Sequence[ServedSlice]
) -> dict[int, dict[str, Any]]:
    """Cut a state by slice number: a slice gets its rows of entries of the variable's shape, and copies of others."""
    return {
        part.number: {
            name: _copied(_within(part, value)) if _is_like(value, shape) else _copied(value)
            for name, value in state.items()
        }
        for part in slices
    }


def joined_state(
    states: Mapping[int, Mapping[str, Any]], shape: Sequence[int], slices: Sequence[ServedSlice]
) -> dict[str, Any]:
    """Undo `cut_state`; empty if the slices have no state yet.

    Args:
        states: States by slice number; there may be others.
        shape: Shape of the variable.
        slices: Slices of the variable, in the order of their rows.
    """
    parts = [(part, states[part.number]) for part in slices if states.get(part.number)]
    if not parts:
        return {}
    joined: dict[str, Any] = {}
    for name in parts[0][1]:
        values = [state[name] for _, state in parts if name in state]
        fits = len(parts) == len(slices) and all(
            _is_like(value, part.shape) for value, (part, _) in zip(values, parts, strict=False)
        )
        whole = fits and len(values) == len(slices) and bool(shape)
        joined[name] = torch.cat(values) if whole else _copied(values[0])
    return joined


def _within(part: ServedSlice, value: torch.Tensor) -> torch.Tensor:
    """Return a slice's part; torch has no views of sparse tensors, as momentum of rows is."""
    if value.layout is torch.strided:
        return part.within(value)
    return value if part.shape == tuple(value.shape) else value.narrow_copy(0, part.begin, part.shape[0])


def _is_like(value: Any, shape: Sequence[int]) -> bool:
    return isinstance(value, torch.Tensor) and bool(shape) and tuple(value.shape) == tuple(shape)


def _copied(value: Any) -> Any:
    """Copy a value, lists too: each slice has its own, because servers step slices independently."""
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
