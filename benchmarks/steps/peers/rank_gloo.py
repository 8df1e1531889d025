"""A rank of `torch_gloo`."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch.distributed as dist

from benchmarks.steps.ranks import serve_rank
from benchmarks.steps.scene import Run, again, timed
from benchmarks.steps.sizes import SIZES, buffer_of


def all_reduce(num_bytes: int) -> Run:
    def run(count: int) -> float:
        tensor = buffer_of(num_bytes)
        dist.all_reduce(tensor)
        return timed(lambda: again(lambda: dist.all_reduce(tensor), count))

    return run


def make(workload: str, folder: str) -> Mapping[str, Run]:
    return {name: all_reduce(num_bytes) for name, num_bytes in SIZES.items()}


def main() -> None:
    dist.init_process_group("gloo")
    serve_rank(sys.argv[1], make)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
