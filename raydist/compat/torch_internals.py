"""Private names of torch, each with its reason. Other modules of the package use public names only.

`StorageWeakRef` is public by its name, and documented nowhere: it tells when nobody holds a storage any more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from datetime import timedelta
from typing import Any

import torch

# Process groups without the process-wide default group of torch.distributed: there is no public way to make them.
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    ReduceOptions,
    ReduceScatterOptions,
    Store,
    TCPStore,
)

# As torch.compiler.disable, which would import the whole compiler: a second of every start.
from torch._compile import _disable_dynamo as disable_compiler
from torch.multiprocessing.reductions import StorageWeakRef

# The base of batch normalisation of all kinds: without it `convert` passes over layers that derive from it directly.
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

__all__ = [
    "BUFFERS",
    "MODULES",
    "PARAMETERS",
    "VALUELESS_GETTERS",
    "AllToAllOptions",
    "AllgatherOptions",
    "AllreduceOptions",
    "BatchNorm",
    "BroadcastOptions",
    "PrefixStore",
    "ReduceOptions",
    "ReduceScatterOptions",
    "StorageWeakRef",
    "Store",
    "TCPStore",
    "buffer_table",
    "disable_compiler",
    "foreach_copy",
    "foreach_zero",
    "gloo_group",
    "hook_tables",
    "is_wrapped_step",
    "mark_as_parameter",
    "mark_as_stepped",
    "mark_as_wrapped_step",
    "module_table",
    "new_hook_tables",
    "num_writes",
    "parameter_table",
    "plain_tensors",
    "set_timeout",
    "unmark_as_parameter",
]

plain_tensors: Any = torch._C.DisableTorchFunctionSubclass
"""A context in which mirrored tensors are plain ones: without it each look at one would ask the replicas again."""

foreach_copy: Any = torch._foreach_copy_
"""Copy many tensors in one call (on a GPU in one kernel): `copy_` costs a microsecond and a kernel each."""

foreach_zero: Any = torch._foreach_zero_
"""What `zero_grad(set_to_none=False)` of a `foreach` optimizer calls: rows of a table are dropped by it, not zeroed."""

PARAMETERS, BUFFERS, MODULES = "_parameters", "_buffers", "_modules"
"""Where a module keeps what it has. `named_parameters` would ask the replicas of a mirrored module, and wait."""


def num_writes(tensor: torch.Tensor) -> int:
    """Return how often torch knows a tensor to have been written to; -1 where it does not count, of inference mode.

    Without `_version` each tensor would have to be compared with a copy of its values.

    >>> tensor = torch.zeros(1)
    >>> num_writes(tensor.add_(1))
    1
    """
    return -1 if tensor.is_inference() else tensor._version


_TENSOR: Any = torch.Tensor  # torch's stubs take its properties for their values
VALUELESS_GETTERS = (_TENSOR._version.__get__, _TENSOR._backward_hooks.__get__)
"""Of these two: nothing of the values is read."""

Hooks = dict[Hashable, Callable[..., Any]]


def hook_tables(parameter: Any) -> tuple[Hooks | None, Hooks | None]:
    """Return the hooks of `register_hook` and of `register_post_accumulate_grad_hook`, by key; None before the first.

    Without them a hook that a program registers on the driver would not reach the replicas.
    """
    return parameter._backward_hooks, parameter._post_accumulate_grad_hooks


def new_hook_tables(parameter: Any) -> tuple[Hooks, Hooks]:
    """Return the same, made where there are none, as torch's own registration does it."""
    if parameter._backward_hooks is None:
        parameter._backward_hooks = OrderedDict()
    if parameter._post_accumulate_grad_hooks is None:
        parameter._post_accumulate_grad_hooks = OrderedDict()
    return parameter._backward_hooks, parameter._post_accumulate_grad_hooks


def _table(module: torch.nn.Module, name: str) -> dict[str, Any]:
    found: dict[str, Any] = object.__getattribute__(module, "__dict__").get(name, {})
    return found


def parameter_table(module: torch.nn.Module) -> dict[str, Any]:
    """Return a module's own parameters by name, None where one is left out."""
    return _table(module, PARAMETERS)


def buffer_table(module: torch.nn.Module) -> dict[str, Any]:
    """Return a module's own buffers by name, None where one has no value."""
    return _table(module, BUFFERS)


def module_table(module: torch.nn.Module) -> dict[str, Any]:
    """Return a module's own submodules by name, None where one is left out."""
    return _table(module, MODULES)


def mark_as_parameter(tensor: torch.Tensor) -> None:
    """Set `_is_param`: without it a mirrored parameter would be no instance of `torch.nn.Parameter`."""
    tensor.__dict__["_is_param"] = True


def unmark_as_parameter(tensor: torch.Tensor) -> None:
    """Undo `mark_as_parameter`."""
    tensor.__dict__.pop("_is_param", None)


def mark_as_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Set `_opt_called`: without it torch's schedulers warn that an optimizer which steps elsewhere has not stepped."""
    object.__getattribute__(optimizer, "__dict__")["_opt_called"] = True


def is_wrapped_step(step: Any) -> bool:
    """Return True for what a scheduler puts in the place of an optimizer's `step`; nothing else may stand there."""
    return hasattr(step, "_wrapped_by_lr_sched")


def mark_as_wrapped_step(step: Any) -> None:
    """Set `_wrapped_by_lr_sched`: without it torch's schedulers warn that `step` was overridden on a replica."""
    step._wrapped_by_lr_sched = True


def gloo_group(store: Store, rank: int, world_size: int, *, timeout: timedelta, hostname: str) -> Any:
    """Return a gloo group that listens on one address of this host."""
    gloo: Any = ProcessGroupGloo  # torch's stubs do not know its `_Options`
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=hostname, lazy_init=False)]
    set_timeout(options, timeout)
    return gloo(store, rank, world_size, options)


def set_timeout(options: Any, timeout: timedelta) -> None:
    """Set the limit of a process group's collectives in its options."""
    options._timeout = timeout
