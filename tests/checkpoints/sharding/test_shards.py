"""Who writes which tensors, and how the driver waits for all of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from raydist.actors.portable_errors import pack_error
from raydist.checkpoints.manifest import SavedObject
from raydist.checkpoints.shards import (
    DispatchedSave,
    SaveReports,
    Shard,
    ShardRequest,
    join_shards,
    plan_files,
)
from raydist.checkpoints.tensor_file import NewFiles, TensorFile
from raydist.core.errors import CancelledError, DeadlineExceededError
from raydist.pipelines.stored.directory_files import directory_files

MIB = 1 << 20


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 8])
def test_every_tensor_is_in_one_file_and_large_objects_are_divided_evenly(num_replicas: int) -> None:
    sizes = {"model": {f"w{n}": 4 * MIB for n in range(64)}, "small": {"a": 1, "b": 2}, "none": {}}
    files = plan_files(sizes, num_replicas)
    keys = [(file.owner, key) for file in files for key in file.keys]
    assert sorted(keys) == sorted((owner, key) for owner, tensors in sizes.items() for key in tensors)
    load = [0] * num_replicas
    for file in files:
        load[file.rank] += sum(sizes[file.owner][key] for key in file.keys)
    assert max(load) - min(load) <= 8 * MIB
    assert [file.count for file in files if file.owner == "small"] == [1]
    (count,) = {file.count for file in files if file.owner == "model"}
    assert num_replicas <= count <= num_replicas + 1


def test_what_only_the_first_replica_has_is_its_own() -> None:
    files = plan_files({"a": {"w": 9}, "b": {"w": 40 * MIB, "v": 40 * MIB}}, 3, whole={"b"}, max_part_bytes=50 * MIB)
    assert [(file.owner, file.number, file.count, file.rank) for file in files] == [
        ("a", 0, 1, 0),
        ("b", 0, 2, 0),
        ("b", 1, 2, 0),
    ]


def test_files_are_called_as_those_that_one_process_writes() -> None:
    request = ShardRequest("t", NewFiles(directory_files("/tmp/x")), {"model": "model"})
    one, first, second = plan_files({"model": {"a": 1}}, 2) + plan_files({"model": {"a": 3, "b": 3}}, 2, small_bytes=1)
    assert [request.file_name(file.owner, file.number, file.count) for file in (one, first, second)] == [
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


def test_shares_make_the_objects_again() -> None:
    files = [TensorFile(f"model-{n}", 1, 2, 3, 4) for n in range(3)]
    model, state = SavedObject("module", values={}), SavedObject("other", values={"a": 1})
    first = Shard({("model", 0): files[0], ("model", 2): files[2]}, {"model": model, "state": state}, (b"a",))
    second = Shard({("model", 1): files[1]}, {}, (b"b", b"c"))
    assert join_shards([first, second]) == {"model": (model, files), "state": (state, [])}


class Group:
    """Answers as replicas would, one list a question; the last one for good."""

    def __init__(self, *answers: Sequence[Any]) -> None:
        self.answers = list(answers)
        self.num_asked = 0

    def ask(self) -> Sequence[Any]:
        self.num_asked += 1
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def save(group: Group, limit_s: float = 10.0) -> DispatchedSave:
    return DispatchedSave(group.ask, limit_s)


def test_it_waits_until_all_have_written() -> None:
    group = Group([None, None], [Shard({}), None], [Shard({}), Shard({})])
    waiting = save(group)
    assert not waiting.is_done
    assert waiting.wait() == [Shard({}), Shard({})]
    assert waiting.is_done
    assert group.num_asked == 3


def test_the_error_that_caused_the_others_is_raised() -> None:
    consequence, cause = pack_error(CancelledError("given up")), pack_error(ValueError("bad row"))
    with pytest.raises(ValueError, match="bad row"):
        save(Group([consequence, None], [consequence, cause])).wait()
    with pytest.raises(CancelledError, match="given up"):
        save(Group([consequence, Shard({})])).wait()


def test_a_wait_has_a_limit() -> None:
    with pytest.raises(DeadlineExceededError, match=r"within 0\.01 s, but 1 of 2 replicas have not"):
        save(Group([None, Shard({})]), 0.01).wait()


def test_it_tells_of_each_save_once_it_is_known() -> None:
    reports, go = SaveReports(), threading.Event()

    def write() -> Shard:
        go.wait(10)
        return Shard({}, random=(b"a",))

    def fail() -> Shard:
        raise OSError("disk full")

    reports.write("slow", write)
    reports.write("bad", fail)
    assert reports.of("slow") is None
    go.set()
    reports.close(10.0)
    assert reports.of("slow") == Shard({}, random=(b"a",))
    assert str(reports.of("bad")) == "disk full"
    assert reports.of("another") is None


def test_it_forgets_the_oldest() -> None:
    reports = SaveReports()
    for number in range(9):
        reports.record(str(number), Shard({}))
    assert [number for number in range(9) if reports.of(str(number)) is not None] == [5, 6, 7, 8]
