"""Functions of torch that read gradients before an optimizer does: on replicas they must see global gradients.

Gradients made by hand are exchanged when an optimizer steps. A GradScaler looks for infinities before, and clipping
needs the global norm before. torch has no hook there, so its functions are wrapped, once in a process of a replica.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.utils import clip_grad

from raydist.context.replica_context import peers_here
from raydist.replicas.connected import Connected

__all__ = ["watch_gradient_readers"]


@functools.cache
def watch_gradient_readers() -> None:
    """Let `GradScaler` and `torch.nn.utils.clip_grad_*_` see global gradients from now on. May be called again."""
    scaler = torch.amp.GradScaler
    for name in ("unscale_", "step"):
        setattr(scaler, name, _after_exchange(getattr(scaler, name), 1, "optimizer", _parameters_of))
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        wrapped = _after_exchange(getattr(clip_grad, name), 0, "parameters", _listed)
        setattr(clip_grad, name, wrapped)
        setattr(torch.nn.utils, name, wrapped)
    torch.nn.Module.zero_grad = _told(torch.nn.Module.zero_grad)  # type: ignore[method-assign]


def _after_exchange(
    function: Callable[..., Any], place: int, name: str, find: Callable[[Any], tuple[Any, list[torch.Tensor]]]
) -> Callable[..., Any]:
    """Wrap a function whose argument `name`, at `place`, says whose gradients it reads."""

    @functools.wraps(function)
    def read(*args: Any, **kwargs: Any) -> Any:
        peers = peers_here()
        if isinstance(peers, Connected):
            if len(args) > place:
                given, parameters = find(args[place])
                args = (*args[:place], given, *args[place + 1 :])
            else:
                kwargs[name], parameters = find(kwargs[name])
            peers.make_global(parameters)
        return function(*args, **kwargs)

    return read


def _told(zero_grad: Callable[..., None]) -> Callable[..., None]:
    """Wrap `Module.zero_grad`: what a program puts into `.grad` afterwards is new."""

    @functools.wraps(zero_grad)
    def clear(module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        zero_grad(module, *args, **kwargs)
        peers = peers_here()
        if isinstance(peers, Connected):
            peers.note_cleared(module.parameters())

    return clear


def _parameters_of(optimizer: torch.optim.Optimizer) -> tuple[Any, list[torch.Tensor]]:
    return optimizer, [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _listed(parameters: torch.Tensor | Iterable[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
    """Return what is given, as a list if it can be gone through once only."""
    if isinstance(parameters, torch.Tensor):
        return parameters, [parameters]
    listed = list(parameters)
    return listed, listed
