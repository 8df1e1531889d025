"""A restore by replicas: each byte is read once and by one of them, and nothing changes anywhere unless all is well."""

from __future__ import annotations

import copy
import functools
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raydist.actors.portable_errors import PortableError
from raydist.checkpoints import read_tensors
from raydist.checkpoints.capture import commit
from raydist.checkpoints.checkpoint import Checkpoint
from raydist.checkpoints.manifest import CheckpointManifest, SavedObject, open_checkpoint
from raydist.checkpoints.object_state import State
from raydist.checkpoints.restore import PreparedShard, RestoreReport, RestoreRequest, restore_objects
from raydist.checkpoints.shard_reader import (
    ShardReader,
    commit_shard,
    discard_shard,
    exchange_bytes,
    prepare_shard,
)
from raydist.checkpoints.tensor_file import NewFiles, RowRange, write_tensor_file
from raydist.core.errors import DataLossError, InvalidArgumentError
from raydist.pipelines.stored.directory_files import directory_files
from tests.collectives.local_group import LocalGroup
from tests.collectives.threads import run_ranks

pytestmark = pytest.mark.usefixtures("no_strategies")

CPU = torch.device("cpu")


class Replicas:
    """Each has copies of all objects, and a reader."""

    def __init__(self, objects: Iterable[Any], num_replicas: int = 3) -> None:
        self.num_replicas = num_replicas
        self._originals = list(objects)
        self._copies = [copy.deepcopy(self._originals) for _ in range(num_replicas)]
        self._groups: dict[int, LocalGroup] = {}
        self.readers = [
            ShardReader(rank, num_replicas, functools.partial(self._exchange, rank)) for rank in range(num_replicas)
        ]
        self.asked: list[str] = []
        self.before: Callable[[str, int], None] = lambda what, rank: None

    def of(self, rank: int, obj: Any) -> Any:
        """A replica's copy of one of the driver's objects."""
        return next(mine for mine, each in zip(self._copies[rank], self._originals, strict=True) if each is obj)

    def holds(self, obj: Any) -> bool:
        return any(each is obj for each in self._originals)

    def can_restore(self, obj: Any) -> bool:
        return not isinstance(obj, nn.BatchNorm1d)

    def prepare(
        self, request: RestoreRequest, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]
    ) -> Sequence[PreparedShard] | None:
        return self._ask("prepare", prepare_shard, request, objects, modules)

    def commit(self, token: str, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> None:
        self._ask("commit", commit_shard, token, objects, modules)

    def discard(self) -> None:
        self._ask("discard", discard_shard)

    def _exchange(self, rank: int, parts: Sequence[Sequence[torch.Tensor]]) -> None:
        group = self._groups[rank]
        exchange_bytes(parts, rank, CPU, lambda tensor, root: group.broadcast(tensor, root).wait())

    def _ask(self, what: str, function: Callable[..., bytes], *args: Any) -> list[Any]:
        self.asked.append(what)

        def body(group: LocalGroup) -> Any:
            self._groups[group.rank] = group
            self.before(what, group.rank)
            mine = [self._mine(group.rank, each) for each in args]
            return pickle.loads(function(self.readers[group.rank], *mine))

        found = run_ranks(self.num_replicas, body)
        for each in found:
            if isinstance(each, PortableError):
                raise each.restore()
        return found

    def _mine(self, rank: int, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: self.of(rank, obj) for name, obj in value.items()}
        return value


class Net(nn.Module):
    """With all that a module may have in its state."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 4).bfloat16()
        self.tied = nn.Linear(3, 4)
        self.tied.weight = self.first.weight
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("empty", torch.empty(0, 5))


def made(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5 + seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return {"model": model, "again": model, "optimizer": optimizer, "norm": nn.BatchNorm1d(2), "state": State(a=seed)}


def tensors_of(value: Any) -> list[Any]:
    """All that is in a state, in order."""
    if isinstance(value, dict):
        return [each for key in value for each in tensors_of(value[key])]
    return [each for part in value for each in tensors_of(part)] if isinstance(value, list | tuple) else [value]


def same(one: Any, other: Any) -> bool:
    found, expected = tensors_of(one.state_dict()), tensors_of(other.state_dict())
    return len(found) == len(expected) and all(
        torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(found, expected, strict=True)
    )


def restored(objects: dict[str, Any], replicas: Replicas, path: Path, **options: Any) -> RestoreReport:
    checkpoint = open_checkpoint(directory_files(str(path)))
    return restore_objects(objects, objects, checkpoint, options.get("strict", True), True, [replicas])


def held(objects: dict[str, Any], num_replicas: int = 3) -> Replicas:
    remote = [objects[name] for name in ("model", "optimizer", "norm")]
    return Replicas(remote, num_replicas)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    objects = made(1)
    Checkpoint(**objects).save(tmp_path / "c")
    return tmp_path / "c", objects


def test_each_byte_is_read_once_and_none_by_the_driver(
    saved: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = saved
    objects = made(2)
    replicas = held(objects, 4)
    read: Counter[tuple[str, str]] = Counter()
    sides: Counter[threading.Thread] = Counter()
    original = read_tensors._FileReader._read_piece

    def some(self: Any, size: int, what: str) -> bytes:
        piece = original(self, size, what)
        if what != "its header":
            read[Path(self._path).name, what] += len(piece)
            sides[threading.current_thread()] += len(piece)
        return piece

    monkeypatch.setattr(read_tensors._FileReader, "_read_piece", some)
    restored({name: objects[name] for name in ("model", "optimizer")}, replicas, path, strict=False)
    manifest = open_checkpoint(directory_files(str(path))).manifest
    files = [*manifest.tensor_files("model"), *manifest.tensor_files("optimizer")]
    places = {(file.name, f"tensor {key!r}"): each for file in files for key, each in file.tensors.items()}
    assert dict(read) == {key: each.end - each.begin for key, each in places.items() if each.end > each.begin}
    assert threading.current_thread() not in sides
    assert len(sides) == 4
    assert max(sides.values()) < sum(sides.values()) / 2


def test_mismatches_are_reported_before_anything_is_read(
    saved: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = saved
    objects = made(2)
    objects["model"].second = nn.Linear(4, 3)
    objects["model"].more = nn.Linear(1, 1, bias=False)
    objects["state"] = State(b=1)
    replicas = held(objects)
    monkeypatch.setattr(read_tensors, "_opened", None)
    with pytest.raises(InvalidArgumentError) as raised:
        restored(objects, replicas, path)
    told = str(raised.value)
    for entry in ("model.second.weight' is reshaped", "model.more.weight' is missing", "state.b' is missing"):
        assert entry in told
    assert "commit" not in replicas.asked


def test_a_partial_restore_keeps_the_rest(saved: tuple[Path, dict[str, Any]]) -> None:
    path, before = saved
    objects = made(2)
    objects["model"].more = nn.Linear(1, 1, bias=False)
    replicas = held(objects, 2)
    assert restored(objects, replicas, path, strict=False) == RestoreReport(missing=("model.more.weight",))
    model = replicas.of(1, objects["model"])
    assert torch.equal(model.first.weight, before["model"].first.weight)
    assert torch.equal(model.more.weight, objects["model"].more.weight)


def test_an_object_that_rejects_its_state_restores_all_others(saved: tuple[Path, dict[str, Any]]) -> None:
    path, _ = saved
    objects = made(2)
    before = copy.deepcopy(objects)
    replicas = held(objects)
    for rank in range(3):
        replicas.of(rank, objects["model"]).register_load_state_dict_post_hook(refuse)
    with pytest.raises(InvalidArgumentError, match=r"'model' must be one that a Net takes.*not this one"):
        restored(objects, replicas, path)
    assert objects["state"].a == 2
    for rank in range(3):
        assert same(replicas.of(rank, objects["optimizer"]), before["optimizer"])


def test_invalid_states_change_nothing(saved: tuple[Path, dict[str, Any]]) -> None:
    path, _ = saved
    files = directory_files(str(path))
    manifest = open_checkpoint(files).manifest
    optimizer = manifest.objects["optimizer"]
    values = {**optimizer.values, "first.bias": {"exp_avg": {"$tensor": "elsewhere"}}}
    edited = {**manifest.objects, "optimizer": replace(optimizer, values=values)}
    files.replace("manifest.json", replace(manifest, objects=edited).to_bytes())
    objects = made(2)
    replicas = held(objects)
    with pytest.raises(DataLossError, match="the state of 'optimizer' is invalid: the tensor 'elsewhere' is missing"):
        restored(objects, replicas, path)
    assert replicas.asked == ["prepare"]
    assert objects["state"].a == 2


class Stubborn:
    """Takes no state."""

    def state_dict(self) -> dict[str, int]:
        return {"a": 2}

    def load_state_dict(self, state: Any) -> None:
        raise ValueError("not this one")


def test_replicas_drop_what_they_read_if_the_driver_fails(saved: tuple[Path, dict[str, Any]]) -> None:
    path, _ = saved
    objects = {**made(2), "state": Stubborn()}
    replicas = held(objects)
    (path / "manifest.json").unlink()
    Checkpoint(**{**made(1), "state": Stubborn()}).save(path)
    with pytest.raises(InvalidArgumentError, match=r"'state' must be one that a Stubborn takes"):
        restored(objects, replicas, path)
    assert replicas.asked == ["prepare", "discard"]


def refuse(module: nn.Module, keys: Any) -> None:
    raise ValueError("not this one")


def test_a_replica_that_dies_while_reading_changes_nothing(saved: tuple[Path, dict[str, Any]]) -> None:
    path, _ = saved
    objects = made(2)
    before = copy.deepcopy(objects)
    replicas = held(objects)

    def die(what: str, rank: int) -> None:
        if (what, rank) == ("commit", 1):
            raise ConnectionError("replica 1 is gone")

    replicas.before = die
    with pytest.raises(Exception, match="gone|rank 1|left|abort"):
        restored(objects, replicas, path)
    assert objects["state"].a == 2
    for rank in range(3):
        for name in ("model", "optimizer"):
            assert same(replicas.of(rank, objects[name]), before[name])


def test_slices_are_joined(tmp_path: Path) -> None:
    """As parameter servers write them: rows of a tensor in several files."""
    weight = torch.randn(7, 3)
    new = NewFiles(directory_files(str(tmp_path / "c")))
    new.files.make()
    cuts = [(0, 2), (2, 3), (3, 7)]
    files = tuple(
        write_tensor_file(
            new, new.part_named("model", number, 3), {"weight": weight[slice(*rows)]}, {"weight": RowRange(*rows, 7)}
        )
        for number, rows in enumerate(cuts)
    )
    values = {"weight": {"$tensor": "weight"}}
    saved = SavedObject("module", values=values, files=tuple(file.name for file in files))
    commit(new, CheckpointManifest({"model": saved}, files))
    for num_replicas in (1, 2, 3):
        objects = {"model": nn.Linear(3, 7, bias=False)}
        replicas = Replicas(objects.values(), num_replicas)
        restored(objects, replicas, tmp_path / "c")
        assert all(torch.equal(replicas.of(rank, objects["model"]).weight, weight) for rank in range(num_replicas))


def test_replicas_exchange_what_they_read() -> None:
    torch.manual_seed(1)
    expected = [
        [torch.randn(5, 3), torch.tensor(3), torch.empty(0, 4), torch.randn(7).bfloat16()],
        [],  # this one has read nothing
        [torch.tensor([True, False]), torch.randn(2, dtype=torch.complex64), torch.randn(40, dtype=torch.float64)],
    ]

    def exchanged(group: LocalGroup, window_bytes: int) -> tuple[list[list[torch.Tensor]], int]:
        mine = [
            [each.clone() if rank == group.rank else torch.zeros_like(each) for each in tensors]
            for rank, tensors in enumerate(expected)
        ]
        sizes: list[int] = []

        def broadcast(tensor: torch.Tensor, root: int) -> None:
            sizes.append(len(tensor))
            group.broadcast(tensor, root).wait()

        exchange_bytes(mine, group.rank, CPU, broadcast, window_bytes)
        return mine, max(sizes)

    for window_bytes in (1, 16, 64, 1 << 20):
        for found, largest in run_ranks(3, functools.partial(exchanged, window_bytes=window_bytes)):
            assert largest <= window_bytes
            for tensors, others in zip(found, expected, strict=True):
                assert all(torch.equal(tensor, other) for tensor, other in zip(tensors, others, strict=True))
