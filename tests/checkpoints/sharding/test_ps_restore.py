"""Restores on parameter servers: a worker tells every server its part. tests/coordinator has such servers."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import raydist as rd
from raydist.checkpoints.manifest import open_checkpoint
from raydist.checkpoints.ps_restore import (
    BegunRestore,
    PsRestores,
    RestoreCommands,
    StoredOptimizerState,
    StoredSlice,
    StoredTable,
    begin_ps_restore,
    taken_options,
    taken_state,
)
from raydist.checkpoints.restore import PreparedShard, RestoreRequest
from raydist.parameter_servers.requests import BeginRestore
from raydist.parameter_servers.rows.sharded_embedding import SavedRows
from raydist.parameter_servers.slices import PsSlice
from raydist.pipelines.stored.directory_files import directory_files


def test_each_server_is_told_of_what_it_has_and_the_first_of_what_nobody_has(tmp_path: Path) -> None:
    """Of a variable with two names the last one counts."""
    model = torch.nn.Linear(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    path = rd.Checkpoint(model=model, optimizer=optimizer).save(tmp_path / "c")
    saved = open_checkpoint(directory_files(path))
    request = RestoreRequest("a", saved, {"m": "model", "o": "optimizer"}, True)
    nobody: Any = None  # is asked about slices here
    commands = RestoreCommands(request, {}, nobody)
    parts = [
        PsSlice(number, 1, "w", server, begin, (2, 2), torch.float32)
        for number, server, begin in ((7, 1, 0), (8, 0, 2))
    ]
    commands.add_rows("m", {"words": 4})
    commands.add_values("m", [("bias", parts), ("weight", parts)])
    entry = saved.saved("optimizer").values["weight"]
    memory = StoredOptimizerState("o", 3, 7, "optimizer", "weight", (4, 2), 0, entry, {})
    assert memory.tensors() == {"weight.momentum_buffer": True}
    commands.add_states("o", [(parts[0], memory)])
    first, second = commands.of(0), commands.of(1)
    assert first.tables == second.tables == (StoredTable(4, "model", "words"),)
    assert first.slices == (StoredSlice(8, "model", "weight", 2),)
    assert second.slices == (StoredSlice(7, "model", "weight", 0),)
    assert (first.optimizer_states, second.optimizer_states) == ((), (memory,))
    assert first.rest == {"model": frozenset({"bias"}), "optimizer": frozenset({"bias.momentum_buffer"})}
    assert second.rest == {}


def memory(**options: Any) -> StoredOptimizerState:
    return StoredOptimizerState("adam", 5, 1, "adam", "w", (3,), 0, {}, options)


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_is_as_after_load_state_dict_with_the_saved_types(dtype: torch.dtype, fused: bool | None) -> None:
    parameter = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    state = {"step": torch.tensor(3.0).double(), "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3).double()}
    saved: dict[str, Any] = copy.deepcopy(optimizer.state_dict())
    saved["state"][0] = state
    saved["param_groups"][0]["fused"] = fused
    optimizer.load_state_dict(saved)
    expected = optimizer.state[parameter]
    options = {name: value for name, value in saved["param_groups"][0].items() if name != "params"}
    found = taken_state(memory(**options), state, torch.optim.Adam, dtype)
    torch.testing.assert_close(dict(found), dict(expected), rtol=0, atol=0, check_dtype=False)
    assert {name: each.dtype for name, each in found.items()} == {
        **{name: each.dtype for name, each in state.items()},
        "step": expected["step"].dtype,
    }


def test_options_are_as_after_load_state_dict_and_nothing_is_changed() -> None:
    layer = torch.nn.Linear(2, 1)
    groups: list[dict[str, Any]] = [{"params": [layer.weight]}, {"params": [layer.bias], "lr": 0.5}]
    adam = torch.optim.Adam(groups)
    before = copy.deepcopy(adam.state_dict())
    saved = [{"lr": 0.25, "mine": (1, 2), "params": ["weight"]}, {"lr": 0.125, "params": ["bias"]}]
    found = taken_options("adam", adam, saved)
    assert adam.state_dict() == before
    adam.load_state_dict({"state": {}, "param_groups": [{**group, "params": [n]} for n, group in enumerate(saved)]})
    expected = [{key: each for key, each in group.items() if key != "params"} for group in adam.param_groups]
    assert found == expected
    with pytest.raises(rd.InvalidArgumentError, match=r"saved state of 'adam' must be one that a Adam takes.*groups"):
        taken_options("adam", adam, saved[:1])


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
    told = begin_ps_restore(PsRestores(held), request, {"bag.rows": SavedRows(bag)}, {})
    assert pickle.loads(told) == BegunRestore(PreparedShard({"bag.rows": ()}))
    assert sorted(asked) == [0, 1]
    for ask in asked.values():
        assert isinstance(ask.request, BeginRestore)
        command = ask.request.order
        assert command.token == "t"
        assert set(command.tables) == {
            StoredTable(5, "bag.embedding_rows", "words"),
            StoredTable(6, "bag.embedding_rows", "tags"),
        }
