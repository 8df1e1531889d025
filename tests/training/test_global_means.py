from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import raydist as rd
from raydist.training.global_means import GlobalMeans

CLASSES = torch.tensor([1.0, 0.5, 4.0], dtype=torch.float64)


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
        lambda p, t: F.cross_entropy(p, t, weight=CLASSES, label_smoothing=0.2),
        lambda p, t: F.cross_entropy(p, soft(t), weight=CLASSES),
        lambda p, t: F.nll_loss(p.log_softmax(1), t, CLASSES),
        lambda p, t: nn.CrossEntropyLoss()(p, t) / 2 + 0.1 * F.mse_loss(p, soft(t)),
        lambda p, t: torch.sqrt(F.l1_loss(p, soft(t))),
        lambda p, t: F.huber_loss(p[t >= 0], soft(t)[t >= 0]),
        lambda p, t: F.mse_loss(p, soft(t), weight=soft(t) + 0.5),  # type: ignore[call-arg]
        lambda p, t: F.binary_cross_entropy_with_logits(p, soft(t), weight=CLASSES),
        lambda p, t: F.kl_div(p.log_softmax(1), soft(t), reduction="batchmean"),
        lambda p, t: F.multi_margin_loss(p, t.clamp(min=0), weight=CLASSES),
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
