"""`rd.clip_grad_norm_`: torch's function for gradients that are divided in different ways."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from raydist.core.errors import InvalidArgumentError
from raydist.utils.sharded_tensors import is_sharded, whole
from raydist.utils.stage_tensors import holder_of


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Scale the gradients of parameters so that their norm together is at most `max_norm`, in place.

    As `torch.nn.utils.clip_grad_norm_`, which refuses parameters that are divided along different axes of a mesh, as
    by tensor parallelism with `rd.MeshStrategy`; outside a step of a strategy it also refuses whole ones beside divided
    ones. If some are divided, or belong to stages of a pipeline, all replicas must call it together.

    Args:
        parameters: Parameters; those without a gradient are left out.
        max_norm: The largest norm.
        norm_type: p of the p-norm, > 0; may be infinity.

    Returns:
        The norm before, of all values; a tensor without dimensions.

    Raises:
        InvalidArgumentError: `norm_type` is not positive.

    Source: torch.nn.utils.clip_grad_norm_.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> (weight * torch.tensor([3.0, 4.0])).sum().backward()
    >>> rd.clip_grad_norm_(weight, 1.0), weight.grad
    (tensor(5.), tensor([0.6000, 0.8000]))
    """
    if not norm_type > 0:
        raise InvalidArgumentError(f"norm_type must be > 0, got {norm_type!r}.")
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    groups: dict[Any, list[torch.Tensor]] = {}
    for parameter in given:
        if parameter.grad is not None:
            groups.setdefault(_mesh_of(parameter.grad), []).append(parameter)
    norms = [_norm_of([each.grad for each in group if each.grad is not None], norm_type) for group in groups.values()]
    staged = next((each for each in given if holder_of(each) is not None), None)
    if staged is not None:
        norms = _norms_of_stages(norms, staged)
    if not norms:
        return torch.tensor(0.0)
    stacked = torch.stack([norm.to(norms[0].device) for norm in norms])
    total: torch.Tensor = torch.linalg.vector_norm(stacked, norm_type)
    for group in groups.values():
        clip_grads_with_norm_(group, max_norm, total)
    return total


def _norms_of_stages(norms: list[torch.Tensor], parameter: torch.Tensor) -> list[torch.Tensor]:
    """Return the norms of all stages that the parameter's stage belongs to. A collective of these."""
    holder = holder_of(parameter)
    if holder is None:
        return norms
    mine = torch.zeros(1, dtype=torch.float64, device=parameter.device)
    for norm in norms:
        mine = norm.to(mine).reshape(1)
    each = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size(holder.group))]
    torch.distributed.all_gather(each, mine, group=holder.group)
    return [norm.to(parameter.dtype)[0] for norm in each]


def _mesh_of(gradient: torch.Tensor) -> Any:
    divided: Any = gradient
    return divided.device_mesh if is_sharded(gradient) else None


def _norm_of(gradients: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    if norm_type != math.inf or not is_sharded(gradients[0]):
        return whole(get_total_norm(gradients, norm_type))
    # A replica may have no values of a tensor, of which torch knows no largest one.
    parts: list[Any] = [each.to_local() for each in gradients]  # type: ignore[attr-defined]  # of a DTensor
    most: torch.Tensor = torch.stack([each.abs().max() if each.numel() else each.new_zeros(()) for each in parts]).max()
    mesh = _mesh_of(gradients[0])
    for axis in range(mesh.ndim):
        torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX, group=mesh.get_group(axis))
    return most
