"""All-reduce on two hosts of two ranks: the hierarchical backend against a flat ring of gloo.

    .venv/bin/python -m benchmarks.hierarchical [--hosts aabb] [--sizes 1 10 100] [--rounds 5]

The ranks are processes of this machine. Those that are said to be on different hosts share no memory: they speak
through the loopback device, as gloo's all do. Ways take turns, so that both see the same machine; medians of rounds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch

from raydist.collectives.base import Communicator, Membership
from raydist.collectives.opening import open_communicator
from raydist.collectives.rendezvous import RendezvousStore
from raydist.core.values import ReduceOp

WAYS = ("gloo", "hierarchical", "hierarchical, allocated")
BARS = {1.0: 1.3, 10.0: 1.5, 100.0: 1.5}
MB = 1_000_000
TIMEOUT_S = 60.0
ROUND_S = 0.3


def rank_main(requests: Connection, memberships: dict[str, Membership]) -> None:
    torch.set_num_threads(1)
    groups = {
        backend: open_communicator(membership, device=torch.device("cpu"), timeout_s=TIMEOUT_S, backend=backend)
        for backend, membership in memberships.items()
    }
    requests.send("ready")
    while (request := requests.recv()) is not None:
        way, num_bytes, count = request
        requests.send(seconds(groups, way, num_bytes, count))
    for communicator in groups.values():
        communicator.close()


def seconds(groups: dict[str, Communicator], way: str, num_bytes: int, count: int) -> float:
    """Of one all-reduce, the mean of so many."""
    backend, _, allocated = way.partition(", ")
    communicator = groups[backend]
    numel = num_bytes // 4
    tensor = communicator.allocate([(numel, torch.float32)])[0] if allocated else torch.empty(numel)
    tensor.zero_()  # what is added up again and again stays what it is
    communicator.all_reduce(tensor, ReduceOp.SUM).wait()
    communicator.barrier()
    start = time.perf_counter()
    for _ in range(count):
        communicator.all_reduce(tensor, ReduceOp.SUM).wait()
    return (time.perf_counter() - start) / count


def measure(hosts: str, sizes: Sequence[float], rounds: int) -> dict[tuple[str, float], list[float]]:
    context = multiprocessing.get_context("spawn")
    ranks: list[Connection] = []
    processes = []
    with RendezvousStore() as store:
        for rank in range(len(hosts)):
            mine, theirs = context.Pipe()
            memberships = {
                backend: store.membership(backend, generation=0, rank=rank, world_size=len(hosts), hosts=tuple(hosts))
                for backend in ("gloo", "hierarchical")
            }
            processes.append(context.Process(target=rank_main, args=(theirs, memberships), daemon=True))
            processes[-1].start()
            ranks.append(mine)
        for connection in ranks:
            connection.recv()
        times: dict[tuple[str, float], list[float]] = {}
        for size in sizes:
            for _ in range(rounds):
                for way in WAYS:
                    times.setdefault((way, size), []).append(ask(ranks, way, size))
        for connection in ranks:
            connection.send(None)
        for process in processes:
            process.join()
    return times


def ask(ranks: list[Connection], way: str, size: float) -> float:
    count = max(3, int(ROUND_S / (0.002 * max(size, 0.25))))
    for connection in ranks:
        connection.send((way, int(size * MB), count))
    return max(float(connection.recv()) for connection in ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="aabb")
    parser.add_argument("--sizes", type=float, nargs="+", default=[1.0, 10.0, 100.0])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    times = measure(given.hosts, given.sizes, given.rounds)
    for size in given.sizes:
        flat = statistics.median(times["gloo", size])
        for way in WAYS:
            own = statistics.median(times[way, size])
            bar = f", bar {BARS[size]}" if size in BARS and way != "gloo" else ""
            print(f"{size:g} MB  {way:26} {1000 * own:8.3f} ms  {flat / own:5.2f} x gloo's speed{bar}")


if __name__ == "__main__":
    main()
