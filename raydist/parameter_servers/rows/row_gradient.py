"""The gradient of an embedding whose rows lie in a table: gradients of some rows, as a parameter's `.grad`.

It has the shape of its parameter, (0, dim), and no values of its own. Operations of a program on gradients (a norm, a
factor, zeros) apply to the values of its rows. Both modes of `zero_grad` drop it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch

from raydist.compat.torch_internals import VALUELESS_GETTERS, disable_compiler, foreach_zero, plain_tensors

__all__ = ["RowGradient", "add_row_gradient", "pending_rows"]

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
_ALL_ZEROS: frozenset[Any] = frozenset({foreach_zero})


@final
class RowGradient(torch.Tensor):
    """A gradient of some rows. Made by :func:`add_row_gradient`, never constructed.

    Attributes:
        pieces: For each backward pass so far, the rows and their gradients.
    """

    pieces: list[tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    @disable_compiler
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with plain_tensors():
            if func in _METADATA:
                return func(*args, **kwargs)
            if func in _ZEROS or func in _ALL_ZEROS:
                return _zero(func, args)
            if func in _COPIES and isinstance(args[0], RowGradient):
                return _copied(args[0], func, args[1:], kwargs)
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
    gradient.pieces = [(rows, values)]
    return gradient


def _copied(
    gradient: RowGradient, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> RowGradient:
    rows, values = gradient.joined()
    return _made(rows, func(values, *args, **kwargs))


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
            each.pieces = [(each.pieces[0][0][:0], each.pieces[0][1][:0])]
        else:
            each.zero_()
    return None if func in _ALL_ZEROS else args[0]


def add_row_gradient(weight: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """Add a backward pass's gradients to the gradient of a table's parameter.

    Args:
        weight: The parameter that stands for the table.
        rows: Row numbers, rising.
        values: Gradients of these rows.
    """
    present = weight.grad
    if isinstance(present, RowGradient):
        present.pieces.append((rows, values))
    else:
        weight.grad = _made(rows, values)


def pending_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return rows, rising, and their gradients that wait for an optimizer's step; they stay until `zero_grad`.

    Args:
        weight: Any parameter.

    Returns:
        None without a gradient of rows. Else int64 rows and as many gradients; zero rows after a
        `zero_grad(set_to_none=False)`.
    """
    gradient = weight.grad
    return gradient.joined() if isinstance(gradient, RowGradient) else None
