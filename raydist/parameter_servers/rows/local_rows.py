"""Rows that lie in this process, and the hooks by which an optimizer's step reaches them.

The first table of a process registers two hooks for the steps of all its optimizers. Before a step, a hook removes
gradients of rows, which torch's own step cannot use; afterwards, a hook applies them to the tables and puts them back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch.optim import optimizer as torch_optimizer

from raydist.compat.torch_internals import disable_compiler
from raydist.errors import FailedPreconditionError
from raydist.parameter_servers.rows.access import RowAccess, TableMark, mark_of, row_access
from raydist.parameter_servers.rows.row_gradient import RowGradient
from raydist.parameter_servers.rows.row_table import RowTable
from raydist.parameter_servers.rows.table_spec import EmbeddingTableSpec

__all__ = ["LocalRows", "access_to", "held_rows", "hold_rows", "take_held_rows"]


@final
class LocalRows:
    """A table of this process (a `RowAccess`).

    Args:
        spec: Description of the table.

    Attributes:
        table: Rows of the table.
        taken: The gradient that is removed during a step.
    """

    def __init__(self, spec: EmbeddingTableSpec) -> None:
        self.table = RowTable(spec)
        self.taken: RowGradient | None = None

    def pull(self, weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self.table.pull(rows)

    def export_rows(self, weight: torch.Tensor) -> list[dict[str, Any]]:
        return [self.table.state()]

    def import_rows(self, weight: torch.Tensor, states: Sequence[Mapping[str, Any]]) -> None:
        self.table.load(states)


def access_to(weight: torch.Tensor) -> RowAccess:
    """Return the access to the rows of a table. Without any, the rows lie in this process from now on.

    Args:
        weight: The parameter that stands for the table.
    """
    mark = mark_of(weight)
    if mark is None:
        raise FailedPreconditionError("raydist bug: a parameter must stand for a table where its rows are asked for.")
    return row_access() or mark.access or _local(mark)


def _local(mark: TableMark) -> LocalRows:
    if not isinstance(mark.local, LocalRows):
        mark.local = LocalRows(mark.spec)
        _hook_into_torch()
    return mark.local


@functools.cache
def _hook_into_torch() -> None:
    torch_optimizer.register_optimizer_step_pre_hook(_before_step)
    torch_optimizer.register_optimizer_step_post_hook(_after_step)


def held_rows(weight: torch.Tensor) -> list[dict[str, Any]]:
    """Return the `export_rows` of rows in this process; empty if no row was touched."""
    mark = mark_of(weight)
    local = None if mark is None else mark.local
    return local.export_rows(weight) if isinstance(local, LocalRows) and local.table.num_rows else []


def take_held_rows(weight: torch.Tensor) -> list[dict[str, Any]]:
    """Return `held_rows` and drop them here: they move elsewhere."""
    states, mark = held_rows(weight), mark_of(weight)
    if mark is not None:
        mark.local = None
    return states


def hold_rows(weight: torch.Tensor, states: Sequence[Mapping[str, Any]]) -> None:
    """Load these rows into this process."""
    mark = mark_of(weight)
    if mark is not None and states:
        _local(mark).import_rows(weight, states)


def _tables(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, LocalRows, dict[str, Any]]]:
    """Return the tables of this process that an optimizer has, each with its group."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            mark = mark_of(parameter)
            if mark is not None and isinstance(mark.local, LocalRows):
                yield parameter, mark.local, group


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _take_gradients(optimizer: torch.optim.Optimizer) -> None:
    for parameter, local, _ in _tables(optimizer):
        local.taken = None
        if isinstance(parameter.grad, RowGradient):
            local.taken, parameter.grad = parameter.grad, None


@disable_compiler  # the hook runs within compiled steps, and cannot be traced
def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A global hook of torch; `args` begin with the optimizer."""
    tables = list(_tables(optimizer))
    if not tables:
        return None
    for _, local, group in tables:
        local.table.require_optimizer(type(optimizer), _options(group))
    _take_gradients(optimizer)

    def around(closure: Any) -> Any:
        return _taking_after(closure, optimizer) if callable(closure) else closure

    return (optimizer, *map(around, args[1:])), {name: around(value) for name, value in kwargs.items()}


def _taking_after(closure: Callable[[], Any], optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """Wrap a closure that computes gradients, so that a step may use it."""

    def closed() -> Any:
        loss = closure()
        _take_gradients(optimizer)
        return loss

    return closed


@disable_compiler
def _after_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A global hook of torch."""
    for parameter, local, group in _tables(optimizer):
        gradient, local.taken = local.taken, None
        if gradient is not None:
            rows, values = gradient.joined()
            local.table.push(rows, values.cpu(), type(optimizer), _options(group))
            parameter.grad = gradient
