from __future__ import annotations

import pytest
import torch

from raydist.collectives.reducer.known_gradients import LocalAccumulation, accumulate
from raydist.errors import FailedPreconditionError


def test_global_and_local_parts_are_told_apart() -> None:
    accumulation = LocalAccumulation()
    shown = accumulation.add(0, torch.tensor([10.0]), torch.tensor([1.0]), 0.5)
    shown = accumulation.add(0, shown, torch.tensor([3.0]), 0.25)
    assert shown.tolist() == [14.0]
    base, contribution = accumulation.parts_of(0, shown)
    assert base is not None
    assert contribution is not None
    assert (base.tolist(), contribution.tolist()) == ([10.0], [1.25])


def test_dropped_or_zeroed_gradients_take_their_part_with_them() -> None:
    accumulation = LocalAccumulation()
    shown = accumulation.add(0, None, torch.tensor([1.0]), 1.0)
    assert accumulation.parts_of(0, None) == (None, None)
    shown.zero_()
    assert accumulation.parts_of(0, shown) == (shown, None)
    accumulation.forget([0, 1])
    assert accumulation.parts_of(0, shown) == (shown, None)


def test_other_changes_are_refused() -> None:
    accumulation = LocalAccumulation()
    shown = accumulation.add(7, None, torch.tensor([1.0]), 1.0)
    with pytest.raises(FailedPreconditionError, match="parameter 7"):
        accumulation.parts_of(7, shown.mul_(2))


def test_accumulate_keeps_the_earlier_tensor() -> None:
    earlier = torch.tensor([1.0])
    assert accumulate(earlier, torch.tensor([2.0])) is earlier
    assert earlier.tolist() == [3.0]
    sparse = torch.tensor([5.0]).to_sparse()
    assert accumulate(sparse, torch.tensor([2.0])).tolist() == [7.0]
    assert accumulate(earlier, sparse).tolist() == [8.0]
    graph = torch.tensor([1.0], requires_grad=True) * 1
    assert accumulate(earlier, graph).requires_grad
