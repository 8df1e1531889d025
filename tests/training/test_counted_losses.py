from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from raydist.training.counted_losses import count_in, divides_by_count, total_of

CLASSES = torch.tensor([1.0, 0.5, 4.0], dtype=torch.float64)


@pytest.mark.parametrize("ignore_index", [-100, 1])
@pytest.mark.parametrize("shape", [(6,), (6, 4), (6, 4, 2)])
@pytest.mark.parametrize(
    "make",
    [
        lambda **settings: nn.CrossEntropyLoss(**settings),
        lambda **settings: nn.CrossEntropyLoss(weight=CLASSES, **settings),
        lambda **settings: nn.CrossEntropyLoss(weight=CLASSES, label_smoothing=0.2, **settings),
        lambda **settings: nn.CrossEntropyLoss(label_smoothing=0.2, **settings),
        lambda **settings: nn.NLLLoss(**settings),
        lambda **settings: nn.NLLLoss(weight=CLASSES, **settings),
    ],
)
def test_pieces_add_up_to_torchs_mean(make: Any, shape: tuple[int, ...], ignore_index: int) -> None:
    torch.manual_seed(0)
    loss = make(ignore_index=ignore_index)
    prediction = torch.randn(shape[0], 3, *shape[1:], dtype=torch.float64).log_softmax(1)
    target = torch.randint(0, 3, shape)
    target[0] = target[3:] = ignore_index  # the second piece has nothing that counts
    counts = [count_in(loss, piece) for piece in target.split(3)]
    assert counts[1] == 0
    pieces = zip(prediction.split(3), target.split(3), strict=True)
    mean = sum(total_of(loss, *piece) for piece in pieces) / sum(counts)
    torch.testing.assert_close(mean, loss(prediction, target))


@pytest.mark.parametrize(
    ("loss", "target", "counted"),
    [
        (nn.CrossEntropyLoss(), torch.ones(3, dtype=torch.int64), True),
        (nn.CrossEntropyLoss(ignore_index=0), torch.ones(3, dtype=torch.int64), True),
        (nn.NLLLoss(ignore_index=-1), torch.ones(3, dtype=torch.int64), True),
        (nn.CrossEntropyLoss(weight=CLASSES), torch.ones(3, dtype=torch.int64), True),
        (nn.CrossEntropyLoss(), torch.ones(3, 2, dtype=torch.int64), True),
        (nn.CrossEntropyLoss(weight=CLASSES), torch.ones(2, 3), False),  # shares of classes: every row counts
        (nn.CrossEntropyLoss(reduction="none"), torch.ones(3, 2, dtype=torch.int64), False),
        (nn.NLLLoss(), torch.ones(3, 2, dtype=torch.int64), True),
        (nn.MSELoss(), torch.ones(3, 2), False),
        (lambda prediction, target: prediction.mean(), torch.ones(3, 2, dtype=torch.int64), False),
    ],
)
def test_who_divides_by_a_count(loss: Any, target: torch.Tensor, counted: bool) -> None:
    assert divides_by_count(loss, target) is counted
