"""Access of an embedding to its rows, in this process or elsewhere.

The parameter of an embedding, of shape (0, dim), stands for its table: optimizers and strategies use the parameter. A
`TableMark`, an attribute of the parameter, holds the table's other properties. A running step sets the access; without
any, the rows lie in this process. The first such table of a process registers two hooks for the steps of all
optimizers: before a step, a hook removes gradients of rows, which torch's own step cannot use; afterwards, a hook
applies them to the tables and puts them back.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol, final

import torch
from torch.optim import optimizer as torch_optimizer

from raydist.compat.torch_internals import disable_compiler
from raydist.errors import FailedPreconditionError
from raydist.parameter_servers.rows.row_gradient import RowGradient
from raydist.parameter_servers.rows.row_table import RowTable
from raydist.parameter_servers.rows.table_spec import EmbeddingTableSpec

__all__ = [
    "LocalRows",
    "RowAccess",
    "TableMark",
    "access_to",
    "attach_access",
    "held_rows",
    "hold_rows",
    "mark_of",
    "mark_table",
    "reading_rows",
    "row_access",
    "spec_of",
    "take_held_rows",
]


_MARK = "_raydist_table"


class RowAccess(Protocol):
    """The interface to the rows of tables."""

    def pull(self, weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return present values of rows; rows are made when first touched.

        Args:
            weight: The parameter that stands for the table; `spec_of(weight)` describes it.
            rows: Row numbers: int64, on the CPU, rising, all of them in range.

        Returns:
            One row for each number, of the table's dtype, on the CPU, in memory of the caller's own.
        """

    def export_rows(self, weight: torch.Tensor) -> list[dict[str, Any]]:
        """Return `RowTable.state` of every server."""

    def import_rows(self, weight: torch.Tensor, states: Sequence[Mapping[str, Any]]) -> None:
        """Replace all rows of a table by results of `export_rows`, of any number of servers."""


@final
class TableMark:
    """The properties of a table that its parameter carries in this process.

    Attributes:
        spec: Description of the table.
        access: Access to the rows outside of steps (the driver's); None if the rows lie in this process.
        local: Access to rows in this process, once there are any.
    """

    def __init__(self, spec: EmbeddingTableSpec) -> None:
        self.spec = spec
        self.access: RowAccess | None = None
        self.local: RowAccess | None = None


# A context variable, because each worker's step runs in its own thread.
_reading: ContextVar[RowAccess | None] = ContextVar("raydist_rows", default=None)


@contextlib.contextmanager
def reading_rows(access: RowAccess) -> Iterator[None]:
    """Make embeddings in the block find their rows by `access`."""
    token = _reading.set(access)
    try:
        yield
    finally:
        _reading.reset(token)


def row_access() -> RowAccess | None:
    """Return the access of the innermost `reading_rows`, or None."""
    return _reading.get()


def mark_table(weight: torch.Tensor, spec: EmbeddingTableSpec) -> TableMark:
    """Make a parameter stand for a table; copies and unpickled parameters must be marked again."""
    mark = TableMark(spec)
    weight.__dict__[_MARK] = mark
    return mark


def mark_of(weight: torch.Tensor) -> TableMark | None:
    """Return the mark of a parameter that stands for a table; None for other parameters."""
    return weight.__dict__.get(_MARK)


def spec_of(weight: torch.Tensor) -> EmbeddingTableSpec | None:
    """Return the description of the table that a parameter stands for; None for other parameters."""
    mark = mark_of(weight)
    return None if mark is None else mark.spec


def attach_access(weight: torch.Tensor, access: RowAccess | None) -> None:
    """Declare that the rows of `weight` lie elsewhere; rows in this process, if any, are dropped.

    Args:
        weight: The parameter that stands for the table.
        access: Access to the rows outside of `reading_rows`.
    """
    mark = mark_of(weight)
    if mark is not None:
        mark.access, mark.local = access, None


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
