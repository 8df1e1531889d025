"""Rows of embedding tables in a process: those that a step has read, their gradients, and rows without servers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol, final

import torch
from torch.optim import optimizer as torch_optimizer

from raydist.collectives.reducer.nonfinite import install_hooks
from raydist.compat.torch_internals import (
    VALUELESS_GETTERS,
    disable_compiler,
    foreach_zero,
    plain_tensors,
)
from raydist.core.errors import FailedPreconditionError
from raydist.parameter_servers.row_table import RowTable
from raydist.parameter_servers.table_spec import EmbeddingTableSpec

_PROPERTIES = "shape dtype device ndim is_leaf layout grad_fn is_cuda is_sparse requires_grad grad data is_meta"
_METHODS = "size dim numel is_floating_point is_complex stride element_size get_device requires_grad_ detach_"
# These functions see the gradient itself; all others see the values of its rows.
_METADATA: frozenset[Any] = frozenset(
    {getattr(torch.Tensor, name).__get__ for name in _PROPERTIES.split()}
    | {*VALUELESS_GETTERS}
    | {getattr(torch.Tensor, name) for name in _METHODS.split()}
    | {torch.Tensor.__hash__, torch.Tensor.__len__, torch.Tensor.requires_grad.__set__}  # type: ignore[attr-defined]
)
_COPIES: frozenset[Any] = frozenset({getattr(torch.Tensor, name) for name in ("detach", "clone", "to")})
_ZEROS: frozenset[Any] = frozenset({torch.Tensor.zero_, torch.zero_})
_NORMS: frozenset[Any] = frozenset({torch.linalg.vector_norm})
_ALL_ZEROS: frozenset[Any] = frozenset({foreach_zero})


@final
class RowGradient(torch.Tensor):
    """A gradient of some rows. Made by :func:`add_row_gradient`, never constructed."""

    pieces: list[tuple[torch.Tensor, torch.Tensor]]  # for each backward pass so far, the rows and their gradients
    # where rows are divided among processes, the pieces of this process that others do not have yet
    local: list[tuple[torch.Tensor, torch.Tensor]]
    exchange: RowExchange | None = None  # exchange with the processes that hold other rows; None if there are none

    @classmethod
    @disable_compiler
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "").endswith("foreach_norm"):  # of clip_grad_norm_(foreach=True)
            return [torch.linalg.vector_norm(each, *args[1:], **kwargs) for each in args[0]]
        with plain_tensors():
            if func in _METADATA:
                return func(*args, **kwargs)
            if func in _ZEROS or func in _ALL_ZEROS:
                return _zero(func, args)
            if func in _COPIES and isinstance(args[0], RowGradient):
                return _copied(args[0], func, args[1:], kwargs)
            if func in _NORMS and isinstance(args[0], RowGradient) and args[0].exchange is not None:
                return args[0].exchange.norm(args[0].joined()[1], *args[1:], **kwargs)
            result = func(*_in_place(args), **{name: _in_place(value) for name, value in kwargs.items()})
        own = next((arg for arg in args if isinstance(arg, RowGradient)), None)
        return own if own is not None and result is own.pieces[0][1] else result

    def joined(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows, rising, and their gradients; gradients of the same row are added up."""
        if len(self.pieces) > 1:
            rows = torch.cat([piece[0] for piece in self.pieces])
            values = torch.cat([piece[1] for piece in self.pieces])
            unique, places = torch.unique(rows, return_inverse=True)
            self.pieces = [(unique, values.new_zeros((len(unique), values.shape[1])).index_add_(0, places, values))]
        return self.pieces[0]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # its stub has no keyword
        rows, values = self.joined()
        return f"RowGradient(rows={rows!r}, values={values!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _made, self.joined()

    def __deepcopy__(self, memo: dict[int, Any]) -> RowGradient:
        rows, values = self.joined()
        return _made(rows.clone(), values.clone())


def _made(rows: torch.Tensor, values: torch.Tensor) -> RowGradient:
    gradient = values.new_empty((0, values.shape[1])).as_subclass(RowGradient)
    gradient.pieces, gradient.local = [(rows, values)], []
    return gradient


