"""Checks of the arguments of `strategy.run`, and notes for errors of steps."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from raydist.core.errors import InvalidArgumentError
from raydist.core.exception_utils import annotate, message_of
from raydist.core.nest import leaves_in, map_structure
from raydist.core.values import Replicated
from raydist.options import RunOptions


def require_call(fn: Any, args: Any, kwargs: Any = None, options: Any = None) -> None:
    """Raise InvalidArgumentError unless the arguments of `strategy.run` are valid."""
    if not callable(fn):
        raise InvalidArgumentError(
            f"strategy.run needs a function, got {fn!r:.80}. Give the function itself, and its arguments as args."
        )
    if not isinstance(args, tuple | list):
        raise InvalidArgumentError(
            f"args must be a tuple of the function's arguments, got {type(args).__name__}. Give args=(batch,)."
        )
    if not (kwargs is None or isinstance(kwargs, Mapping)):
        raise InvalidArgumentError(f"kwargs must be a dict of the function's named arguments, got {kwargs!r:.80}.")
    if not (options is None or isinstance(options, RunOptions)):
        raise InvalidArgumentError(f"options must be rd.RunOptions(...), got {options!r:.80}.")
    whole = _distributed_dataset()
    for arg in args:
        if isinstance(arg, whole):
            raise InvalidArgumentError(
                "A step needs batches or an iterator, got a DistributedDataset. Give args=(iter(dataset),), and draw "
                "batches inside the step."
            )


def plain_call(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a step, with each `rd.Replicated` replaced by its value.

    >>> plain_call([1, {"weights": rd.Replicated(2)}], None)
    ((1, {'weights': 2}), {})
    """
    given, named = tuple(args), dict(kwargs or {})
    if Replicated in map(type, leaves_in(given)) or Replicated in map(type, leaves_in(named)):
        given, named = map_structure(_plain, (given, named))
    return given, named


def _plain(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, Replicated) else leaf


@functools.cache
def _distributed_dataset() -> type:
    from raydist.distributed_dataset import DistributedDataset  # imported here, because replicas do not need it

    return DistributedDataset


_HINTS_OF_SHARDING = {
    "mixed torch.Tensor and DTensor": "In a step of ShardedStrategy a parameter is a DTensor. Use it within the "
    "module's forward pass, or gather it by parameter.full_tensor().",
    "FSDP state has already been lazily initialized": "A sharded module must be called as a whole, its parts only from "
    "within its forward pass.",
    "out of bounds for storage of size 0": "A sharded module frees its parameters after each pass, so no second "
    "backward pass can go through the first (create_graph=True).",
    "operation to complete": "All replicas must make the same passes in the same order. One may have left a loop "
    "early, or have branched by its rank or its rows.",
    "expects uniform original parameter dtype": "Parameters of one unit must have one type. Give ShardedStrategy a "
    "policy that makes units of the parts with other types.",
}

_NO_MEMORY = "can't allocate memory"  # torch's allocator for the CPU


def add_hint(error: BaseException) -> None:
    """Add a note to an error of a step if raydist knows a fix that the message does not name.

    >>> error = ValueError("Default process group has not been initialized, please make sure to call it.")
    >>> add_hint(error)
    >>> error.__notes__[0][:45]
    'raydist does not initialize torch.distributed'
    """
    if "process group has not been initialized" in message_of(error):
        annotate(
            error,
            "raydist does not initialize torch.distributed: replicas have process groups of raydist. Use "
            "rd.get_replica_context().all_reduce or all_gather. raydist reduces gradients itself, so put no "
            "DistributedDataParallel around the model. A step that needs torch.distributed must initialize it.",
        )
    for part, hint in _HINTS_OF_SHARDING.items():
        if part in message_of(error):
            annotate(error, hint)
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or _NO_MEMORY in message_of(error):
        annotate(
            error,
            "The device has no memory left. If the model is too large for one device, rd.ShardedStrategy divides "
            "parameters, gradients and optimizer states among replicas; smaller batches and activation checkpointing "
            "(torch.utils.checkpoint) need less memory for activations.",
        )
