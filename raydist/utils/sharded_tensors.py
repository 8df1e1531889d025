"""Tensors of which each replica holds a part (torch's DTensor), beside plain ones.

`torch.distributed.tensor` takes part of a second to import, so nothing here imports it before there is such a tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

import torch

from raydist.utils.stage_tensors import Placeholder, holder_of

SHARDED = "_raydist_sharded"
"""Attribute of all modules whose parameters are divided among replicas."""

STAGES = "_raydist_stages"
"""Attribute of all modules of which a replica computes one stage; of the outermost one, its `PipelinedModule`."""


def is_sharded(tensor: Any) -> bool:
    """Return True for a tensor of which each replica holds a part, or which one stage of a pipeline holds.

    >>> is_sharded(torch.ones(1))
    False
    """
    if holder_of(tensor) is not None:
        return True
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def own_of_sharding(attributes: Collection[str]) -> frozenset[str]:
    """Return the names of the attributes, among those of a module, that are there since it was divided.

    >>> own_of_sharding(vars(torch.nn.Linear(1, 1)))
    frozenset()
    """
    if SHARDED not in attributes:
        return frozenset()
    if STAGES in attributes:
        return frozenset({SHARDED, STAGES, "forward"})
    hooks = {name for name in attributes if "state_dict" in name and name.endswith("_hooks")}
    return frozenset({SHARDED, *hooks, *(name for name in attributes if name.startswith("__composable"))})


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all values of a tensor. A collective of all its replicas if it is sharded; else the tensor itself."""
    if (holder := holder_of(tensor)) is not None:
        return holder.whole(tensor)
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor.detach()
    values: torch.Tensor = sharded.full_tensor()
    return values


def share_of(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a sharded tensor with this replica's part of `values`, divided as `like`. No communication.

    All replicas must give equal values.
    """
    if holder_of(like) is not None:
        return Placeholder.like(like) if isinstance(like, Placeholder) else values.detach().to(like)
    from torch.distributed.tensor import distribute_tensor  # it was imported when `like` was made

    sharded: Any = like
    given = values.detach().to(device=sharded.device, dtype=sharded.dtype)
    return distribute_tensor(given, sharded.device_mesh, sharded.placements, src_data_rank=None)


def shard_like(values: Any, like: Any) -> Any:
    """Return `values`, divided as `like` if that is sharded and has the same shape."""
    fits = is_sharded(like) and isinstance(values, torch.Tensor) and not is_sharded(values)
    return share_of(values, like) if fits and values.shape == like.shape else values


def shard_state(state: Any, parameter: Any) -> Any:
    """Return an optimizer's state of one parameter, divided as the parameter if that is sharded."""
    if not (is_sharded(parameter) and isinstance(state, dict)):
        return state
    return {key: shard_like(value, parameter) for key, value in state.items()}
