"""Losses of (prediction, target) that are no mean over rows: one device's, for any replicas, batches and groups."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import raydist as rd
from raydist.training.global_means import GlobalMeans

ROWS, BATCH, CLASSES = 13, 4, 3
WEIGHTS = [1.0, 5.0, 0.2]


def weighted(**settings: Any) -> nn.Module:
    return nn.CrossEntropyLoss(weight=torch.tensor(WEIGHTS, dtype=torch.float64), **settings)


def rmse(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(prediction, target).sqrt()


def masked(prediction: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A sum and its denominator."""
    mask = target != -100
    return ((prediction[:, 0] - target) ** 2 * mask).sum(), mask.sum()


def masked_mean(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    total, count = masked(prediction, target)
    return total / count


# Name: the loss for `compile`, the same for a whole batch, the kind of targets.
LOSSES: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "labels": (nn.CrossEntropyLoss, nn.CrossEntropyLoss, "labels"),
    "class weights": (weighted, weighted, "labels"),
    "smooth": (lambda: weighted(label_smoothing=0.1), lambda: weighted(label_smoothing=0.1), "labels"),
    "sum": (lambda: nn.CrossEntropyLoss(reduction="sum"), lambda: nn.CrossEntropyLoss(reduction="sum"), "labels"),
    "soft": (weighted, weighted, "soft"),
    "images": (nn.CrossEntropyLoss, nn.CrossEntropyLoss, "images"),
    "function": (lambda: F.cross_entropy, lambda: F.cross_entropy, "labels"),
    "partial": (
        lambda: functools.partial(F.cross_entropy, ignore_index=2),
        lambda: functools.partial(F.cross_entropy, ignore_index=2),
        "classes",
    ),
    "pair": (lambda: masked, lambda: masked_mean, "labels"),
    "rows": (lambda: nn.MSELoss(), lambda: nn.MSELoss(), "soft"),
    "own mean": (lambda: lambda p, t: ((p - t) ** 2).mean(), lambda: nn.MSELoss(), "soft"),
    "per row": (lambda: lambda p, t: ((p - t) ** 2).sum(1), lambda: lambda p, t: ((p - t) ** 2).sum(1).mean(), "soft"),
}


def net(kind: str) -> nn.Module:
    torch.manual_seed(2)
    layers = [nn.Linear(4, 6), nn.Unflatten(1, (3, 2))] if kind == "images" else [nn.Linear(4, CLASSES)]
    return nn.Sequential(*layers).double()


