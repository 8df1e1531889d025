"""A rank of `ddp`."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.steps.peers.torch_loop import rank_runs
from benchmarks.steps.ranks import serve_rank


def wrap(network: nn.Module, settings: dict[str, Any]) -> nn.Module:
    return DistributedDataParallel(network, **settings)


def main() -> None:
    dist.init_process_group("gloo")
    serve_rank(sys.argv[1], lambda workload, folder: rank_runs(workload, folder, wrap))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
