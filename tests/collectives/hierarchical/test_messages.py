from __future__ import annotations

import pytest
import torch

from raydist.collectives.base import Communicator
from raydist.collectives.hierarchical.communicator import HierarchicalCommunicator
from raydist.errors import CollectiveMismatchError
from raydist.values import ReduceOp
from tests.collectives.hierarchical.ranks import run_hosted

# More than the kernel keeps of what nobody takes.
LARGE = 5_000_000


def around(communicator: Communicator) -> list[float]:
    """A large message that is taken late is in no collective's way, nor in that of others."""
    rank, size = communicator.rank, communicator.world_size
    sending = [communicator.send(torch.full((numel,), float(rank)), (rank + 1) % size) for numel in (LARGE, 3)]
    total = torch.ones(100_000)
    communicator.all_reduce(total, ReduceOp.SUM).wait()
    got = [torch.zeros(LARGE), torch.zeros(3)]
    for tensor in got:
        communicator.recv(tensor, (rank - 1) % size).wait()
    for work in sending:
        work.wait()
    return [total[0].item(), *(tensor.unique().item() for tensor in got)]


@pytest.mark.parametrize("hosts", ["ab", "aab", "abc"])
def test_messages_pass_beside_collectives_in_order(hosts: str) -> None:
    size = len(hosts)
    assert run_hosted(hosts, around) == [[size, (rank - 1) % size, (rank - 1) % size] for rank in range(size)]


def alone_then_not(communicator: Communicator) -> list[tuple[bool, int]]:
    """Whether anything of this rank is on its way to other hosts: never, while a message, and after it."""
    assert isinstance(communicator, HierarchicalCommunicator)
    assert communicator._joined is not None
    outside = communicator._joined.generation._outside
    seen = [(outside.is_idle, outside.num_under_way)]
    if communicator.rank == 1:
        work = communicator.recv(got := torch.zeros(3), 0)
        seen.append((outside.is_idle, outside.num_under_way))
        communicator.barrier()
        work.wait()
        assert got.tolist() == [5.0, 5.0, 5.0]
    else:
        communicator.barrier()
        communicator.send(torch.full((3,), 5.0), 1).wait()
    return [*seen, (outside.is_idle, outside.num_under_way)]


def test_who_has_messages_under_way_is_not_idle() -> None:
    idle, busy = (True, 0), (False, 1)
    assert run_hosted("ab", alone_then_not) == [[idle, idle], [idle, busy, idle]]


def unlike(communicator: Communicator) -> float:
    if communicator.rank == 0:
        communicator.send(torch.ones(4, 2), 1).wait()
        communicator.send(torch.full((3,), 7.0), 1).wait()
        return 7.0
    with pytest.raises(
        CollectiveMismatchError, match=r"float32 \(8,\) on rank 1 for torch.float32 \(4, 2\) from rank 0"
    ):
        communicator.recv(torch.ones(8), 0).wait()
    got = torch.zeros(3)
    communicator.recv(got, 0).wait()
    return got[0].item()


def test_what_does_not_fit_is_taken_off() -> None:
    assert run_hosted("ab", unlike) == [7.0, 7.0]
