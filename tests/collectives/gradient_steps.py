"""Ways in which training steps use gradients, and two replicas that take such steps."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

from raydist.collectives.reducer.reducer import GradientReducer
from tests.collectives.local_group import LocalGroup
from tests.collectives.models import (
    Step,
    pieces,
)
from tests.collectives.threads import run_ranks


def plain(model: nn.Module, backward: Callable[[], None]) -> None:
    model.zero_grad()
    backward()
    descend(model)


def clipped(model: nn.Module, backward: Callable[[], None]) -> None:
    model.zero_grad()
    backward()
    dense = [p for p in model.parameters() if p.grad is not None and not p.grad.is_sparse]
    nn.utils.clip_grad_norm_(dense, 0.1)
    descend(model)


def accumulated(model: nn.Module, backward: Callable[[], None]) -> None:
    """Two backward passes a step, and gradients that are never zeroed."""
    backward()
    backward()
    descend(model)


def zeroed_in_place(model: nn.Module, backward: Callable[[], None]) -> None:
    model.zero_grad(set_to_none=False)
    backward()
    descend(model)


def kept(model: nn.Module, backward: Callable[[], None]) -> None:
    """What `.grad` held in earlier steps is looked at later, as it is and through another tensor."""
    earlier = model.__dict__.setdefault("earlier", [])
    model.zero_grad()
    backward()
    descend(model)
    for parameter in model.parameters():
        if parameter.grad is not None and not parameter.grad.is_sparse:
            alias = parameter.grad.detach().view(-1) if len(earlier) % 3 == 0 else parameter.grad
            earlier.append((alias, alias.clone()))
    for tensor, then in earlier[-9:]:
        assert torch.equal(tensor, then)
    del earlier[:-9]


def now_and_then(model: nn.Module, backward: Callable[[], None]) -> None:
    """Gradients are dropped, kept, zeroed or detached, each by another parameter's number."""
    turn = model.__dict__.setdefault("turn", [0])
    turn[0] += 1
    for number, parameter in enumerate(model.parameters()):
        if parameter.grad is None or parameter.grad.is_sparse or (number + turn[0]) % 4 == 0:
            parameter.grad = None
        elif (number + turn[0]) % 4 == 1:
            parameter.grad.detach_().zero_()
        elif (number + turn[0]) % 4 == 2:
            parameter.grad.mul_(0.5)
    backward()
    descend(model)


def descend(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-0.1)


def hooked(model: nn.Module, backward: Callable[[], None]) -> None:
    """A hook that is no linear function replaces each gradient; gradients are accumulated over two passes."""
    if model.__dict__.setdefault("is_hooked", []):
        model.zero_grad()
    else:
        model.__dict__["is_hooked"].append(True)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient: gradient * (1 + gradient.to_dense().abs().max().item()))
    backward()
    backward()
    descend(model)


def stepped_in_backward(model: nn.Module, backward: Callable[[], None]) -> None:
    """Each parameter is stepped, and its gradient dropped, as soon as it has one."""
    if not model.__dict__.setdefault("is_hooked", []):
        model.__dict__["is_hooked"].append(True)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient: gradient * 2)
                parameter.register_post_accumulate_grad_hook(step_one)
    backward()


def step_one(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.add_(parameter.grad, alpha=-0.1)  # gradient mode is off in hooks
    parameter.grad = None


STEPS: dict[str, Step] = {
    "plain": plain,
    "clipped": clipped,
    "accumulated": accumulated,
    "zeroed in place": zeroed_in_place,
    "kept": kept,
    "now and then": now_and_then,
    "hooked": hooked,
    "stepped in backward": stepped_in_backward,
}


# There torch calls hooks once for each segment that uses the parameter, here they are called once.
ONCE_A_SEGMENT = [("reentrant-checkpoint", hooked), ("reentrant-checkpoint", stepped_in_backward)]


def on_two(start: nn.Module, body: Callable[[nn.Module, GradientReducer, int], None]) -> list[nn.Module]:
    """Run a body on two replicas of a model, each with a reducer in small buckets."""
    replicas = [copy.deepcopy(start) for _ in range(2)]

    def main(group: LocalGroup) -> nn.Module:
        reducer = GradientReducer(group, bucket_bytes=128, first_bucket_bytes=64)
        reducer.attach(replicas[group.rank].parameters())
        body(replicas[group.rank], reducer, group.rank)
        return replicas[group.rank]

    return run_ranks(2, main)


def gradients_of(model: nn.Module) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def half(batch: tuple[torch.Tensor, torch.Tensor], rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    piece = pieces(len(batch[0]), 2)[rank]
    return batch[0][piece], batch[1][piece]
