"""Losses, their denominators and means: one device's, for any replicas, batches and groups."""

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
from raydist.training.losses import loss_by_name, mean_loss, require_mean_over_rows, weighted_loss
from raydist.training.metrics import Mean
from tests.refused import check_refused

CONTEXT = rd.get_replica_context()


def test_what_is_no_loss() -> None:
    two, three = torch.ones(2), torch.ones(3)
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: mean_loss(three, 2, 2), r"got shape \(3,\) for 2 rows"),
        (lambda: mean_loss(0.5, 1, 1), "must return a tensor .* got float"),
        (lambda: weighted_loss(three, two, CONTEXT), r"got shape \(3,\) for 2 rows"),
        (lambda: weighted_loss(two, torch.ones(2, 2), CONTEXT), r"row, got shape \(2, 2\)"),
    ]
    check_refused(lambda call: call(), calls, rd.SpecError)
    names = [
        ("mses", r"got 'mses'\. Did you mean 'MSELoss'\? .*: BCELoss, "),
        ("triplet_margin", "loss must be one of torch's"),
    ]
    check_refused(loss_by_name, names)


MEANS: dict[str, Any] = {
    "mean": lambda p, t: (p - t).abs().mean(),
    "difference": lambda p, t: (p + 1e4).mean() - (t + 1e4).mean(),
    "random": lambda p, t: (p * torch.rand(())).mean(),
    "of gradients": lambda p, t: torch.autograd.grad((p**2).sum(), p)[0].sum(),
    "of a fixed number of rows": lambda p, t: (p.view(5, -1) * torch.arange(5)[:, None]).sum(),
    "not finite": lambda p, t: p.sum() / 0,
}


def test_means_are_not_refused_and_leave_random_numbers_alone() -> None:
    prediction, target = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), torch.ones(5, 4)
    target[:3, 1:] = 0
    prediction.requires_grad_()
    for name, loss in MEANS.items():
        value, state = loss(prediction, target).detach(), torch.get_rng_state()
        require_mean_over_rows(loss, prediction, target, 5, value)
        assert torch.equal(torch.get_rng_state(), state), name
        require_mean_over_rows(loss, prediction[:1], target[:1], 1, value)  # one row says nothing


def test_values_count_by_their_weights_with_the_digits_of_float64() -> None:
    mean = Mean()
    mean.update(2.0, weight=3)
    mean.update(torch.tensor([6.0, 8.0]), weight=torch.tensor([1.0, 0.0]))
    assert mean.compute().item() == pytest.approx((3 * 2 + 6) / 4)
    mean = Mean()
    mean.update(5.0, weight=0)
    assert mean.compute().item() == 0.0
    mean.update(2.0**24, weight=1)
    mean.update(1.0, weight=1)
    assert mean.compute().item() == (2**24 + 1) / 2  # float32 would give 2 ** 23


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


def dataset(kind: str, size: int = BATCH) -> rd.Dataset:
    return rd.Dataset.from_tensor_slices(arrays(kind)).batch(size)


def built(strategy: rd.Strategy, kind: str, loss: Any, momentum: float = 0.0, **settings: Any) -> rd.Model:
    with strategy.scope():
        model = rd.Model(net(kind))
        model.compile(torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum), loss, **settings)
    return model


def check_trained(
    model: rd.Model, kind: str, loss: Any, size: int = BATCH, epochs: int = 1, momentum: float = 0.0
) -> Any:
    """Check that its parameters are those of plain PyTorch, with a step for each `size` rows; return that network."""
    one, (x, y) = net(kind), arrays(kind)
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1, momentum=momentum)
    for start in [*range(0, ROWS, size)] * epochs:
        optimizer.zero_grad()
        loss(one(x[start : start + size]), y[start : start + size]).backward()
        optimizer.step()
    for mine, theirs in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-15)
    return one


@pytest.mark.timeout(180)
def test_groups_of_batches_and_evaluation_are_one_batch(strategy: rd.Strategy) -> None:
    for number, (name, (make, make_whole, kind)) in enumerate(LOSSES.items()):
        accumulate_steps = 1 + number % 2
        with strategy.scope():
            given = make()
        model = built(strategy, kind, given, 0.5, accumulate_steps=accumulate_steps)
        model.fit(dataset(kind), epochs=2, verbose=False)
        loss, (x, y) = make_whole(), arrays(kind)
        one = check_trained(model, kind, loss, BATCH * accumulate_steps, 2, 0.5)
        expected = loss(one(x), y).item()
        for size in (2, 5, ROWS):
            found = model.evaluate(dataset(kind, size), verbose=False)
            assert found["loss"] == pytest.approx(expected, rel=1e-9), (name, size)


