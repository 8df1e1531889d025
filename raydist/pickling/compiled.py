"""Pickling of `torch.compile` results: the original and the arguments are sent, and each replica compiles again.

The result of `torch.compile` holds guards and compiled code of this process, which cannot be pickled. The arguments are
read from the compile context in the wrapper; if a torch version keeps them elsewhere, the replica compiles the original
with torch's defaults, which changes speed, never results.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch

from raydist.compat.torch_internals import module_table

__all__ = ["original_of", "reduce_compiled"]


_MARK = "get_compiler_config"  # an attribute that torch sets on each function that it compiles


def reduce_compiled(obj: Any) -> tuple[Any, ...] | None:
    """Return the pickle reduction of a compiled function or module, None for other objects."""
    original = original_of(obj)
    if original is None:
        return None
    context = _context_of(obj)
    return _compile_again, (original, {} if context is None else _arguments(context))


def original_of(obj: Any) -> Any:
    """Return the original of a result of `torch.compile`, None for other objects."""
    if isinstance(obj, types.FunctionType):
        # functools.wraps copies the mark to functions that wrap a compiled one, too.
        inner = vars(obj).get("__wrapped__")
        return inner if _MARK in vars(obj) and _MARK not in getattr(inner, "__dict__", {}) else None
    if isinstance(obj, torch.nn.Module) and "dynamo_ctx" in vars(obj):
        return next(iter(module_table(obj).values()))
    return None


def _context_of(obj: Any) -> Any:
    if isinstance(obj, torch.nn.Module):
        return vars(obj)["dynamo_ctx"]
    return inspect.getclosurevars(obj).nonlocals.get("self")


def _arguments(context: Any) -> dict[str, Any]:
    """Return the keyword arguments of the `torch.compile` call that made `context`."""
    backend = _backend_of(context)
    found: dict[str, Any] = {
        "fullgraph": bool(getattr(context, "fullgraph", False)),
        "dynamic": getattr(backend, "dynamic", None),
    }
    if hasattr(backend, "compiler_fn"):
        found["backend"] = backend.compiler_fn
        found["options"] = getattr(backend, "kwargs", {}).get("options")
    elif getattr(backend, "config", None):
        found["options"] = dict(backend.config)
    return found


def _backend_of(context: Any) -> Any:
    """Return the object in the chain of compiler callbacks that holds `backend`, `options` and `dynamic`; else None."""
    waiting, seen = [getattr(context, "callback", None)], set()
    for each in waiting:
        held = getattr(each, "__dict__", {})
        if "dynamic" in held and ("compiler_fn" in held or "config" in held):
            return each
        seen.add(id(each))
        waiting += [value for value in held.values() if callable(value) and id(value) not in seen]
    return None


def _compile_again(original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    return torch.compile(original, **arguments)
