"""Private names of torch, each with a reason. Other modules of the package use public names only.

`StorageWeakRef` has a public name but no documentation; it tells when no tensor refers to a storage any more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from datetime import timedelta
from typing import Any

import torch

# Process groups without the default group of torch.distributed, which no public function creates.
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
)

# The same as torch.compiler.disable, which imports the whole compiler and takes a second of every start.
from torch._compile import _disable_dynamo as disable_compiler
from torch.multiprocessing.reductions import StorageWeakRef

# Sees every operation. Without it each replica would draw the same numbers for its part of a sharded parameter.
from torch.utils._python_dispatch import TorchDispatchMode

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
    "StorageWeakRef",
    "Store",
    "TCPStore",
    "TorchDispatchMode",
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

BatchNorm: Any = torch.nn.BatchNorm1d.__bases__[0]
"""The base class of all batch normalisation. Without it `convert` skips layers that derive from it directly."""

plain_tensors: Any = torch._C.DisableTorchFunctionSubclass
"""A context in which mirrored tensors act as plain ones. Without it each access would call the replicas again."""

foreach_copy: Any = torch._foreach_copy_
"""Copy many tensors in one call (on a GPU in one kernel); `copy_` takes a microsecond and a kernel per tensor."""

foreach_zero: Any = torch._foreach_zero_
"""Function of `zero_grad(set_to_none=False)` in a `foreach` optimizer. A `RowGradient` drops its rows instead."""

PARAMETERS, BUFFERS, MODULES = "_parameters", "_buffers", "_modules"
"""Attributes of a module. `named_parameters` would call the replicas of a mirrored module, and block."""


def num_writes(tensor: torch.Tensor) -> int:
    """Return the number of in-place writes to a tensor; -1 for a tensor of inference mode, which has no count.

    Without `_version` each tensor would have to be compared with a copy of its values.

    >>> tensor = torch.zeros(1)
    >>> num_writes(tensor.add_(1))
    1
    """
    return -1 if tensor.is_inference() else tensor._version


_TENSOR: Any = torch.Tensor  # torch's stubs take its properties for their values
VALUELESS_GETTERS = (_TENSOR._version.__get__, _TENSOR._backward_hooks.__get__)
"""Getters of `_version` and `_backward_hooks`, which do not read the values of a tensor."""

Hooks = dict[Hashable, Callable[..., Any]]


def hook_tables(parameter: Any) -> tuple[Hooks | None, Hooks | None]:
    """Return the hooks of `register_hook` and of `register_post_accumulate_grad_hook`, by key; None without hooks.

    Without them a hook that a program registers on the driver would not reach the replicas.
    """
    return parameter._backward_hooks, parameter._post_accumulate_grad_hooks


def new_hook_tables(parameter: Any) -> tuple[Hooks, Hooks]:
    """Return the same tables, and create missing ones, as torch's own registration does."""
    if parameter._backward_hooks is None:
        parameter._backward_hooks = OrderedDict()
    if parameter._post_accumulate_grad_hooks is None:
        parameter._post_accumulate_grad_hooks = OrderedDict()
    return parameter._backward_hooks, parameter._post_accumulate_grad_hooks


def _table(module: torch.nn.Module, name: str) -> dict[str, Any]:
    found: dict[str, Any] = object.__getattribute__(module, "__dict__").get(name, {})
    return found


def parameter_table(module: torch.nn.Module) -> dict[str, Any]:
    """Return a module's own parameters by name; None for an unset parameter."""
    return _table(module, PARAMETERS)


def buffer_table(module: torch.nn.Module) -> dict[str, Any]:
    """Return a module's own buffers by name; None for an unset buffer."""
    return _table(module, BUFFERS)


def module_table(module: torch.nn.Module) -> dict[str, Any]:
    """Return a module's own submodules by name; None for an unset submodule."""
    return _table(module, MODULES)


def mark_as_parameter(tensor: torch.Tensor) -> None:
    """Set `_is_param`. Without it a mirrored parameter is not an instance of `torch.nn.Parameter`."""
    tensor.__dict__["_is_param"] = True


def unmark_as_parameter(tensor: torch.Tensor) -> None:
    """Undo `mark_as_parameter`."""
    tensor.__dict__.pop("_is_param", None)


def mark_as_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Set `_opt_called`. Without it torch's schedulers warn that a mirrored optimizer has not stepped."""
    object.__getattribute__(optimizer, "__dict__")["_opt_called"] = True


def is_wrapped_step(step: Any) -> bool:
    """Return True if a scheduler has wrapped this `step`, since no other replacement of `step` is allowed."""
    return hasattr(step, "_wrapped_by_lr_sched")


def mark_as_wrapped_step(step: Any) -> None:
    """Set `_wrapped_by_lr_sched`. Without it torch's schedulers warn that `step` was overridden on a replica."""
    step._wrapped_by_lr_sched = True


def gloo_group(store: Store, rank: int, world_size: int, *, timeout: timedelta, hostname: str) -> Any:
    """Create a gloo group that listens on one address of this host."""
    gloo: Any = ProcessGroupGloo  # torch's stubs lack `_Options`
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=hostname, lazy_init=False)]
    set_timeout(options, timeout)
    return gloo(store, rank, world_size, options)


def set_timeout(options: Any, timeout: timedelta) -> None:
    """Set the time limit of collectives in the options of a process group."""
    options._timeout = timeout
