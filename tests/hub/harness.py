"""Train a model by plain PyTorch on one device and by replicas, and compare the parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import raydist as rd

Tensors = Mapping[str, torch.Tensor]
Loss = Callable[[Any, Any], torch.Tensor]

ROWS = 11
BATCH = 6  # 3 rows for each of two replicas, then 3 and 2
RATE = 0.05
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Case:
    """A model, `ROWS` rows for it, and its mean loss over a batch; `prepare` is applied on the replicas alone."""

    make: Callable[[], Any]
    rows: Tensors
    loss: Loss
    tolerance: float = TOLERANCE
    prepare: Callable[[Any], Any] = lambda model: model


def seeded(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return make()


def sgd(model: Any) -> torch.optim.SGD:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)


def batches_of(rows: Tensors, epochs: int = 1) -> list[Tensors]:
    """The batches that `Dataset.batch(BATCH)` makes."""
    starts = range(0, ROWS, BATCH)
    return [{name: value[at : at + BATCH] for name, value in rows.items()} for _ in range(epochs) for at in starts]


def train_plainly(model: Any, batches: Sequence[Any], loss: Loss) -> Any:
    optimizer = sgd(model)
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
    return model


def train_on_replicas(strategy: rd.Strategy, make: Callable[[], Any], data: Any, loss: Loss, epochs: int = 1) -> Any:
    with strategy.scope():
        model = seeded(make)
        optimizer = sgd(model)

    def step(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        return value.detach()

    batches = strategy.distribute_dataset(data)
    for _ in range(epochs):
        for batch in batches:
            strategy.run(step, args=(batch,))
    return model


def check_equal(strategy: rd.Strategy, case: Case, epochs: int = 2) -> Any:
    """Check that replicas reach the parameters and buffers of one device; return the model of the replicas."""
    start = seeded(case.make).state_dict()
    plain = train_plainly(seeded(case.make), batches_of(case.rows, epochs), case.loss)
    data = rd.Dataset.from_tensor_slices(dict(case.rows)).batch(BATCH)
    model = train_on_replicas(strategy, lambda: case.prepare(case.make()), data, case.loss, epochs)
    assert isinstance(model, type(plain))
    assert_trained(start, plain)
    assert_same(model.state_dict(), plain.state_dict(), case.tolerance)
    return model


def assert_trained(start: Tensors, model: Any) -> None:
    """Training must have moved the parameters by far more than the tolerance."""
    moved = max(float((value - start[name]).abs().max()) for name, value in model.state_dict().items())
    assert moved > 1e-4, moved


def assert_same(found: Tensors, expected: Tensors, tolerance: float = TOLERANCE) -> None:
    assert found.keys() == expected.keys()
    worst = max((difference(found[name], value), name) for name, value in expected.items())
    assert worst[0] <= tolerance, worst


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest value; values below 1e-3 count as 1e-3."""
    if not expected.numel():
        return 0.0
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    size = max(float(expected.abs().max()), 1e-3)
    return float((found.detach().double() - expected.detach().double()).abs().max()) / size
