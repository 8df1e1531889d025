"""An order reaches every server alike; tests/coordinator/test_restoring.py has servers that carry it out."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch

import raydist as rd
from raydist.checkpoints.saved_checkpoint import open_checkpoint
from raydist.checkpoints.sharing.restore_orders import RestoreOrder, StoredTable
from raydist.pipelines.stored.directory_files import directory_files


def test_it_travels(tmp_path: Path) -> None:
    path = rd.Checkpoint(model=torch.nn.Linear(1, 1)).save(tmp_path / "c")
    order = RestoreOrder("a", open_checkpoint(directory_files(path)), (StoredTable(4, "bag.embedding_rows", "words"),))
    found = pickle.loads(pickle.dumps(order))
    assert (found.token, found.tables) == ("a", order.tables)
    assert found.checkpoint.manifest == order.checkpoint.manifest
