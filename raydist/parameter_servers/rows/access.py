"""How an embedding reaches its rows: whoever runs a step says so, and where nobody does they lie in this process.

The parameter of an embedding, of shape (0, dim), stands for its table: optimizers name it, strategies give it a handle.
What else is known of the table hangs on the parameter, as a `TableMark`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol, final

import torch

from raydist.parameter_servers.rows.table_spec import EmbeddingTableSpec

__all__ = ["RowAccess", "TableMark", "attach_access", "mark_of", "mark_table", "reading_rows", "row_access", "spec_of"]

_MARK = "_raydist_table"


class RowAccess(Protocol):
    """Where the rows of tables lie, and the way to them."""

    def pull(self, weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Present values of rows, made where they are touched for the first time.

        Args:
            weight: The parameter that stands for the table; `spec_of(weight)` describes it.
            rows: Their numbers: int64, on the CPU, rising, all of them in range.

        Returns:
            One row for each, of the table's dtype, on the CPU, in memory that nobody else uses.
        """

    def export_rows(self, weight: torch.Tensor) -> list[dict[str, Any]]:
        """`RowTable.state` of every server."""

    def import_rows(self, weight: torch.Tensor, states: Sequence[Mapping[str, Any]]) -> None:
        """Replace all rows of a table by what `export_rows` gave, of any number of servers."""


@final
class TableMark:
    """What hangs on the parameter of an embedding in this process.

    Attributes:
        spec: Of the table.
        access: The way to its rows outside of steps (the driver's); None where it is this process that has them.
        local: The access to rows in this process, once there are any.
    """

    def __init__(self, spec: EmbeddingTableSpec) -> None:
        self.spec = spec
        self.access: RowAccess | None = None
        self.local: RowAccess | None = None


# Per thread: a worker's step runs in one of them.
_reading: ContextVar[RowAccess | None] = ContextVar("raydist_rows", default=None)


@contextlib.contextmanager
def reading_rows(access: RowAccess) -> Iterator[None]:
    """Let embeddings in the block find their rows by `access`."""
    token = _reading.set(access)
    try:
        yield
    finally:
        _reading.reset(token)


def row_access() -> RowAccess | None:
    """The innermost `reading_rows`, None outside of all."""
    return _reading.get()


def mark_table(weight: torch.Tensor, spec: EmbeddingTableSpec) -> TableMark:
    """Let a parameter stand for a table; whoever copies or unpickles one does it again."""
    mark = TableMark(spec)
    weight.__dict__[_MARK] = mark
    return mark


def mark_of(weight: torch.Tensor) -> TableMark | None:
    """What hangs on a parameter that stands for a table; None for all others."""
    return weight.__dict__.get(_MARK)


def spec_of(weight: torch.Tensor) -> EmbeddingTableSpec | None:
    """The table that a parameter stands for; None for ordinary ones."""
    mark = mark_of(weight)
    return None if mark is None else mark.spec


def attach_access(weight: torch.Tensor, access: RowAccess | None) -> None:
    """From now on the rows of `weight` lie elsewhere: those in this process, if any, are given up.

    Args:
        weight: The parameter that stands for the table.
        access: The way to them outside of `reading_rows`.
    """
    mark = mark_of(weight)
    if mark is not None:
        mark.access, mark.local = access, None
