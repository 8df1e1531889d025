"""Checks that parameter servers can hold variables, and the names of variables in messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from raydist.errors import InvalidArgumentError

__all__ = ["names_of_variables", "require_servable"]


def names_of_variables(objects: Iterable[Any]) -> dict[int, str]:
    """Return the names of variables by identity, as in the outermost module that has them.

    >>> layer = torch.nn.Linear(1, 1)
    >>> names_of_variables([layer, torch.nn.Sequential(layer)])[id(layer.bias)]
    '0.bias'
    """
    names: dict[int, str] = {}
    modules = [obj for obj in objects if isinstance(obj, torch.nn.Module)]
    inner = {id(child) for module in modules for child in module.modules() if child is not module}
    for module in [each for each in modules if id(each) not in inner]:
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            names.setdefault(id(tensor), name)
    return names


def require_servable(tensors: Mapping[int, torch.Tensor], names: Mapping[int, str]) -> None:
    """Check that variables are dense, have values, and share no memory.

    Args:
        tensors: Tensors by handle.
        names: Names by identity.

    Raises:
        InvalidArgumentError: Servers cannot hold one of the variables.
    """
    for handle, tensor in tensors.items():
        _require_dense(names.get(id(tensor), f"variable {handle}"), tensor)
    _require_apart(tensors, names)


def _require_dense(name: str, tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise InvalidArgumentError(
            f"Variables must be dense tensors with values to live on parameter servers, but {name} is of layout "
            f"{tensor.layout} on {tensor.device}. Keep it out of the scope, or store it as dense tensors."
        )


def _require_apart(tensors: Mapping[int, torch.Tensor], names: Mapping[int, str]) -> None:
    """Reject variables that share memory: on the servers each variable has values of its own."""
    held = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + _extent(tensor), id(tensor))
        for tensor in tensors.values()
        if tensor.numel()
    )
    for (_, end, one), (begin, _, other) in zip(held, held[1:], strict=False):
        if begin < end:
            raise InvalidArgumentError(
                f"Each variable must have memory of its own to live on parameter servers, but "
                f"{names.get(one, 'a variable')} and {names.get(other, 'another one')} overlap. Use one tensor in both "
                "places, or copy one of them."
            )


def _extent(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last."""
    spanned = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (spanned + 1) * tensor.dtype.itemsize
