"""What the options of the gradient exchange cost: a backward pass of two replicas on this machine.

    .venv/bin/python -m benchmarks.gradients [--rounds 5] [--backends shm gloo]

Each line is the time from the begin of a step to the end of its `backward()`, gradients reduced. Lines take turns, so
that all see the same machine; medians of the rounds. "dense" embeddings are the same table without `sparse=True`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal

import torch
from torch import nn

from raydist.collectives.base import Communicator, Membership
from raydist.collectives.opening import open_communicator
from raydist.collectives.reducer.nonfinite import NonfinitePolicy, OnNonfinite
from raydist.collectives.reducer.reducer import GradientReducer
from raydist.collectives.rendezvous import RendezvousStore

RANKS = 2
TIMEOUT_S = 60.0
ROUND_S = 0.5
TABLE, WIDTH, ROWS = 100_000, 32, 256


@dataclass(frozen=True)
class Line:
    """One way to do it."""

    name: str
    model: Literal["mlp", "sparse", "dense"] = "mlp"
    compression: Literal["fp16", "bf16"] | None = None
    choice: OnNonfinite = "pass"


LINES = (
    Line("MLP of 1.9M parameters"),
    Line("MLP, compression fp16", compression="fp16"),
    Line("MLP, compression bf16", compression="bf16"),
    Line("MLP, on_nonfinite skip", choice="skip"),
    Line("embedding 100k x 32, dense", "dense"),
    Line("embedding 100k x 32, sparse", "sparse"),
)


def make_pass(line: Line, group: Communicator) -> Callable[[], float]:
    """A function that runs one backward pass, and says how long it took."""
    torch.manual_seed(0)
    model: nn.Module
    if line.model == "mlp":
        x = torch.randn(ROWS, 784)
        model = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    else:
        x = torch.randint(0, TABLE, (ROWS,))
        model = nn.Embedding(TABLE, WIDTH, sparse=line.model == "sparse")
    policy = NonfinitePolicy(lambda parameters: ["a parameter" for _ in parameters])
    reducer = GradientReducer(group, policy=policy, compression=line.compression)
    reducer.attach(tuple(model.parameters()))

    def run() -> float:
        model.zero_grad()
        began = time.perf_counter()
        with policy.run(line.choice), reducer.step(weight=1 / RANKS):
            model(x).square().mean().backward()
        return time.perf_counter() - began

    for _ in range(3):  # the first passes find their layout
        run()
    return run


def rank_main(requests: Connection, memberships: Sequence[Membership], backend: str) -> None:
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    groups = [open_communicator(one, device=cpu, timeout_s=TIMEOUT_S, backend=backend) for one in memberships]
    passes = [make_pass(line, group) for line, group in zip(LINES, groups, strict=True)]
    requests.send("ready")
    while (request := requests.recv()) is not None:
        place, count = request
        requests.send(statistics.median(passes[place]() for _ in range(count)))
    for group in groups:
        group.close()


def measure(backend: str, rounds: int, round_s: float = ROUND_S) -> list[list[float]]:
    """By line, the seconds of each round."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(RANKS)]
    with RendezvousStore() as store:
        processes = []
        for rank, (_, theirs) in enumerate(pipes):
            places = range(len(LINES))
            memberships = [store.membership(f"g{n}", generation=0, rank=rank, world_size=RANKS) for n in places]
            processes.append(context.Process(target=rank_main, args=(theirs, memberships, backend), daemon=True))
            processes[-1].start()
        ranks = [mine for mine, _ in pipes]
        for connection in ranks:
            connection.recv()
        counts = [max(3, int(round_s / ask(ranks, place, 3))) for place in range(len(LINES))]
        turns = [[ask(ranks, place, count) for place, count in enumerate(counts)] for _ in range(rounds)]
        times = [list(column) for column in zip(*turns, strict=True)]
        for connection in ranks:
            connection.send(None)
        for process in processes:
            process.join()
    return times


def ask(ranks: Sequence[Connection], place: int, count: int) -> float:
    """Let all ranks run a line so often; the slowest one's median."""
    for connection in ranks:
        connection.send((place, count))
    return max(float(connection.recv()) for connection in ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--backends", nargs="+", default=["shm", "gloo"])
    given = parser.parse_args()
    for backend in given.backends:
        for line, times in zip(LINES, measure(backend, given.rounds), strict=True):
            median = statistics.median(times)
            spread = (max(times) - min(times)) / median
            best = 1000 * min(times)
            print(f"{backend:5} {line.name:30} {1000 * median:8.2f} ms  (best {best:.2f}, spread {spread:.0%})")


if __name__ == "__main__":
    main()
