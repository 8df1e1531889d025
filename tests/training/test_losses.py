from __future__ import annotations

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
    loss_of,
    mean_loss,
    require_mean_over_rows,
    weighted_loss,
)

CONTEXT = rd.get_replica_context()


def test_a_scalar_is_the_mean_of_the_rows() -> None:
    loss = mean_loss(torch.tensor(0.5), 7, 14)
    assert (loss.objective.item(), loss.denominator, loss.total.item(), loss.weight) == (0.25, 14, 3.5, 7)


@pytest.mark.parametrize("per_row", [[1.0, 3.0], [[1.0], [3.0]], [[0.0, 2.0], [3.0, 3.0]]])
def test_losses_per_row_are_averaged(per_row: list[object]) -> None:
    assert mean_loss(torch.tensor(per_row), 2, 2).objective.item() == 2.0


def test_weights_make_a_weighted_mean() -> None:
    rows, weights = torch.tensor([[1.0, 3.0], [6.0, 6.0], [9.0, 9.0]]), torch.tensor([[1.0], [3.0], [0.0]])
    loss = weighted_loss(rows, weights, CONTEXT)
    assert loss.objective.item() == pytest.approx((2 + 18) / 4)
    assert (float(loss.total), float(loss.weight)) == (20.0, 4.0)


def test_no_weight_anywhere_is_a_loss_of_zero_with_gradients_of_zero() -> None:
    value = torch.tensor([2.0], requires_grad=True)
    objective = weighted_loss(value, torch.zeros(1), CONTEXT).objective
    objective.backward()
    assert objective.item() == 0.0
    assert value.grad is not None
    assert value.grad.tolist() == [0.0]


def test_a_scalar_loss_can_not_be_weighted() -> None:
    with pytest.raises(rd.InvalidArgumentError, match='one value per row, got a scalar.*reduction="none"'):
        weighted_loss(torch.tensor(1.0), torch.ones(3), CONTEXT)


def test_losses_must_be_one_per_row() -> None:
    with pytest.raises(rd.SpecError, match=r"got shape \(3,\) for 2 rows"):
        mean_loss(torch.ones(3), 2, 2)
    with pytest.raises(rd.SpecError, match=r"got shape \(3,\) for 2 rows"):
        weighted_loss(torch.ones(3), torch.ones(2), CONTEXT)


def test_weights_must_be_one_per_row() -> None:
    with pytest.raises(rd.SpecError, match=r"one number per row, got shape \(2, 2\)"):
        weighted_loss(torch.ones(2), torch.ones(2, 2), CONTEXT)


def test_a_loss_must_be_a_tensor() -> None:
    with pytest.raises(rd.SpecError, match="must return a tensor .* got float"):
        mean_loss(0.5, 1, 1)


def test_a_pair_is_a_sum_and_its_denominator() -> None:
    loss = loss_of(lambda: (torch.tensor(6.0), 4), "unknown", 2, CONTEXT)
    assert (float(loss.objective), float(loss.total)) == (1.5, 6.0)
    assert loss.denominator == loss.weight == 4


def test_a_scalar_with_a_part_that_is_no_mean_of_torchs_is_the_one_that_the_user_wrote() -> None:
    x = torch.randn(3, 2, requires_grad=True)
    written = F.mse_loss(x, torch.ones(3, 2)) + x.abs().mean()
    loss = loss_of(lambda: F.mse_loss(x, torch.ones(3, 2)) + x.abs().mean(), "unknown", 3, CONTEXT)
    assert (loss.objective.item(), loss.denominator) == (written.item(), 3)


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


def test_names_of_others_are_refused() -> None:
    with pytest.raises(rd.InvalidArgumentError, match=r"got 'mses'\. Did you mean 'MSELoss'\? There are: BCELoss, "):
        loss_by_name("mses")
    with pytest.raises(rd.InvalidArgumentError, match="loss must be one of torch's"):
        loss_by_name("triplet_margin")  # it compares three


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
