"""What one replica has read is what all have then, in windows that cut and join tensors."""

from __future__ import annotations

import pytest
import torch

from raydist.checkpoints.sharing.exchanged_bytes import ByteExchange
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

        ByteExchange(group.rank, CPU, broadcast, window_bytes).share(mine)
        return mine, max(sizes)

    for found, largest in run_ranks(3, body):
        assert largest <= window_bytes
        for tensors, others in zip(found, expected, strict=True):
            assert all(torch.equal(tensor, other) for tensor, other in zip(tensors, others, strict=True))
