"""Every tensor is read once, by one replica; what one replica has read is what all have then."""

from __future__ import annotations

import pytest
import torch

from raydist.checkpoints.shard_reader import exchange_bytes, plan_reads
from raydist.checkpoints.tensor_file import FilePlace, TensorFile
from tests.collectives.local_group import LocalGroup
from tests.collectives.threads import run_ranks

CPU = torch.device("cpu")


def parts() -> list[list[torch.Tensor]]:
    """By rank; the second one has read nothing."""
    torch.manual_seed(1)
    return [
        [torch.randn(5, 3), torch.tensor(3), torch.empty(0, 4), torch.randn(7).bfloat16()],
        [],
        [torch.tensor([True, False]), torch.randn(2, dtype=torch.complex64), torch.randn(40, dtype=torch.float64)],
    ]


@pytest.mark.parametrize("window_bytes", [1, 16, 64, 1 << 20])
def test_all_have_what_each_has_read(window_bytes: int) -> None:
    expected = parts()

    def body(group: LocalGroup) -> tuple[list[list[torch.Tensor]], int]:
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

    for found, largest in run_ranks(3, body):
        assert largest <= window_bytes
        for tensors, others in zip(found, expected, strict=True):
            assert all(torch.equal(tensor, other) for tensor, other in zip(tensors, others, strict=True))


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
