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

__all__ = ["original_of", "reduce_compiled"]


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
        # functools.wraps copies the attribute onto functions around the compiled one; those have another id.
        if vars(obj).get("_torchdynamo_wrapper_id") == id(obj):
            return vars(obj).get("_torchdynamo_orig_callable")
        return None
    if isinstance(obj, torch.nn.Module):
        return vars(obj).get("_modules", {}).get("_orig_mod") if "dynamo_ctx" in vars(obj) else None
    return None


def _context_of(obj: Any) -> Any:
    if isinstance(obj, torch.nn.Module):
        return vars(obj)["dynamo_ctx"]
    return inspect.getclosurevars(obj).nonlocals.get("self")


def _arguments(context: Any) -> dict[str, Any]:
    """Keyword arguments of the `torch.compile` call that made `context`."""
    found: dict[str, Any] = {
        "fullgraph": bool(getattr(context, "fullgraph", False)),
        "dynamic": getattr(context, "_dynamic", None),
    }
    backend: Any = getattr(context, "callback", None)
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    if hasattr(backend, "compiler_fn"):
        found["backend"] = backend.compiler_fn
        found["options"] = getattr(backend, "kwargs", {}).get("options")
    elif getattr(backend, "config", None):
        found["options"] = dict(backend.config)
    return found


def _compile_again(original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    return torch.compile(original, **arguments)
