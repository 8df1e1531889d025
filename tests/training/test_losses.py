from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import raydist as rd
from raydist.training.losses import adds_rows_up, loss_by_name, mean_loss, sum_loss, weighted_loss


def test_a_scalar_is_the_mean_of_the_rows() -> None:
    loss = mean_loss(torch.tensor(0.5), 7)
    assert (loss.mean.item(), loss.weight) == (0.5, 7)


@pytest.mark.parametrize("per_row", [[1.0, 3.0], [[1.0], [3.0]], [[0.0, 2.0], [3.0, 3.0]]])
def test_losses_per_row_are_averaged(per_row: list[object]) -> None:
    assert mean_loss(torch.tensor(per_row), 2).mean.item() == 2.0


def test_weights_make_a_weighted_mean() -> None:
    loss = weighted_loss(torch.tensor([[1.0, 3.0], [6.0, 6.0], [9.0, 9.0]]), torch.tensor([[1.0], [3.0], [0.0]]))
    assert loss.mean.item() == pytest.approx((2 + 18) / 4)
    assert float(loss.weight) == 4.0


def test_objectives_of_all_replicas_add_up_to_the_global_weighted_mean() -> None:
    rows, weights = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 0.0, 2.0, 5.0])
    pieces = [weighted_loss(rows[a:b], weights[a:b]) for a, b in ((0, 2), (2, 4))]
    total = sum(piece.objective(lambda _: weights.sum()).item() for piece in pieces)
    assert total == pytest.approx((rows * weights).sum().item() / weights.sum().item())


def test_no_weight_anywhere_is_a_loss_of_zero_with_gradients_of_zero() -> None:
    value = torch.tensor([2.0], requires_grad=True)
    objective = weighted_loss(value, torch.zeros(1)).objective(lambda weight: weight)
    objective.backward()
    assert objective.item() == 0.0
    assert value.grad is not None
    assert value.grad.tolist() == [0.0]


def test_a_scalar_loss_can_not_be_weighted() -> None:
    with pytest.raises(rd.InvalidArgumentError, match='one value per row, got a scalar.*reduction="none"'):
        weighted_loss(torch.tensor(1.0), torch.ones(3))


def test_losses_must_be_one_per_row() -> None:
    with pytest.raises(rd.SpecError, match=r"got shape \(3,\) for 2 rows"):
        mean_loss(torch.ones(3), 2)
    with pytest.raises(rd.SpecError, match=r"got shape \(3,\) for 2 rows"):
        weighted_loss(torch.ones(3), torch.ones(2))


def test_weights_must_be_one_per_row() -> None:
    with pytest.raises(rd.SpecError, match=r"one number per row, got shape \(2, 2\)"):
        weighted_loss(torch.ones(2), torch.ones(2, 2))


def test_a_loss_must_be_a_tensor() -> None:
    with pytest.raises(rd.SpecError, match="must return a tensor .* got float"):
        mean_loss(0.5, 1)


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


def test_sums_of_rows_are_known_by_what_they_say() -> None:
    assert adds_rows_up(nn.MSELoss(reduction="sum"))
    assert adds_rows_up(partial(F.mse_loss, reduction="sum"))
    assert not any(map(adds_rows_up, [nn.MSELoss(), nn.MSELoss(reduction="none"), F.mse_loss, partial(F.mse_loss)]))


def test_sums_of_pieces_weigh_up_to_the_sum_of_all_rows() -> None:
    rows = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    pieces = [sum_loss(piece.sum(), len(piece), 5) for piece in rows.split([2, 2, 1])]
    assert sum(piece.mean.item() * piece.weight / 5 for piece in pieces) == pytest.approx(15.0)
    assert sum_loss(rows.sum(), 5, 5).mean.item() == 15.0
