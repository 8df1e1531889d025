"""Functions and modules under `torch.compile`: the original and the arguments travel, each replica compiles again.

What `torch.compile` returns holds guards and compiled code of this process, which cannot be pickled. Its arguments are
read back from the compile context that the wrapper keeps; where a torch version keeps them elsewhere, the original is
compiled with torch's defaults, which changes speed, never results.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch

from raydist.compat.torch_internals import module_table

__all__ = ["original_of", "reduce_compiled"]


_MARK = "get_compiler_config"  # what torch puts on each function that it compiles


def reduce_compiled(obj: Any) -> tuple[Any, ...] | None:
    """The pickle reduction of a compiled function or module, None for anything else."""
    original = original_of(obj)
    if original is None:
        return None
    context = _context_of(obj)
    return _compile_again, (original, {} if context is None else _arguments(context))


def original_of(obj: Any) -> Any:
    """What was compiled, or None if `obj` is not the result of `torch.compile`."""
    if isinstance(obj, types.FunctionType):
        # functools.wraps copies the mark onto functions around a compiled one, too.
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
    """Keyword arguments of the `torch.compile` call that made `context`."""
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
    """Return what torch keeps of `backend`, `options` and `dynamic`, in callables that each hold the next one."""
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
