"""Functions of torch tensors in place of numpy arrays: modules, and functions wrapped by `rd.with_tensors`.

Torch is not imported before a function asks for tensors; until then no function can be a torch module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from raydist.core.errors import InvalidArgumentError
from raydist.core.exception_utils import annotate, message_of
from raydist.pipelines.elements.element_nests import map_element
from raydist.pipelines.elements.small_floats import tensor_of_array


def with_tensors(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn` as a function for `map`, `filter`, `scan`, ... that receives torch tensors instead of numpy arrays.

    A `torch.nn.Module` needs no wrapping: it always receives tensors. Also a decorator.

    Args:
        fn: Receives the arguments of a map function, with every array and number as a tensor on the CPU of the same
            dtype, which it may write to. bytes, str, arrays of them, and `rng` stay unchanged.

    Returns:
        A function for transformations; called with tensors, it passes them on.

    Raises:
        InvalidArgumentError: `fn` is not callable.

    >>> import torch
    >>> ds = rd.Dataset.from_tensor_slices([-1.0, 2.0]).map(rd.with_tensors(torch.relu))
    >>> [float(x) for x in ds]
    [0.0, 2.0]
    """
    if not callable(fn):
        raise InvalidArgumentError(f"with_tensors needs a function, got {fn!r:.100}.")
    return fn if isinstance(fn, TensorFunction) else TensorFunction(fn)


@final
@dataclass(frozen=True)
class TensorFunction:
    """A function that is called with tensors in place of arrays."""

    fn: Callable[..., Any]

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The wrapped function, for labels and the signature (Python's convention)."""
        return self.fn

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        from torch import from_numpy  # torch is imported only when a tensor is made

        return self.fn(*[_tensors(arg, from_numpy) for arg in args], **keywords)


def _tensors(value: Any, from_numpy: Callable[[Any], Any]) -> Any:
    if isinstance(value, np.ndarray):  # the common case, without recursion into a nest
        return _tensor(value, from_numpy)
    return map_element(lambda leaf: _tensor(leaf, from_numpy), value)


def _tensor(leaf: Any, from_numpy: Callable[[Any], Any]) -> Any:
    if isinstance(leaf, np.ndarray):
        if leaf.dtype == object:
            return leaf
        return tensor_of_array(leaf if leaf.flags.writeable else leaf.copy(), from_numpy)
    return tensor_of_array(np.array(leaf), from_numpy) if isinstance(leaf, np.generic) else leaf


def is_module(fn: Any) -> bool:
    """Return True if `fn` is a `torch.nn.Module`."""
    torch = sys.modules.get("torch.nn")
    return torch is not None and isinstance(fn, torch.Module)


def receiving_tensors(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn` in the form for calls with numpy values: modules receive tensors."""
    return TensorFunction(fn) if is_module(fn) else fn


def note_numpy_in_torch(error: BaseException) -> None:
    """Add a hint to the error of a torch function, or of a method of tensors, that received a numpy value."""
    if _met_numpy(error):
        annotate(
            error,
            "Functions given to transformations receive numpy values. To get torch tensors, wrap the function: "
            "rd.with_tensors(fn).",
        )


def _met_numpy(error: BaseException) -> bool:
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if type(error) is AttributeError:
        return isinstance(error.obj, np.ndarray | np.generic) and hasattr(torch.Tensor, error.name or "")
    text = message_of(error) if type(error) is TypeError else ""
    return "numpy." in text and "Tensor" in text