def arrays(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    x, labels = torch.randn(ROWS, 4, dtype=torch.float64), torch.randint(0, CLASSES, (ROWS,))
    if kind == "soft":
        return x, torch.rand(ROWS, CLASSES, dtype=torch.float64)
    if kind == "images":
        labels = torch.randint(0, CLASSES, (ROWS, 2))
        labels[5, 1] = -100
    if kind != "classes":
        labels[:3] = labels[10] = -100  # the first batch has one label that counts
    return x, labels


@pytest.fixture(params=[1, 3])
def strategy(request: pytest.FixtureRequest, mirrored: Callable[[int], rd.Strategy]) -> rd.Strategy:
    return rd.OneDeviceStrategy("cpu") if request.param == 1 else mirrored(request.param)


@pytest.mark.ray
@pytest.mark.timeout(180)
@pytest.mark.parametrize("accumulate_steps", [1, 2])
@pytest.mark.parametrize("name", LOSSES)
def test_groups_of_batches_and_evaluation_are_one_batch(
    strategy: rd.Strategy, name: str, accumulate_steps: int
) -> None:
    make, make_whole, kind = LOSSES[name]
    x, y = arrays(kind)
    with strategy.scope():
        model = rd.Model(net(kind))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        model.compile(optimizer, make(), accumulate_steps=accumulate_steps)
    model.fit(rd.Dataset.from_tensor_slices((x, y)).batch(BATCH), epochs=2, verbose=False)
    one, loss = net(kind), make_whole()
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.5)
    for start in [*range(0, ROWS, BATCH * accumulate_steps)] * 2:
        rows = slice(start, start + BATCH * accumulate_steps)
        optimizer.zero_grad()
        loss(one(x[rows]), y[rows]).backward()
        optimizer.step()
    for mine, theirs in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-15)
    expected = loss(one(x), y).item()
    for size in (2, 5, ROWS):
        found = model.evaluate(rd.Dataset.from_tensor_slices((x, y)).batch(size), verbose=False)
        assert found["loss"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.ray
@pytest.mark.timeout(180)
def test_a_function_of_a_mean_is_one_of_the_global_mean(strategy: rd.Strategy) -> None:
    x, y = arrays("soft")
    with strategy.scope():
        model = rd.Model(net("soft"))
        model.compile(torch.optim.SGD(model.parameters(), lr=0.1), rmse)
    model.fit(rd.Dataset.from_tensor_slices((x, y)).batch(ROWS), verbose=False)
    one = net("soft")
    rmse(one(x), y).backward()
    for mine, theirs in zip(model.parameters(), one.parameters(), strict=True):
        assert theirs.grad is not None
        torch.testing.assert_close(mine, theirs - 0.1 * theirs.grad, rtol=1e-9, atol=1e-15)
    with strategy.scope():
        model.compile("sgd", rmse, accumulate_steps=2)
    with pytest.raises(rd.InvalidArgumentError, match="accumulate_steps needs a loss that is one mean"):
        model.fit(rd.Dataset.from_tensor_slices((x, y)).batch(ROWS), verbose=False)


@pytest.mark.ray
@pytest.mark.timeout(180)
def test_a_sum_that_says_so_is_one(strategy: rd.Strategy) -> None:
    x, y = arrays("soft")
    with strategy.scope():
        model = rd.Model(net("soft"))
        loss = lambda p, t: ((p - t) ** 2).sum()  # noqa: E731 (as a user writes it)
        model.compile(torch.optim.SGD(model.parameters(), lr=0.1), loss, loss_reduction="sum")
    expected = ((net("soft")(x) - y) ** 2).sum().item()
    found = model.evaluate(rd.Dataset.from_tensor_slices((x, y)).batch(BATCH), verbose=False)
    assert found["loss"] == pytest.approx(expected, rel=1e-9)


def dice(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A ratio of sums over the batch."""
    return 1 - 2 * (prediction.sigmoid() * target).sum() / (prediction.sigmoid() + target).sum()


class Counting(nn.Module):
    """A mean over rows whose factor follows from its number of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return ((prediction - target) ** 2).mean() * self.calls


@pytest.mark.ray
@pytest.mark.timeout(180)
@pytest.mark.parametrize("loss", [masked_mean, dice, lambda p, t: ((p[:, 0] - t) ** 2).sum()])
def test_a_scalar_that_is_no_mean_over_rows_is_refused_where_replicas_share_the_rows(
    strategy: rd.Strategy, loss: Any
) -> None:
    """Such as label smoothing with ignored labels, written by hand."""
    kind = "soft" if loss is dice else "labels"
    x, y = arrays(kind)
    with strategy.scope():
        model = rd.Model(net(kind))
        model.compile(torch.optim.SGD(model.parameters(), lr=0.1), loss)
    dataset = rd.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    if strategy.num_replicas_in_sync > 1:
        with pytest.raises(rd.InvalidArgumentError, match="(?s)must return a mean over its rows .*loss_reduction"):
            model.fit(dataset, verbose=False)
        return
    model.fit(dataset, verbose=False)  # as in plain PyTorch
    one = net(kind)
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    for start in range(0, ROWS, BATCH):
        optimizer.zero_grad()
        loss(one(x[start : start + BATCH]), y[start : start + BATCH]).backward()
        optimizer.step()
    for mine, theirs in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-15)
    with strategy.scope():
        model.compile("sgd", loss, accumulate_steps=2)
    with pytest.raises(rd.InvalidArgumentError, match="must return a mean over its rows"):
        model.fit(dataset, verbose=False)


@pytest.mark.ray
@pytest.mark.timeout(180)
def test_losses_are_not_disturbed_by_the_comparison(strategy: rd.Strategy) -> None:
    x, y = arrays("soft")
    with strategy.scope():
        model = rd.Model(net("soft"))
        model.compile(torch.optim.SGD(model.parameters(), lr=0.1), Counting())
    model.fit(rd.Dataset.from_tensor_slices((x, y)).batch(BATCH), verbose=False)
    one, loss = net("soft"), Counting()
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    for start in range(0, ROWS, BATCH):
        optimizer.zero_grad()
        loss(one(x[start : start + BATCH]), y[start : start + BATCH]).backward()
        optimizer.step()
    for mine, theirs in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-15)


CLASS_WEIGHTS = torch.tensor([1.0, 0.5, 4.0], dtype=torch.float64)


class Pieces:
    """Stands for the context of each replica in turn: `all_reduce` knows what all of them bring."""

    def __init__(self) -> None:
        self.brought: list[list[torch.Tensor]] = []
        self._answers: Iterator[torch.Tensor] | None = None

    def all_reduce(self, op: Any, value: torch.Tensor) -> torch.Tensor:
        if self._answers is not None:
            return next(self._answers)
        self.brought[-1].append(value)
        return value

    def of_all(self, run: Callable[[], Any], replicas: int) -> list[Any]:
        for self.rank in range(replicas):
            self.brought.append([])
            run()
        results = []
        for self.rank in range(replicas):
            self._answers = iter([sum(parts, torch.zeros(2)) for parts in zip(*self.brought, strict=True)])
            results.append(run())
        return results


