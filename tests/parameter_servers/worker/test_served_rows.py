"""`tests/replicas/served/test_variables.py` has rows on servers."""

from __future__ import annotations

import pytest
import torch

import raydist as rd
from raydist.parameter_servers.requests import Sender
from raydist.parameter_servers.rows.table_spec import EmbeddingTableSpec
from raydist.parameter_servers.worker.client import ServedRows, ServerClient, rows_by_server

SPEC = EmbeddingTableSpec(1_000, 2)


def test_each_row_has_one_server() -> None:
    rows = torch.arange(0, 1_000, 7)
    assert rows_by_server(SPEC, rows, 1) == {0: slice(None)}
    places = rows_by_server(SPEC, rows, 3)
    found = torch.cat([rows[at] for at in places.values()])
    assert torch.equal(found.sort().values, rows)
    few = rows_by_server(SPEC, rows[:1], 3, everybody=True)
    assert sorted(len(rows[:1][at]) for at in few.values()) == [0, 0, 1]
    assert len(rows_by_server(SPEC, rows[:1], 3)) == 1


def test_a_table_that_the_servers_do_not_have_is_told() -> None:
    embedding = rd.ShardedEmbedding(10, 2)
    rows = ServedRows(ServerClient((), Sender(0, 0), timeout_s=1), lambda weight: None)
    with pytest.raises(rd.FailedPreconditionError, match="must be made under the scope"):
        rows.pull(embedding.weight, torch.tensor([1]))
