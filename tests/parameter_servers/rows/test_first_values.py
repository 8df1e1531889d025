from __future__ import annotations

import pytest
import torch

from raydist.parameter_servers.rows.table_spec import EmbeddingTableSpec, first_values


@pytest.mark.parametrize("dim", [1, 3, 16])
@pytest.mark.parametrize("initializer", ["normal", "uniform", "zeros"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_row_is_what_it_is_whatever_is_made_with_it(dim: int, initializer: str, dtype: torch.dtype) -> None:
    spec = EmbeddingTableSpec(10**9, dim, dtype, seed=5, initializer=initializer)  # type: ignore[arg-type]
    rows = torch.randint(0, 10**9, (333,))
    together = first_values(spec, rows)
    assert together.shape == (333, dim)
    assert together.dtype is dtype
    assert torch.equal(first_values(spec, rows.flip(0)).flip(0), together)
    assert torch.equal(torch.cat([first_values(spec, row[None]) for row in rows]), together)


def test_normal_values_are_normal() -> None:
    values = first_values(EmbeddingTableSpec(10**9, 16, torch.float64, scale=2.0), torch.arange(20_000)) / 2
    assert abs(values.mean()) < 0.01
    assert abs(values.std() - 1) < 0.01
    assert abs((values**4).mean() - 3) < 0.1
    inside = [(values.abs() < bound).double().mean().item() for bound in (1.0, 2.0, 3.0)]
    assert inside == pytest.approx([0.6827, 0.9545, 0.9973], abs=0.003)
    assert torch.corrcoef(values.T).fill_diagonal_(0).abs().max() < 0.03  # columns
    assert torch.corrcoef(values[:16]).fill_diagonal_(0).abs().max() < 0.9  # neighbours


def test_uniform_values_are_uniform() -> None:
    values = first_values(EmbeddingTableSpec(10**9, 5, initializer="uniform", scale=3.0), torch.arange(20_000))
    assert values.abs().max() <= 3.0
    counts = torch.histc(values.flatten(), bins=10, min=-3, max=3) / values.numel()
    assert (counts - 0.1).abs().max() < 0.005


def test_the_seed_decides() -> None:
    rows = torch.arange(50)
    one, other = (first_values(EmbeddingTableSpec(100, 4, seed=seed), rows) for seed in (1, 2))
    assert not (one == other).any()
    assert not torch.equal(one[1:], other[:-1])