def soft(target: torch.Tensor) -> torch.Tensor:
    return F.one_hot(target.clamp(min=0), 3).double()


@pytest.mark.parametrize(
    "loss",
    [
        lambda p, t: F.cross_entropy(p, t),
        lambda p, t: F.cross_entropy(p, t, weight=CLASS_WEIGHTS, label_smoothing=0.2),
        lambda p, t: F.cross_entropy(p, soft(t), weight=CLASS_WEIGHTS),
        lambda p, t: F.nll_loss(p.log_softmax(1), t, CLASS_WEIGHTS),
        lambda p, t: nn.CrossEntropyLoss()(p, t) / 2 + 0.1 * F.mse_loss(p, soft(t)),
        lambda p, t: torch.sqrt(F.l1_loss(p, soft(t))),
        lambda p, t: F.huber_loss(p[t >= 0], soft(t)[t >= 0]),
        lambda p, t: F.mse_loss(p, soft(t), weight=soft(t) + 0.5),  # type: ignore[call-arg]
        lambda p, t: F.binary_cross_entropy_with_logits(p, soft(t), weight=CLASS_WEIGHTS),
        lambda p, t: F.kl_div(p.log_softmax(1), soft(t), reduction="batchmean"),
        lambda p, t: F.multi_margin_loss(p, t.clamp(min=0), weight=CLASS_WEIGHTS),
        lambda p, t: torch.stack([F.cross_entropy(p, t), F.mse_loss(p, soft(t)).to(torch.float64)]).sum(),
        lambda p, t: torch.zeros((), dtype=torch.float64) + F.cross_entropy(p, t),
    ],
)
def test_a_loss_of_pieces_is_that_of_all_rows(loss: Callable[[Any, Any], torch.Tensor]) -> None:
    torch.manual_seed(0)
    prediction, target = torch.randn(7, 3, dtype=torch.float64), torch.randint(0, 3, (7,))
    target[0] = target[4:] = -100  # the last replica has no label that counts
    whole = prediction.clone().requires_grad_()
    expected = loss(whole, target)
    expected.backward()
    local = prediction.clone().requires_grad_()
    pieces = Pieces()

    def run() -> torch.Tensor:
        rows = [slice(0, 3), slice(3, 4), slice(4, 7)][pieces.rank]
        with GlobalMeans(pieces) as means:  # type: ignore[arg-type]
            found = loss(local[rows], target[rows])
        assert means.is_global(found)
        return found

    found = pieces.of_all(run, 3)
    for one in found:
        torch.testing.assert_close(one, expected, rtol=1e-12, atol=0)
        one.backward()
    torch.testing.assert_close(local.grad, whole.grad, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize(
    "loss",
    [
        lambda p, t: ((p - t) ** 2).mean(),
        lambda p, t: F.mse_loss(p, t, reduction="sum") / len(p),
        lambda p, t: F.mse_loss(p, t) * (p > 0).double().mean(),  # a factor of local rows
        lambda p, t: F.mse_loss(p, t).add_(p.mean()),
        lambda p, t: torch.where(p[0, 0] > 0, F.mse_loss(p, t), 0.0),
        lambda p, t: torch.stack([F.mse_loss(p, t), p.mean()]).sum(),
    ],
)
def test_a_loss_with_a_local_part_is_not_global(loss: Callable[[Any, Any], torch.Tensor]) -> None:
    with GlobalMeans(rd.get_replica_context()) as means:
        found = loss(torch.randn(4, 2).double(), torch.zeros(4, 2).double())
    assert not means.is_global(found)


def test_batches_are_joined_by_one_denominator_only() -> None:
    x = torch.randn(4, 2, requires_grad=True)
    labels = torch.tensor([0, 1, -100, -100])
    cases: list[tuple[Callable[[], torch.Tensor], bool]] = [
        (lambda: 2 * F.cross_entropy(x, labels), True),
        (lambda: F.cross_entropy(x, labels) + F.nll_loss(x, labels), True),
        (lambda: F.cross_entropy(x, labels) + F.mse_loss(x, x.detach() + 1), False),
        (lambda: F.mse_loss(x, x.detach() + 1).sqrt(), False),
    ]
    for loss, has_one in cases:
        with GlobalMeans(rd.get_replica_context()) as means:
            found = loss()
        if has_one:
            means.require_one_denominator(found)
        else:
            with pytest.raises(rd.InvalidArgumentError, match="accumulate_steps needs a loss that is one mean"):
                means.require_one_denominator(found)
