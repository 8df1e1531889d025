"""A worker tells every server what tables are called there; tests/coordinator/test_restoring.py has such servers."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

import raydist as rd
from raydist.checkpoints.saved_checkpoint import open_checkpoint
from raydist.checkpoints.sharing.restore_orders import StoredTable
from raydist.checkpoints.sharing.restore_request import PreparedShare, RestoreRequest
from raydist.checkpoints.sharing.served_restore import BegunRestore, ServedRestores, begin_served_restore
from raydist.parameter_servers.requests import BeginRestore
from raydist.parameter_servers.rows.sharded_embedding import SavedRows
from raydist.pipelines.stored.directory_files import directory_files


def test_all_servers_are_told_of_all_tables(tmp_path: Path) -> None:
    bag = torch.nn.ModuleDict({"words": rd.ShardedEmbedding(9, 2), "tags": rd.ShardedEmbedding(9, 1)})
    path = rd.Checkpoint(bag=bag).save(tmp_path / "c")
    handles = {id(bag["words"].weight): 5, id(bag["tags"].weight): 6}
    asked: dict[int, Any] = {}

    class Held:
        num_servers = 2

        def handle_of(self, obj: Any) -> int:
            return handles[id(obj)]

        def exchange(self, asks: Any) -> None:
            asked.update(asks)

    held: Any = Held()
    request = RestoreRequest("t", open_checkpoint(directory_files(path)), {"bag.rows": "bag.embedding_rows"}, True)
    told = begin_served_restore(ServedRestores(held), request, {"bag.rows": SavedRows(bag)}, {})
    assert pickle.loads(told) == BegunRestore(PreparedShare({"bag.rows": ()}))
    assert sorted(asked) == [0, 1]
    for ask in asked.values():
        assert isinstance(ask.request, BeginRestore)
        order = ask.request.order
        assert order.token == "t"
        assert set(order.tables) == {
            StoredTable(5, "bag.embedding_rows", "words"),
            StoredTable(6, "bag.embedding_rows", "tags"),
        }
