"""The slices that a worker knows: their versions, and their parts of gradients and optimizer states."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import torch

from raydist.parameter_servers.slices import PsSlice

NEVER = -1


SlicesByHandle = dict[int, tuple[PsSlice, ...]]
"""By handle of a variable its slices, in the order of their rows."""


def add_slices(known: SlicesByHandle, slices: Iterable[PsSlice]) -> list[int]:
    """Add slices of variables that have none yet; return the handles of these variables."""
    found: SlicesByHandle = {}
    for each in slices:
        if each.handle not in known:
            found[each.handle] = (*found.get(each.handle, ()), each)
    known.update((handle, tuple(sorted(parts, key=lambda part: part.begin))) for handle, parts in found.items())
    return list(found)


@final
class ReadVersions:
    """The versions of one server's slices that a worker holds, and the newest version that it knows.

    >>> read = ReadVersions()
    >>> read.note([1, 2], 5)
    >>> read.note_change([1], 6)  # nobody else changed anything: slice 2 is as it was
    >>> read.older_than(6), read.older_than(7), read.newest
    ([], [1, 2], 6)
    """

    def __init__(self) -> None:
        self.newest = 0
        self._at: dict[int, int] = {}

    def add(self, numbers: Iterable[int]) -> None:
        """Add slices that were not read yet."""
        for number in numbers:
            self._at.setdefault(number, NEVER)

    def drop(self, numbers: Iterable[int]) -> None:
        """Remove slices."""
        for number in numbers:
            self._at.pop(number, None)

    def forget(self, numbers: Iterable[int] | None = None) -> None:
        """Mark these slices, or all, as not read."""
        self._at.update(dict.fromkeys(list(self._at) if numbers is None else numbers, NEVER))

    def is_of(self, number: int, version: int) -> bool:
        """Return True if the worker holds this version of a slice."""
        return self._at.get(number, NEVER) == version

    def note(self, numbers: Sequence[int], version: int) -> None:
        """Record that slices were read in a version."""
        self._at.update(dict.fromkeys(numbers, version))
        self.newest = max(self.newest, version)

    def note_change(self, numbers: Sequence[int], version: int) -> None:
        """Record that this worker's change of slices made a version, and that it holds the changed values."""
        before = version - 1
        self._at = {number: version if at == before else at for number, at in self._at.items()}
        self.note(numbers, version)

    def older_than(self, version: int) -> list[int]:
        """Return the slices of which an older version is held."""
        return [number for number, at in self._at.items() if at < version]

    def oldest(self, numbers: Iterable[int]) -> int:
        """Return the oldest version that is held of some slices."""
        return min((self._at.get(number, NEVER) for number in numbers), default=self.newest)


Form = Literal["dense", "rows"]


@final
@dataclass(frozen=True, slots=True, eq=False)
class GradientCut:
    """The part of a push for one server."""

    slices: tuple[int, ...]
    forms: tuple[Form, ...]  # form of each slice's gradient
    # for each slice the position of its gradient, and the slice; None if it is the whole variable
    places: tuple[tuple[int, PsSlice | None], ...]

    def tensors(self, gradients: Sequence[torch.Tensor | tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        """Return the tensors of the push.

        Args:
            gradients: Gradients, indexed by `places`; sparse ones as `rows_and_values`.
        """
        found: list[torch.Tensor] = []
        for place, part in self.places:
            gradient = gradients[place]
            if isinstance(gradient, torch.Tensor):
                found.append(gradient if part is None else part.within(gradient))
            else:
                found.extend(gradient if part is None else _rows_within(part, *gradient))
        return found


def form_of(gradient: torch.Tensor) -> Form:
    """Return the form of a gradient in a push: "rows" for sparse gradients of whole rows."""
    return "rows" if gradient.is_sparse and gradient.sparse_dim() == 1 else "dense"


def rows_and_values(gradient: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return a dense gradient as it is; of a gradient of rows, the rows, rising, and their values."""
    if gradient.layout is torch.strided:
        return gradient.detach()
    if form_of(gradient) == "dense":
        return gradient.detach().to_dense()
    whole = gradient.detach().coalesce()
    return whole.indices()[0], whole.values()


def cut_gradients(slices: Sequence[Sequence[PsSlice]], forms: Sequence[Form]) -> dict[int, GradientCut]:
    """Return, by server, its parts of the gradients."""
    found: dict[int, list[tuple[int, PsSlice]]] = {}
    for place, parts in enumerate(slices):
        for part in parts:
            found.setdefault(part.server, []).append((place, part))
    return {
        server: GradientCut(
            tuple(part.number for _, part in places),
            tuple(forms[place] for place, _ in places),
            tuple((place, None if len(slices[place]) == 1 else part) for place, part in places),
        )
        for server, places in found.items()
    }


def _rows_within(part: PsSlice, rows: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of one slice, counted from its first. An empty result is pushed, too: it counts as a step."""
    edges = torch.tensor([part.begin, part.begin + part.shape[0]])
    begin, end = torch.searchsorted(rows, edges).tolist()
    return rows[begin:end] - part.begin, values[begin:end]


def cut_state(state: Mapping[str, Any], shape: Sequence[int], slices: Sequence[PsSlice]) -> dict[int, dict[str, Any]]:
    """Cut a state by slice number: a slice gets its rows of entries of the variable's shape, and copies of others."""
    return {
        part.number: {
            name: _copied(_within(part, value)) if _is_like(value, shape) else _copied(value)
            for name, value in state.items()
        }
        for part in slices
    }


def joined_state(
    states: Mapping[int, Mapping[str, Any]], shape: Sequence[int], slices: Sequence[PsSlice]
) -> dict[str, Any]:
    """Undo `cut_state`; empty if the slices have no state yet.

    Args:
        states: States by slice number; there may be others.
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


def _within(part: PsSlice, value: torch.Tensor) -> torch.Tensor:
    """Return a slice's part; torch has no views of sparse tensors, as momentum of rows is."""
    if value.layout is torch.strided:
        return part.within(value)
    return value if part.shape == tuple(value.shape) else value.narrow_copy(0, part.begin, part.shape[0])


def _is_like(value: Any, shape: Sequence[int]) -> bool:
    return isinstance(value, torch.Tensor) and bool(shape) and tuple(value.shape) == tuple(shape)


def _copied(value: Any) -> Any:
    """Copy a value, lists too: each slice has its own, because servers step slices independently."""
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
