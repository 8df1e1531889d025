from __future__ import annotations

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from raydist.collectives.base import Membership
from raydist.collectives.process_group import GlooBackend, wait_slice


def test_gloo_of_one() -> None:
    backend = GlooBackend()
    group = backend.create(HashStore(), Membership("g", 0, 0, 1, "127.0.0.1", 1), timeout_s=5.0)
    tensor = torch.ones(2)
    assert wait_slice(group.allreduce([tensor], dist.AllreduceOptions()), 5.0)
    backend.kill(group)
    assert tensor.tolist() == [1.0, 1.0]
