"""Every tensor of every file is read once, and replicas have about equally much to read."""

from __future__ import annotations

import pytest

from raydist.checkpoints.sharing.share_reader import plan_reads
from raydist.checkpoints.tensor_file import FilePlace, TensorFile

HEADER = 8


def file(name: str, **sizes: int) -> TensorFile:
    places, at = {}, HEADER
    for key, size in sizes.items():
        places[key] = FilePlace("U8", (size,), at, at + size, 0)
        at += size
    return TensorFile(name, at, 0, HEADER, 0, places)


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 7])
def test_each_tensor_is_read_once_and_each_file_by_somebody(num_replicas: int) -> None:
    files = {
        "model": [file("a", x=100, y=1, z=0), file("b", u=300), TensorFile("index", 50, 0, 50, 0)],
        "optimizer": [file("c", **{f"p{number}": 10 for number in range(20)})],
        "empty": [],
    }
    plan = plan_reads(files, num_replicas)
    assert len(plan) == num_replicas
    found = [(read.owner, read.file.name, key) for reads in plan for read in reads for key in read.keys]
    expected = [(owner, each.name, key) for owner, several in files.items() for each in several for key in each.tensors]
    assert sorted(found) == sorted(expected)
    assert {read.file.name for reads in plan for read in reads} == {"a", "b", "c", "index"}


def test_replicas_have_about_equally_much() -> None:
    files = {"model": [file(str(part), **{f"p{number}": 100 for number in range(10)}) for part in range(3)]}
    plan = plan_reads(files, 4)
    loads = [sum(100 * len(read.keys) for read in reads) for reads in plan]
    assert max(loads) - min(loads) <= 200
    first = [key for read in plan[0] for key in read.keys]
    assert first == [f"p{number}" for number in range(len(first))], "as it lies in the file"
