"""Large tensors that are moved, on hosts of all shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raydist.collectives.base import Communicator
from raydist.values import ReduceOp
from tests.collectives.hierarchical.ranks import SHAPES, run_hosted

NUMEL = 150_001


def mark(source: int, destination: int = 0) -> torch.Tensor:
    return torch.full((NUMEL,), 100 * source + destination, dtype=torch.int32)


def move_all(communicator: Communicator) -> list[bool]:
    rank, ranks = communicator.rank, range(communicator.world_size)
    told = [mark(rank) for _ in ranks]
    works: list[Any] = [communicator.broadcast(tensor, root) for root, tensor in enumerate(told)]
    gathered = [torch.empty_like(mark(0)) for _ in ranks]
    works.append(communicator.all_gather(gathered, mark(rank)))
    rows = [torch.empty(place * 50_000, 2, dtype=torch.int32) for place in ranks]
    works.append(communicator.all_gather_rows(rows, torch.full_like(rows[rank], rank)))
    swapped = [torch.empty_like(mark(0)) for _ in ranks]
    works.append(communicator.all_to_all(swapped, [mark(rank, other) for other in ranks]))
    scattered = torch.empty_like(mark(0))
    works.append(communicator.reduce_scatter(scattered, [mark(rank, other) for other in ranks], ReduceOp.SUM))
    for work in works:
        work.wait()
    return [
        all(torch.equal(tensor, mark(root)) for root, tensor in enumerate(told)),
        all(torch.equal(tensor, mark(source)) for source, tensor in enumerate(gathered)),
        all(bool((tensor == source).all()) for source, tensor in enumerate(rows)),
        all(torch.equal(tensor, mark(source, rank)) for source, tensor in enumerate(swapped)),
        torch.equal(scattered, mark(sum(ranks), rank * len(ranks))),
    ]


@pytest.mark.parametrize("hosts", SHAPES)
def test_everything_arrives(hosts: str) -> None:
    assert run_hosted(hosts, move_all) == [[True] * 5] * len(hosts)
