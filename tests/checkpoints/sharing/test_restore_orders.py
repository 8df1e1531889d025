"""An order reaches every server alike; tests/coordinator/test_restoring.py has servers that carry it out."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch

import raydist as rd
from raydist.checkpoints.saved_checkpoint import open_checkpoint
from raydist.checkpoints.sharing.restore_orders import (
    RestoreOrder,
    RestoreOrders,
    StoredMemory,
    StoredSlice,
    StoredTable,
)
from raydist.checkpoints.sharing.restore_request import RestoreRequest
from raydist.parameter_servers.slices import ServedSlice
from raydist.pipelines.stored.directory_files import directory_files


def test_it_travels(tmp_path: Path) -> None:
    path = rd.Checkpoint(model=torch.nn.Linear(1, 1)).save(tmp_path / "c")
    order = RestoreOrder("a", open_checkpoint(directory_files(path)), (StoredTable(4, "bag.embedding_rows", "words"),))
    found = pickle.loads(pickle.dumps(order))
    assert (found.token, found.tables) == ("a", order.tables)
    assert found.checkpoint.manifest == order.checkpoint.manifest


def test_each_server_is_told_of_what_it_has_and_the_first_of_what_nobody_has(tmp_path: Path) -> None:
    """Of a variable with two names the last one counts."""
    model = torch.nn.Linear(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    path = rd.Checkpoint(model=model, optimizer=optimizer).save(tmp_path / "c")
    saved = open_checkpoint(directory_files(path))
    request = RestoreRequest("a", saved, {"m": "model", "o": "optimizer"}, True)
    orders = RestoreOrders(request, 2)
    parts = [
        ServedSlice(number, 1, "w", server, begin, (2, 2), torch.float32)
        for number, server, begin in ((7, 1, 0), (8, 0, 2))
    ]
    orders.add_rows("m", {"words": 4})
    orders.add_values("m", [("bias", parts), ("weight", parts)])
    orders.begin_memories("o")
    entry = saved.saved("optimizer").values["weight"]
    memory = StoredMemory("o", 3, 7, "optimizer", "weight", (4, 2), 0, entry, {})
    assert memory.tensors() == {"weight.momentum_buffer": True}
    orders.add_memory(parts[0], memory)
    first, second = orders.of(0), orders.of(1)
    assert first.tables == second.tables == (StoredTable(4, "model", "words"),)
    assert first.slices == (StoredSlice(8, "model", "weight", 2),)
    assert second.slices == (StoredSlice(7, "model", "weight", 0),)
    assert (first.memories, second.memories) == ((), (memory,))
    assert first.rest == {"model": frozenset({"bias"}), "optimizer": frozenset({"bias.momentum_buffer"})}
    assert second.rest == {}
