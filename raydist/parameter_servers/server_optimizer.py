"""A user's optimizer over the slices and tables of one server, and the gradients that it applies."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch

from raydist.core.errors import InvalidArgumentError
from raydist.parameter_servers.optimizers import (
    bare_optimizer,
    has_fused_layout,
    is_of_torch,
    may_fuse,
    server_options,
    step_bare,
)
from raydist.parameter_servers.requests import OptimizerGroup, Push
from raydist.parameter_servers.row_table import RowTable
from raydist.parameter_servers.server_slices import PsSlices
from raydist.parameter_servers.slices import PsSlice


@final
@dataclass(frozen=True, slots=True, eq=False)
class PushedRows:
    """Gradients of some rows; the gradients of a repeated row are added up."""

    rows: torch.Tensor  # int64 row numbers
    values: torch.Tensor  # a gradient for each row, as large as the row

    def sparse(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the gradients as a sparse tensor, as torch's optimizers take it."""
        return torch.sparse_coo_tensor(self.rows[None], self.values, shape, check_invariants=False)


@final
@dataclass(frozen=True, slots=True, eq=False)
class ServerGradients:
    """The gradients of one `Push` to one server."""

    # by slice number a tensor of the slice's shape, or gradients of some rows
    slices: Mapping[int, torch.Tensor | PushedRows]
    tables: Mapping[int, PushedRows]  # gradients of embedding tables, by handle


def read_gradients(push: Push, tensors: Sequence[torch.Tensor], values: PsSlices) -> ServerGradients:
    """Return the gradients of a push, without copies."""
    wanted = sum(1 if form == "dense" else 2 for form in push.forms) + 2 * len(push.tables)
    if len(push.forms) != len(push.slices) or len(tensors) != wanted:
        raise InvalidArgumentError(
            f"A push of {len(push.slices)} slices in {len(push.forms)} forms and {len(push.tables)} tables must bring "
            f"{wanted} tensors, got {len(tensors)}. Give one for a dense gradient, two for rows."
        )
    left = iter(tensors)
    slices: dict[int, torch.Tensor | PushedRows] = {}
    for number, form in zip(push.slices, push.forms, strict=True):
        known = values.slice(number)
        slices[number] = _dense(next(left), known) if form == "dense" else _rows(left, known)
    return ServerGradients(slices, {handle: PushedRows(next(left), next(left)) for handle in push.tables})


def _dense(gradient: torch.Tensor, known: PsSlice) -> torch.Tensor:
    if gradient.shape != known.shape or gradient.dtype != known.dtype:
        raise InvalidArgumentError(
            f"The gradient of {known.name} must be {known.dtype} of shape {known.shape}, got {gradient.dtype} of shape "
            f"{tuple(gradient.shape)}. Push the slice's own rows."
        )
    return gradient


def _rows(left: Iterator[torch.Tensor], known: PsSlice) -> PushedRows:
    rows, values = next(left), next(left)
    if values.shape != (len(rows), *known.shape[1:]) or values.dtype != known.dtype or rows.dtype != torch.int64:
        raise InvalidArgumentError(
            f"A gradient of rows of {known.name} must be int64 rows and {known.dtype} values of shape "
            f"(rows, {', '.join(map(str, known.shape[1:]))}), got {rows.dtype} of shape {tuple(rows.shape)} and "
            f"{values.dtype} of shape {tuple(values.shape)}. Push one value for each row."
        )
    if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= known.shape[0]):
        raise InvalidArgumentError(
            f"Rows of {known.name} must be in [0, {known.shape[0]}), got [{int(rows.min())}, {int(rows.max())}]. Count "
            "them from the slice's first row."
        )
    return PushedRows(rows, values)


