"""Who writes which tensors."""

from __future__ import annotations

import pytest

from raydist.checkpoints.manifest import SavedObject
from raydist.checkpoints.new_files import NewFiles
from raydist.checkpoints.sharing.shares import Share, ShareRequest, join_shares, plan_files, random_values
from raydist.checkpoints.tensor_file import TensorFile
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
    request = ShareRequest("t", NewFiles(directory_files("/tmp/x")), {"model": "model"})
    one, first, second = plan_files({"model": {"a": 1}}, 2) + plan_files({"model": {"a": 3, "b": 3}}, 2, small_bytes=1)
    assert [file.name(request) for file in (one, first, second)] == [
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


def test_shares_make_the_objects_again() -> None:
    files = [TensorFile(f"model-{n}", 1, 2, 3, 4) for n in range(3)]
    model, state = SavedObject("module", values={}), SavedObject("other", values={"a": 1})
    first = Share({("model", 0): files[0], ("model", 2): files[2]}, {"model": model, "state": state}, (b"a",))
    second = Share({("model", 1): files[1]}, {}, (b"b", b"c"))
    assert join_shares([first, second]) == {"model": (model, files), "state": (state, [])}
    assert random_values([first, second]) == [[b"a"], [b"b", b"c"]]