def _copied(
    gradient: RowGradient, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> RowGradient:
    rows, values = gradient.joined()
    copy = _made(rows, func(values, *args, **kwargs))
    copy.exchange = gradient.exchange
    return copy


def _in_place(value: Any) -> Any:
    """Return `value` with each gradient of rows replaced by the values of its rows."""
    if isinstance(value, RowGradient):
        return value.joined()[1]
    if isinstance(value, list | tuple):
        return type(value)(_in_place(each) for each in value)
    return value


def _zero(func: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Drop zeroed rows: an optimizer then does nothing to them, as to rows that no step touched."""
    for each in args[0] if func in _ALL_ZEROS else args[:1]:
        if isinstance(each, RowGradient):
            each.pieces, each.local = [(each.pieces[0][0][:0], each.pieces[0][1][:0])], []
        else:
            each.zero_()
    return None if func in _ALL_ZEROS else args[0]


def add_row_gradient(weight: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """Add a backward pass's gradients to the gradient of a table's parameter."""
    mark, present = mark_of(weight), weight.grad
    exchange = mark.local.exchange if mark is not None and isinstance(mark.local, LocalRows) else None
    if exchange is not None:
        if not isinstance(present, RowGradient):
            weight.grad = present = _made(rows[:0], values[:0])
            present.exchange = exchange
        present.local.append(exchange.weighted(rows, values))
    elif isinstance(present, RowGradient):
        present.pieces.append((rows, values))
    else:
        weight.grad = _made(rows, values)


def take_local_pieces(weight: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return rows and their gradients that the other processes do not have yet, by backward pass, and forget them."""
    gradient = weight.grad
    if not isinstance(gradient, RowGradient):
        return []
    pieces, gradient.local = gradient.local, []
    return pieces


def add_exchanged(weight: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, exchange: RowExchange) -> None:
    """Add gradients of rows that this process holds, which have been added up over all processes."""
    present = weight.grad
    if not isinstance(present, RowGradient):
        weight.grad = present = _made(rows, values)
        present.exchange = exchange
    else:
        present.pieces.append((rows, values))


def pending_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return rows, rising, and their gradients that wait for an optimizer's step; they stay until `zero_grad`.

    Returns:
        None without a gradient of rows. Else int64 rows and as many gradients; zero rows after a
        `zero_grad(set_to_none=False)`.
    """
    gradient = weight.grad
    return gradient.joined() if isinstance(gradient, RowGradient) else None


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


class RowExchange(Protocol):
    """The interface to processes that hold other rows of the same tables. All of them call it together."""

    def pull(self, table: RowTable, rows: torch.Tensor) -> torch.Tensor:
        """Return present values of rows, of which this process holds some in `table`."""

    def weighted(self, rows: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows and their gradients with this process's weight; no rows if the weight is zero."""

    def norm(self, values: torch.Tensor, ord: float = 2, **options: Any) -> torch.Tensor:  # noqa: A002  # as torch's
        """Return the norm of the values of all processes."""


@final
class TableMark:
    """The properties of a table that its parameter carries in this process."""

    def __init__(self, spec: EmbeddingTableSpec) -> None:
        self.spec = spec  # description of the table
        # access to the rows outside of steps (the driver's); None if the rows lie in this process
        self.access: RowAccess | None = None
        self.local: RowAccess | None = None  # access to rows in this process, once there are any


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


def is_table(obj: Any) -> bool:
    """Return True for a parameter that stands for a table."""
    return isinstance(obj, torch.Tensor) and mark_of(obj) is not None


def attach_access(weight: torch.Tensor, access: RowAccess | None) -> None:
    """Declare that the rows of `weight` lie elsewhere; rows in this process, if any, are dropped."""
    mark = mark_of(weight)
    if mark is not None:
        mark.access, mark.local = access, None


@final
class LocalRows:
    """A table of this process (a `RowAccess`); with an `exchange`, other processes hold other rows of it."""

    def __init__(self, table: RowTable, exchange: RowExchange | None = None) -> None:
        self.table = table  # rows of the table
        self.exchange = exchange
        self.taken: RowGradient | None = None  # the gradient that is removed during a step

    def pull(self, weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self.table.pull(rows) if self.exchange is None else self.exchange.pull(self.table, rows)

    def export_rows(self, weight: torch.Tensor) -> list[dict[str, Any]]:
        return [self.table.state()]

    def import_rows(self, weight: torch.Tensor, states: Sequence[Mapping[str, Any]]) -> None:
        self.table.load(states)


def access_to(weight: torch.Tensor) -> RowAccess:
    """Return the access to the rows of a table. Without any, the rows lie in this process from now on."""
    mark = mark_of(weight)
    if mark is None:
        raise FailedPreconditionError("raydist bug: a parameter must stand for a table where its rows are asked for.")
    return row_access() or mark.access or _local(mark)


def _local(mark: TableMark) -> LocalRows:
    held = mark.local
    return held if isinstance(held, LocalRows) else hold_in(mark, LocalRows(RowTable(mark.spec)))


def hold_in(mark: TableMark, rows: LocalRows) -> LocalRows:
    """Make this process hold rows of a table; return them. The steps of all optimizers update them from now on."""
    mark.local = rows
    _hook_into_torch()
    return rows


@functools.cache
def _hook_into_torch() -> None:
    install_hooks()  # these hide gradients from steps that are skipped, and must come first
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
            own = local.table.own(rows)
            local.table.push(rows[own], values[own].cpu(), type(optimizer), _options(group))
            parameter.grad = gradient
