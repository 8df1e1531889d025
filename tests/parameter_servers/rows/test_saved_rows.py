"""Rows of embeddings as a state: of each table once, whatever names it has."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import raydist as rd
from raydist.parameter_servers.rows.sharded_embedding import SavedRows


class Words(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.deep = nn.ModuleList([rd.ShardedEmbedding(50, 2, seed=seed), nn.Linear(2, 1)])
        self.same = self.deep[0]


def test_each_table_is_there_once_and_its_rows_come_back() -> None:
    one, other = Words(1), Words(2)
    row = one.same(torch.tensor([3, 7]))
    state = SavedRows(one).state_dict()
    assert list(state) == ["deep.0/0"]
    SavedRows(other).load_state_dict(state)
    assert torch.equal(other.same(torch.tensor([3, 7])), row)
    assert not SavedRows(nn.Linear(1, 1))
    assert SavedRows(one)


def test_rows_of_another_table_are_refused() -> None:
    with pytest.raises(rd.InvalidArgumentError, match=r"which are deep\.0, got 'x'"):
        SavedRows(Words(1)).load_state_dict({"x/0": {}})