@final
class ServerOptimizer:
    """One optimizer. Its state lies on the server, too."""

    def __init__(
        self,
        kind: type[torch.optim.Optimizer],
        groups: Sequence[OptimizerGroup],
        values: PsSlices,
        tables: Mapping[int, RowTable],
    ) -> None:
        self.kind = kind
        self._values = values
        self._tables = tables
        self._optimizer = bare_optimizer(kind, [(group.options, ()) for group in groups])
        self._groups: tuple[OptimizerGroup, ...] = ()
        self._told: list[Mapping[str, Any]] = []
        self._dtypes: list[frozenset[torch.dtype]] = []
        self.slices: frozenset[int] = frozenset()  # numbers of the slices in its groups
        # numbers of these slices, and of slices that were in a group before or were given a state: their states are
        # kept, as torch does
        self.known: frozenset[int] = frozenset()
        self.change_groups(groups)

    def change_groups(self, groups: Sequence[OptimizerGroup]) -> None:
        """Replace the groups; states of slices are kept, in whatever groups the slices are."""
        for group in groups:
            for handle in group.tables:
                self._tables[handle].require_optimizer(self.kind, server_options(group.options))
        self._optimizer.param_groups[:] = [{"params": [], **server_options(group.options)} for group in groups]
        self._groups = tuple(groups)
        self._told = [group.options for group in groups]
        self._take_members()

    def drop(self, slices: Collection[int], tables: Collection[int]) -> None:
        """Drop slices and tables while their values still exist; options stay."""
        gone = self.known & frozenset(slices)
        if not gone and not any(handle in tables for group in self._groups for handle in group.tables):
            return
        for number in gone:
            self._optimizer.state.pop(self._values.value(number), None)
        self.known -= gone
        self._groups = tuple(
            replace(
                group,
                slices=tuple(number for number in group.slices if number not in gone),
                tables=tuple(handle for handle in group.tables if handle not in tables),
            )
            for group in self._groups
        )
        self._take_members()

    def _take_members(self) -> None:
        """Fill the groups with the tensors of their slices."""
        tensors = [[self._values.value(number) for number in group.slices] for group in self._groups]
        for group, mine in zip(self._optimizer.param_groups, tensors, strict=True):
            group["params"] = mine
        self._dtypes = [frozenset(tensor.dtype for tensor in mine) for mine in tensors]
        self.slices = frozenset(number for group in self._groups for number in group.slices)
        self.known |= self.slices

    def require_known(self, gradients: ServerGradients) -> None:
        """Check that the optimizer has all slices and tables of these gradients."""
        tables = {handle for group in self._groups for handle in group.tables}
        strange = [number for number in gradients.slices if number not in self.slices]
        strange += [handle for handle in gradients.tables if handle not in tables]
        if strange:
            raise InvalidArgumentError(
                f"Gradients must be of slices and tables in the groups of the {self.kind.__name__} that applies them, "
                f"got {strange}. Add them to its groups first."
            )

    def change_options(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Replace the options of the groups."""
        if len(options) != len(self._optimizer.param_groups):
            raise InvalidArgumentError(
                f"Options must be given for each of the {len(self._optimizer.param_groups)} groups of a "
                f"{self.kind.__name__}, got {len(options)}. Add the new group to the servers first."
            )
        for group, mine in zip(self._optimizer.param_groups, options, strict=True):
            group.update(server_options(mine))
        self._told = list(options)

    def step(self, gradients: ServerGradients) -> None:
        """Apply gradients to slices; slices without one stay as they are. Gradients are not kept."""
        if not gradients.slices:
            return
        touched: list[torch.Tensor] = []
        self._choose_passes(gradients)
        try:
            for number, gradient in gradients.slices.items():
                value = self._values.value(number)
                touched.append(value)
                value.grad = self._as_taken(gradient, value)
            step_bare(self._optimizer)
        finally:
            for value in touched:
                value.grad = None

    def step_tables(self, gradients: ServerGradients) -> None:
        """Apply gradients to rows of tables."""
        for group, options in zip(self._groups, self._optimizer.param_groups, strict=True):
            told = {name: value for name, value in options.items() if name != "params"}
            for handle in group.tables:
                gradient = gradients.tables.get(handle)
                if gradient is not None:
                    self._tables[handle].push(gradient.rows, gradient.values, self.kind, told)

    def _choose_passes(self, gradients: ServerGradients) -> None:
        """Use torch's fused kernels where they fit: not for gradients of some rows."""
        some = any(isinstance(gradient, PushedRows) for gradient in gradients.slices.values())
        for place, (group, told) in enumerate(zip(self._optimizer.param_groups, self._told, strict=True)):
            if may_fuse(self.kind, told, self._dtypes[place]):
                group["fused"] = not some and self._fit_one_pass(self._groups[place].slices, gradients.slices)

    def _fit_one_pass(self, mine: Sequence[int], gradients: Mapping[int, Any]) -> bool:
        """Return True if torch's fused kernel can step all of a group's slices that have a gradient."""
        alike: set[tuple[str, ...]] = set()
        for number in mine:
            gradient = gradients.get(number)
            if gradient is None:
                continue
            value = self._values.value(number)
            state = self._optimizer.state.get(value, {})
            alike.add(tuple(sorted([name for name, each in state.items() if each is not None])))
            if not has_fused_layout(value, gradient, state):
                return False
        return len(alike) < 2  # the fused kernel needs momentum for all slices or for none

    def _as_taken(self, gradient: torch.Tensor | PushedRows, value: torch.Tensor) -> torch.Tensor:
        taken = gradient.sparse(tuple(value.shape)) if isinstance(gradient, PushedRows) else gradient
        return taken if is_of_torch(self.kind) else taken.clone()  # torch's optimizers keep no gradient after the step

    def state(self) -> dict[int, dict[str, Any]]:
        """Return copies of the states by slice number, including slices that are in no group any more."""
        known = {number: self._optimizer.state.get(self._values.value(number)) for number in sorted(self.known)}
        return {
            number: {name: _copied(each) for name, each in state.items()} for number, state in known.items() if state
        }

    def remembered(self, number: int) -> Mapping[str, Any]:
        """Return the state of one slice; empty before its first step."""
        found: Mapping[str, Any] = self._optimizer.state.get(self._values.value(number), {})
        return found

    def set_state(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Replace all states; slices that are not in `states` have none afterwards."""
        self.require_slices(states)
        self.known |= states.keys()
        for number in self.known:
            value = self._values.value(number)
            self._optimizer.state.pop(value, None)
            if states.get(number):
                self._optimizer.state[value] = {name: _copied(each) for name, each in states[number].items()}

    def require_slices(self, numbers: Iterable[int]) -> None:
        """Raise InvalidArgumentError unless the server has all of these slices, in groups or not."""
        for number in numbers:
            self._values.slice(number)

    def replace_state(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Replace the states of these slices; others keep theirs. Tensors are not copied."""
        self.known |= states.keys()
        for number, state in states.items():
            value = self._values.value(number)
            self._optimizer.state.pop(value, None)
            if state:
                self._optimizer.state[value] = dict(state)

    @property
    def num_bytes(self) -> int:
        """Size of all state tensors in bytes."""
        states = self._optimizer.state.values()
        return sum(_num_bytes(each) for state in states for each in state.values() if isinstance(each, torch.Tensor))


def _num_bytes(tensor: torch.Tensor) -> int:
    if tensor.layout is torch.sparse_coo:  # momentum of rows is sparse at first
        tensor = tensor.coalesce()
        return tensor.indices().nbytes + tensor.values().nbytes
    return tensor.nbytes


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
