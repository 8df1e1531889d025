"""Small float64 models with every way a parameter can be used, and the bare PyTorch loop they are compared with."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from raydist.collectives.base import Communicator
from raydist.collectives.reducer.reducer import GradientReducer
from tests.collectives.local_group import LocalGroup
from tests.collectives.threads import run_ranks

FEATURES, CLASSES = 6, 20


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, 1))


class Shared(nn.Module):
    """A weight used twice, one that is frozen, one that is never used, one that only some rows use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.second = nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.seldom = nn.Linear(FEATURES, FEATURES)
        self.never = nn.Linear(2, 2)
        self.head = nn.Linear(FEATURES, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.second(self.frozen(self.first(x).tanh())).tanh()
        chosen = x[:, 0] > 0.5
        if bool(chosen.any()):
            hidden = hidden + torch.where(chosen[:, None], self.seldom(x), torch.zeros((), dtype=x.dtype))
        result: torch.Tensor = self.head(hidden)
        return result


class Checkpointed(nn.Module):
    """A layer is used twice inside a checkpointed segment, another inside and outside of it."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.inside = nn.Linear(FEATURES, FEATURES)
        self.both = nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, 1)

    def segment(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inside(self.both(self.inside(x).tanh()).tanh()).tanh()
        return result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # A reentrant segment has gradients only if its input has.
        hidden = checkpoint(self.segment, self.both(x), use_reentrant=self.use_reentrant)
        hidden = checkpoint(self.segment, hidden, use_reentrant=self.use_reentrant)
        result: torch.Tensor = self.head(self.both(hidden))
        return result


class Lookup(nn.Module):
    """Sparse gradients: of single rows, of bags, and of an embedding that only some rows reach."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Embedding(CLASSES, 3, sparse=True)
        self.bag = nn.EmbeddingBag(CLASSES, 3, mode="sum", sparse=True)
        self.seldom = nn.Embedding(CLASSES, 3, sparse=True)
        self.head = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = (x.abs() * 4).long().clamp(max=CLASSES - 1)
        hidden = self.single(index).sum(1) + self.bag(index)
        (chosen,) = (x[:, 0] > 0.5).nonzero(as_tuple=True)
        if len(chosen):
            hidden = hidden.index_add(0, chosen, self.seldom(index[chosen, 0]))
        result: torch.Tensor = self.head(hidden.tanh())
        return result


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(FEATURES, 1),
    "shared": Shared,
    "checkpoint": lambda: Checkpointed(use_reentrant=False),
    "reentrant-checkpoint": lambda: Checkpointed(use_reentrant=True),
    "lookup": Lookup,
}


_SEEDED = threading.Lock()  # ranks that are threads share torch's generator


def build(name: str) -> nn.Module:
    with _SEEDED:
        torch.manual_seed(0)
        return MODELS[name]().double()


def rows(count: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, FEATURES, dtype=torch.float64, generator=generator)
    return features, torch.randn(count, 1, dtype=torch.float64, generator=generator)


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def run_backward(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    loss_of(model, batch).backward()


def pieces(count: int, world_size: int) -> list[slice]:
    """Consecutive pieces of ceil(count / world_size) rows, later ones shorter or empty."""
    size = -(-count // world_size)
    return [slice(min(rank * size, count), min((rank + 1) * size, count)) for rank in range(world_size)]


Step = Callable[[nn.Module, Callable[[], None]], None]
"""Trains a model for one step; the second argument runs one backward pass over the step's batch."""


def train_alone(model: nn.Module, batches: Sequence[tuple[torch.Tensor, torch.Tensor]], step: Step) -> nn.Module:
    """The reference: one process, whole batches."""
    for batch in batches:
        step(model, functools.partial(run_backward, model, batch))
    return model


def train_together(
    model: nn.Module,
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    step: Step,
    *,
    world_size: int,
    bucket_bytes: int = 200,
    compression: Literal["fp16", "bf16"] | None = None,
    wrap: Callable[[LocalGroup], Communicator] = lambda group: group,
) -> list[nn.Module]:
    """The same on replicas that each take a piece of every batch; those without rows run on two others."""
    replicas = [copy.deepcopy(model) for _ in range(world_size)]

    def body(group: LocalGroup) -> nn.Module:
        replica = replicas[group.rank]
        reducer = GradientReducer(
            wrap(group), bucket_bytes=bucket_bytes, first_bucket_bytes=64, compression=compression
        )
        reducer.attach(replica.parameters())
        for features, targets in batches:
            piece = pieces(len(features), group.world_size)[group.rank]
            own = (features[piece], targets[piece])
            weight = len(own[0]) / len(features)
            shown = own if weight else (features[:2] * torch.nan, targets[:2])
            if isinstance(replica, Lookup) and not weight:
                shown = (features[:2], targets[:2])
            with reducer.step(weight=weight, empty=not weight):
                step(replica, functools.partial(run_backward, replica, shown))
        reducer.close()
        return replica

    return run_ranks(world_size, body)


def assert_equal_parameters(expected: nn.Module, replicas: Sequence[nn.Module], *, start: nn.Module) -> None:
    """Parameters and gradients of every replica equal the reference's, and training did something."""
    before = dict(start.named_parameters())
    for replica in replicas:
        for (name, reference), parameter in zip(expected.named_parameters(), replica.parameters(), strict=True):
            torch.testing.assert_close(parameter, reference, rtol=1e-9, atol=1e-12)
            assert (parameter.grad is None) == (reference.grad is None), name
            if reference.grad is None or parameter.grad is None:
                continue
            assert parameter.grad.layout == reference.grad.layout, name
            torch.testing.assert_close(parameter.grad.to_dense(), reference.grad.to_dense(), rtol=1e-9, atol=1e-12)
            assert not torch.equal(parameter, before[name]), f"{name} did not move"


def plain(model: nn.Module, backward: Callable[[], None]) -> None:
    model.zero_grad()
    backward()
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


def assert_gradients_of_one(
    start: nn.Module,
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    body: Callable[[nn.Module, GradientReducer, int], None],
) -> None:
    """A body on two replicas leaves the gradients that one process accumulates over whole batches."""
    expected = train_alone(copy.deepcopy(start), batches, lambda _, backward: backward())
    for replica in on_two(start, body):
        torch.testing.assert_close(gradients_of(replica), gradients_of(expected), rtol=1e-12, atol=1e-15)


def gradients_of(model: nn.Module) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def half(batch: tuple[torch.Tensor, torch.Tensor], rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    piece = pieces(len(batch[0]), 2)[rank]
    return batch[0][piece], batch[1][piece]
