"""Losses, their denominators, and means."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import raydist as rd
from raydist.training.losses import (
    kind_of,
    loss_by_name,
    mean_loss,
    require_mean_over_rows,
    weighted_loss,
)
from raydist.training.metrics import Mean

CONTEXT = rd.get_replica_context()


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: mean_loss(torch.ones(3), 2, 2), rd.SpecError, r"got shape \(3,\) for 2 rows"),
        (lambda: mean_loss(0.5, 1, 1), rd.SpecError, "must return a tensor .* got float"),
        (lambda: weighted_loss(torch.ones(3), torch.ones(2), CONTEXT), rd.SpecError, r"got shape \(3,\) for 2 rows"),
        (lambda: weighted_loss(torch.ones(2), torch.ones(2, 2), CONTEXT), rd.SpecError, r"row, got shape \(2, 2\)"),
        (lambda: loss_by_name("mses"), rd.InvalidArgumentError, r"got 'mses'\. Did you mean 'MSELoss'\? .*: BCELoss, "),
        (lambda: loss_by_name("triplet_margin"), rd.InvalidArgumentError, "loss must be one of torch's"),
    ],
)
def test_what_is_no_loss(call: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()


NO_MEANS = {
    "sum": lambda p, t: ((p - t) ** 2).sum(),
    "ratio": lambda p, t: (p * t).sum() / t.sum(),
    "pairs": lambda p, t: (p @ p.T).mean(),
    "masked": lambda p, t: p[t > 0].mean(),
}
MEANS = {
    "mean": lambda p, t: (p - t).abs().mean(),
    "difference": lambda p, t: (p + 1e4).mean() - (t + 1e4).mean(),
    "random": lambda p, t: (p * torch.rand(())).mean(),
    "of gradients": lambda p, t: torch.autograd.grad((p**2).sum(), p)[0].sum(),
    "of a fixed number of rows": lambda p, t: (p.view(5, -1) * torch.arange(5)[:, None]).sum(),
    "not finite": lambda p, t: p.sum() / 0,
}


@pytest.mark.parametrize("name", [*NO_MEANS, *MEANS])
def test_a_scalar_is_compared_with_parts_of_its_rows(name: str) -> None:
    prediction, target = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), torch.ones(5, 4)
    target[:3, 1:] = 0
    prediction.requires_grad_()
    loss: Any = (NO_MEANS | MEANS)[name]
    value, state = loss(prediction, target).detach(), torch.get_rng_state()
    if name in NO_MEANS:
        with pytest.raises(rd.InvalidArgumentError, match="must return a mean over its rows"):
            require_mean_over_rows(loss, prediction, target, 5, value)
    else:
        require_mean_over_rows(loss, prediction, target, 5, value)
    assert torch.equal(torch.get_rng_state(), state)
    require_mean_over_rows(loss, prediction[:1], target[:1], 1, value)  # one row says nothing


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("mse", nn.MSELoss),
        ("MSELoss", nn.MSELoss),
        ("cross_entropy", nn.CrossEntropyLoss),
        ("bce_with_logits", nn.BCEWithLogitsLoss),
        ("l1", nn.L1Loss),
        ("nll_loss", nn.NLLLoss),
        ("huber", nn.HuberLoss),
    ],
)
def test_a_name_is_a_loss_of_torchs_and_its_form_for_rows(name: str, kind: Any) -> None:
    loss, per_row = loss_by_name(name)
    assert type(loss) is type(per_row) is kind
    assert [str(part.reduction) for part in (loss, per_row)] == ["mean", "none"]


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (nn.MSELoss(), "rows"),
        (nn.MSELoss(reduction="none"), "rows"),
        (nn.CrossEntropyLoss(reduction="none"), "rows"),
        (nn.CrossEntropyLoss(), "labels"),
        (nn.NLLLoss(weight=torch.ones(2)), "labels"),
        (nn.MSELoss(reduction="sum"), "sum"),
        (partial(F.mse_loss, reduction="sum"), "sum"),
        (F.mse_loss, "unknown"),
        (partial(F.mse_loss), "unknown"),
        (type("Mine", (nn.CrossEntropyLoss,), {})(), "unknown"),
    ],
)
def test_denominators_are_known_by_what_losses_say(loss: Any, kind: str) -> None:
    assert kind_of(loss) == kind


def test_what_the_user_says_goes_before() -> None:
    assert (kind_of(F.mse_loss, "sum"), kind_of(nn.CrossEntropyLoss(), "mean")) == ("sum", "rows")


def test_values_count_by_their_weights() -> None:
    mean = Mean()
    mean.update(2.0, weight=3)
    mean.update(torch.tensor([6.0, 8.0]), weight=torch.tensor([1.0, 0.0]))
    assert mean.compute().item() == pytest.approx((3 * 2 + 6) / 4)


def test_without_weight_the_mean_is_zero() -> None:
    mean = Mean()
    mean.update(5.0, weight=0)
    assert mean.compute().item() == 0.0


def test_sums_keep_the_digits_of_float64() -> None:
    mean = Mean()
    mean.update(2.0**24, weight=1)
    mean.update(1.0, weight=1)
    assert mean.compute().item() == (2**24 + 1) / 2  # float32 would give 2 ** 23