@pytest.mark.timeout(180)
def test_a_function_of_a_mean_is_one_of_the_global_mean(strategy: rd.Strategy) -> None:
    model = built(strategy, "soft", rmse)
    model.fit(dataset("soft", ROWS), verbose=False)
    check_trained(model, "soft", rmse, ROWS)
    with strategy.scope():
        model.compile("sgd", rmse, accumulate_steps=2)
    with pytest.raises(rd.InvalidArgumentError, match="accumulate_steps needs a loss that is one mean"):
        model.fit(dataset("soft", ROWS), verbose=False)
    x, y = arrays("soft")
    loss = lambda p, t: ((p - t) ** 2).sum()  # noqa: E731 (as a user writes it)
    model = built(strategy, "soft", loss, loss_reduction="sum")
    expected = ((net("soft")(x) - y) ** 2).sum().item()
    assert model.evaluate(dataset("soft"), verbose=False)["loss"] == pytest.approx(expected, rel=1e-9)


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


@pytest.mark.timeout(180)
def test_a_scalar_that_is_no_mean_over_rows_is_refused_where_replicas_share_the_rows(strategy: rd.Strategy) -> None:
    """Such as label smoothing with ignored labels, written by hand."""
    losses: list[Any] = [masked_mean, dice, lambda p, t: ((p[:, 0] - t) ** 2).sum()]
    for loss in losses:
        kind = "soft" if loss is dice else "labels"
        model = built(strategy, kind, loss)
        if strategy.num_replicas_in_sync > 1:
            with pytest.raises(rd.InvalidArgumentError, match="(?s)must return a mean over its rows .*loss_reduction"):
                model.fit(dataset(kind), verbose=False)
            continue
        model.fit(dataset(kind), verbose=False)
        check_trained(model, kind, loss)
        with strategy.scope():
            model.compile("sgd", loss, accumulate_steps=2)
        with pytest.raises(rd.InvalidArgumentError, match="must return a mean over its rows"):
            model.fit(dataset(kind), verbose=False)


@pytest.mark.timeout(180)
def test_losses_are_not_disturbed_by_the_comparison(strategy: rd.Strategy) -> None:
    with strategy.scope():
        counting = Counting()
    model = built(strategy, "soft", counting)
    model.fit(dataset("soft"), verbose=False)
    check_trained(model, "soft", Counting())


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


GLOBAL: list[Callable[[Any, Any], torch.Tensor]] = [
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
]


def test_a_loss_of_pieces_is_that_of_all_rows() -> None:
    torch.manual_seed(0)
    prediction, target = torch.randn(7, 3, dtype=torch.float64), torch.randint(0, 3, (7,))
    target[0] = target[4:] = -100  # the last replica has no label that counts
    for number, loss in enumerate(GLOBAL):
        whole, local = (prediction.clone().requires_grad_() for _ in range(2))
        expected = loss(whole, target)
        expected.backward()
        pieces = Pieces()

        def run(loss: Any = loss, local: torch.Tensor = local, pieces: Pieces = pieces) -> torch.Tensor:
            rows = [slice(0, 3), slice(3, 4), slice(4, 7)][pieces.rank]
            with GlobalMeans(pieces) as means:  # type: ignore[arg-type]
                found: torch.Tensor = loss(local[rows], target[rows])
            assert means.is_global(found)
            return found

        for one in pieces.of_all(run, 3):
            torch.testing.assert_close(one, expected, rtol=1e-12, atol=0, msg=f"loss {number}")
            one.backward()
        torch.testing.assert_close(local.grad, whole.grad, rtol=1e-9, atol=1e-15, msg=f"loss {number}")


def test_a_loss_with_a_local_part_is_not_global() -> None:
    losses: list[Callable[[Any, Any], torch.Tensor]] = [
        lambda p, t: ((p - t) ** 2).mean(),
        lambda p, t: F.mse_loss(p, t, reduction="sum") / len(p),
        lambda p, t: F.mse_loss(p, t) * (p > 0).double().mean(),  # a factor of local rows
        lambda p, t: F.mse_loss(p, t).add_(p.mean()),
        lambda p, t: torch.where(p[0, 0] > 0, F.mse_loss(p, t), 0.0),
        lambda p, t: torch.stack([F.mse_loss(p, t), p.mean()]).sum(),
    ]
    for number, loss in enumerate(losses):
        with GlobalMeans(rd.get_replica_context()) as means:
            found = loss(torch.randn(4, 2).double(), torch.zeros(4, 2).double())
        assert not means.is_global(found), number
