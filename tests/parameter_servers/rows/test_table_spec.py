from __future__ import annotations

import pickle

import pytest
import torch

from raydist.parameter_servers.rows.table_spec import EmbeddingTableSpec


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
