from __future__ import annotations

import pytest
import torch
import torch.distributed

import raydist as rd
from raydist.context.advice import advise


def test_a_collective_of_torch_without_a_group_is_told_of_ours() -> None:
    strategy = rd.OneDeviceStrategy("cpu")
    with pytest.raises(ValueError, match="has not been initialized") as caught:
        strategy.run(lambda: torch.distributed.all_reduce(torch.ones(1)))
    assert "rd.get_replica_context().all_reduce" in caught.value.__notes__[0]


def test_all_else_speaks_for_itself() -> None:
    error = ValueError("bad")
    advise(error)
    assert not hasattr(error, "__notes__")
