"""What the driver does with rows, a replica does: here it has them itself."""

from __future__ import annotations

import torch

from raydist.parameter_servers.rows.sharded_embedding import ShardedEmbedding
from tests.mirroring.in_process import Mirror


def test_the_driver_reads_and_writes_rows_of_the_first_replica() -> None:
    mirror = Mirror(2, serves_rows=True)
    with mirror.scope():
        embedding = ShardedEmbedding(10, 2, initializer="zeros")
    mirror.run(lambda: embedding(torch.tensor([3, 7])).sum().item())
    rows = torch.tensor([7, 3, 7])
    with torch.no_grad():
        assert embedding(rows).tolist() == [[0, 0]] * 3
        (state,) = embedding.export_rows()
        assert state["rows"].tolist() == [3, 7]
        embedding.import_rows([{**state, "values": torch.tensor([[3.0, 4.0], [7.0, 8.0]])}])
        assert embedding(rows).tolist() == [[7, 8], [3, 4], [7, 8]]
    told = mirror.run(lambda: embedding(torch.tensor([7])).tolist())
    assert told == [[[7, 8]], [[0, 0]]]
    assert mirror.link.calls.count("pull_rows") == 2


def test_rows_from_before_travel_with_the_module_and_are_given_up_here() -> None:
    mirror = Mirror(1, serves_rows=True)
    with mirror.scope():
        embedding = ShardedEmbedding(10, 2, seed=1)
    other = ShardedEmbedding(10, 2, seed=2)
    expected = other(torch.tensor([3]))
    embedding.import_rows(other.export_rows())
    assert mirror.run(lambda: embedding(torch.tensor([3])).tolist()) == [expected.tolist()]
    assert torch.equal(embedding(torch.tensor([3])), expected)
    assert mirror.link.calls.count("pull_rows") == 1
