"""A save in parts: what replicas write and what the driver writes becomes one checkpoint, as one process writes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from raydist.checkpoints.capture import StagingBuffers
from raydist.checkpoints.checkpoint import Checkpoint, contents_of, nodes_of, start_save
from raydist.checkpoints.manifest import open_checkpoint
from raydist.checkpoints.object_state import OWNER, State
from raydist.checkpoints.random_state import RESTORED_REPLICAS
from raydist.checkpoints.shards import Shard, ShardRequest, ShardWriter
from raydist.pipelines.stored.directory_files import directory_files


class Saver:
    """Two replicas in this process."""

    def __init__(self) -> None:
        self.writers = [ShardWriter(rank, 2, torch.device("cpu")) for rank in range(2)]
        self.names: list[str] = []
        self.lost = False

    @property
    def shard_saver(self) -> Saver:
        return self

    def how(self, obj: Any) -> Literal["divided", "whole"] | None:
        return None if isinstance(obj, torch.nn.BatchNorm1d) else "divided"

    def nodes(self) -> set[str]:
        return {"there"}

    def begin(self, request: ShardRequest, objects: Mapping[str, Any], modules: Mapping[str, torch.nn.Module]) -> Saver:
        self.names, self.request = list(objects), request
        for writer in self.writers:
            writer.begin(request, objects, modules)
        return self

    def wait(self) -> Sequence[Shard]:
        if self.lost:
            raise ConnectionError("replica 1 is gone")
        for writer in self.writers:
            writer.close(10)
        found = [writer.report(self.request.token) for writer in self.writers]
        assert all(isinstance(shard, Shard) for shard in found), found
        return [shard for shard in found if isinstance(shard, Shard)]


def owned(cls: Any, saver: Saver) -> Any:
    return type(cls)(cls.__name__, (cls,), {OWNER: saver})


def objects(saver: Saver) -> dict[str, Any]:
    model = owned(torch.nn.Linear, saver)(3, 2)
    optimizer = owned(torch.optim.Adam, saver)(model.parameters(), lr=0.5)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    norm = owned(torch.nn.BatchNorm1d, saver)(2)
    return {"progress": State(a=1), "model": model, "again": model, "optimizer": optimizer, "norm": norm}


def test_it_is_the_checkpoint_that_one_process_writes(tmp_path: Path) -> None:
    saver = Saver()
    checkpoint = Checkpoint(**objects(saver))
    directory = directory_files(str(tmp_path / "c"))
    started = start_save(contents_of(checkpoint), directory, {"mine": 1}, staging=StagingBuffers())
    started.write()
    assert saver.names == ["model", "optimizer"]
    assert nodes_of(contents_of(checkpoint)) == {"there"}
    assert nodes_of(contents_of(Checkpoint(state=State()))) == set()
    found = open_checkpoint(directory).manifest
    assert list(found.objects) == ["progress", "model", "again", "optimizer", "norm"]
    assert found.objects["again"].same_as == "model"
    assert found.details == {"mine": 1}
    other = Checkpoint(**objects(Saver()))
    count = RESTORED_REPLICAS.count
    other.restore(tmp_path / "c")
    assert len(RESTORED_REPLICAS.since(count)) == 2
    assert RESTORED_REPLICAS.since(RESTORED_REPLICAS.count) == ()
    states = [contents_of(each).capture().objects for each in (checkpoint, other)]
    for name in ("model", "optimizer", "norm"):
        first, second = (each[name] for each in states)
        assert first.saved.values == second.saved.values
        assert all(torch.equal(value, second.tensors[key]) for key, value in first.tensors.items())


def test_an_optimizer_over_modules_that_replicas_do_not_know_is_the_drivers(tmp_path: Path) -> None:
    saver = Saver()
    plain = torch.nn.Linear(3, 2)
    optimizer = owned(torch.optim.SGD, saver)(plain.parameters(), lr=0.5)
    state = owned(State, saver)(a=1)
    checkpoint = Checkpoint(plain=plain, optimizer=optimizer, state=state)
    start_save(contents_of(checkpoint), directory_files(str(tmp_path / "c")), {}, staging=StagingBuffers()).write()
    assert saver.names == ["state"]


def test_what_only_this_process_sees_it_writes(tmp_path: Path) -> None:
    saver = Saver()
    first = objects(saver)
    path = f"memory://{tmp_path.name}/c"
    Checkpoint(**first).save(path)
    assert saver.names == []
    other = objects(Saver())
    Checkpoint(**other).restore(path)
    assert torch.equal(other["model"].weight, first["model"].weight)


def test_nothing_is_there_where_a_replica_fails(tmp_path: Path) -> None:
    saver = Saver()
    saver.lost = True
    started = start_save(
        contents_of(Checkpoint(**objects(saver))), directory_files(str(tmp_path / "c")), {}, staging=StagingBuffers()
    )
    for writer in saver.writers:
        writer.close(10)
    with pytest.raises(ConnectionError, match="replica 1"):
        started.write()
    assert list(tmp_path.iterdir()) == []
