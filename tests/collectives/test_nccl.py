from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from raydist.collectives.base import Membership
from raydist.collectives.process_group import NcclBackend
from raydist.errors import UnavailableError


@pytest.mark.skipif(dist.is_nccl_available(), reason="this PyTorch has NCCL")
def test_nccl_that_is_not_there() -> None:
    with pytest.raises(UnavailableError, match="built with NCCL"):
        NcclBackend().create(HashStore(), Membership("g", 0, 0, 1, "127.0.0.1", 1), timeout_s=5.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nccl_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    backend = NcclBackend()
    group = backend.create(HashStore(), Membership("g", 0, 0, 1, "127.0.0.1", 1), timeout_s=30.0)
    tensor = torch.ones(2, device="cuda")
    group.allreduce([tensor], dist.AllreduceOptions()).wait()
    backend.kill(group)
    assert tensor.tolist() == [1.0, 1.0]
