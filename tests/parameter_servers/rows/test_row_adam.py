from __future__ import annotations

import pytest
import torch

from raydist.parameter_servers.rows.row_optimizer import RowAdam, sparse_gradient, stand_in_for


@pytest.mark.parametrize("options", [{}, {"lr": 0.1, "betas": (0.5, 0.8), "eps": 1e-3}, {"maximize": True}])
def test_its_steps_are_sparse_adams(options: dict[str, object]) -> None:
    theirs = torch.nn.Parameter(torch.randn(5, 3, dtype=torch.float64))
    ours = torch.nn.Parameter(theirs.detach().clone())
    reference = torch.optim.SparseAdam([theirs], **options)  # type: ignore[arg-type]
    optimizer = RowAdam([ours], **{key: value for key, value in reference.param_groups[0].items() if key != "params"})
    for _ in range(10):
        ours.grad = torch.randn(5, 3, dtype=torch.float64)
        theirs.grad = sparse_gradient(ours.grad.clone())
        optimizer.step()
        reference.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    for key, value in reference.state[theirs].items():
        torch.testing.assert_close(optimizer.state[ours][key], value, rtol=1e-12, atol=1e-14)


def test_others_stand_for_themselves() -> None:
    assert stand_in_for(torch.optim.SparseAdam) is RowAdam
    assert stand_in_for(torch.optim.Adam) is torch.optim.Adam
    assert stand_in_for(type("Mine", (torch.optim.SparseAdam,), {})) is not RowAdam
