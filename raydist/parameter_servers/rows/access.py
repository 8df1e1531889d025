"""Access of an embedding to its rows: a running step sets it; without any, the rows lie in this process.

The parameter of an embedding, of shape (0, dim), stands for its table: optimizers and strategies use the parameter.
A `TableMark`, an attribute of the parameter, holds the table's other properties.
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
