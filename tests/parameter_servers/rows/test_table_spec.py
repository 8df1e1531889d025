from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from raydist.parameter_servers.rows.table_spec import EmbeddingTableSpec, first_values, hash_mix


def test_no_two_words_become_the_same() -> None:
    assert len(np.unique(hash_mix(np.arange(100_000, dtype=np.uint64)))) == 100_000


def test_each_bit_changes_about_half_of_all_bits() -> None:
    words = np.arange(1000, dtype=np.uint64)
    for bit in range(64):
        changed = hash_mix(words) ^ hash_mix(words ^ np.uint64(1 << bit))
        assert 30 < np.unpackbits(changed.view(np.uint8)).sum() / 1000 < 34


def test_what_is_given_stays_as_it_is() -> None:
    words = np.arange(3, dtype=np.uint64)
    hash_mix(words)
    assert words.tolist() == [0, 1, 2]


@pytest.mark.parametrize("num_servers", [1, 2, 3, 7])
def test_rows_that_are_used_much_are_spread_over_servers(num_servers: int) -> None:
    spec = EmbeddingTableSpec(10**9, 16)
    rows = torch.arange(10_000)  # the first ones: what a vocabulary sorted by frequency has most
    counts = torch.bincount(spec.servers_of(rows, num_servers), minlength=num_servers)
    assert counts.sum() == len(rows)
    assert counts.min() > 0.9 * len(rows) / num_servers


def test_a_row_is_on_the_same_server_whatever_is_asked_with_it() -> None:
    spec = EmbeddingTableSpec(100, 4, seed=3)
    rows = torch.tensor([99, 0, 42])
    assert spec.servers_of(rows, 5).tolist() == [int(spec.servers_of(row[None], 5)) for row in rows]
    assert spec.servers_of(rows.flip(0), 5).tolist() == spec.servers_of(rows, 5).flip(0).tolist()


def test_it_survives_pickling() -> None:
    spec = EmbeddingTableSpec(100, 4, torch.float64, seed=3, initializer="uniform", scale=0.5, name="words")
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert spec.row_bytes == 32


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
