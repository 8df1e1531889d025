"""What saving costs training: pauses, the rate of steps while a checkpoint is written, and how soon it is there.

Beside `torch.save` with fsync and `torch.distributed.checkpoint.async_save` on the same state and disk.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import raydist as rd

WIDTH = 1024
ROWS = 32


@dataclass(frozen=True)
class Figures:
    """Of one way to save, over all rounds.

    Attributes:
        blocked_s: How long the call that saves takes.
        gap_s: The longest time between the ends of two steps around it.
        median_s: Of a step without a save.
        rate: Steps while it is written, in proportion to steps without a save.
        committed_s: From the call until the checkpoint is there.
    """

    blocked_s: float
    gap_s: float
    median_s: float
    rate: float
    committed_s: float

    def __str__(self) -> str:
        return (
            f"blocked {self.blocked_s * 1e3:7.1f} ms, longest gap {self.gap_s * 1e3:7.1f} ms (step "
            f"{self.median_s * 1e3:6.1f} ms), rate {self.rate:5.2f}, committed in {self.committed_s:5.2f} s"
        )


class Program:
    """A model with Adam whose state has so many megabytes, and steps of it."""

    def __init__(self, strategy: rd.Strategy, megabytes: int) -> None:
        self.strategy = strategy
        layers = max(1, round(megabytes * 1e6 / 3 / 4 / (WIDTH * WIDTH + WIDTH)))
        with strategy.scope():
            self.model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4, fused=True)
        model, optimizer = self.model, self.optimizer

        def step() -> float:
            optimizer.zero_grad()
            model(torch.ones(ROWS, WIDTH)).square().mean().backward()
            optimizer.step()
            return time.time()

        self.step = step

    def run(self) -> Any:
        """Dispatch one step; the time of its end, where that is asked for."""
        return self.strategy.run(self.step)

    def times(self, results: list[Any]) -> list[float]:
        """When steps ended, on the slowest replica."""
        return [max(each.values) if isinstance(each, rd.PerReplica) else each for each in results]


def measure(program: Program, save: Callable[[str], Callable[[], None]], wait: Callable[[], bool]) -> Figures:
    """One save in the middle of steps.

    Args:
        program: The steps.
        save: Saves under a path; what it returns waits for the end.
        wait: Whether the save is under way.
    """
    plain = program.times([program.run() for _ in range(12)])
    gaps = [after - before for before, after in zip(plain[2:], plain[3:], strict=False)]
    median = statistics.median(gaps)
    folder = tempfile.mkdtemp(dir=os.environ.get("BENCH_DIR"))
    results = [program.run() for _ in range(2)]
    begin = time.perf_counter()
    finish = save(os.path.join(folder, "checkpoint"))
    blocked = time.perf_counter() - begin
    called = len(results)
    while wait():
        results.append(program.run())
        results[-2] = program.times(results[-2:-1])[0]  # one step ahead, as programs that read results are
    during = len(results)
    finish()
    committed = time.perf_counter() - begin
    results += [program.run() for _ in range(3)]
    ends = program.times(results)
    around = [after - before for before, after in zip(ends, ends[1:], strict=False)]
    busy = ends[called:during]
    rate = median * (len(busy) - 1) / (busy[-1] - busy[0]) if len(busy) > 2 else float("nan")
    shutil.rmtree(folder)
    return Figures(blocked, max(around), median, rate, committed)


def by_manager(program: Program) -> tuple[Callable[[str], Callable[[], None]], Callable[[], bool]]:
    handles: list[rd.SaveHandle] = []
    checkpoint = rd.Checkpoint(model=program.model, optimizer=program.optimizer)
    manager = rd.CheckpointManager(checkpoint, tempfile.mkdtemp(dir=os.environ.get("BENCH_DIR")), 1)
    manager.restore_or_initialize()

    def save(_: str) -> Callable[[], None]:
        handle = manager.save()
        assert handle is not None
        handles.append(handle)
        return handle.wait

    return save, lambda: not handles[-1].done()


def by_torch_save(program: Program) -> tuple[Callable[[str], Callable[[], None]], Callable[[], bool]]:
    def save(path: str) -> Callable[[], None]:
        with open(path, "wb") as file:
            torch.save((program.model.state_dict(), program.optimizer.state_dict()), file)
            file.flush()
            os.fsync(file.fileno())
        return lambda: None

    return save, lambda: False


def by_torch_distributed(program: Program) -> tuple[Callable[[str], Callable[[], None]], Callable[[], bool]]:
    from torch.distributed.checkpoint.state_dict_saver import async_save

    futures: list[Any] = []

    def save(path: str) -> Callable[[], None]:
        state = {"model": program.model.state_dict(), "optimizer": program.optimizer.state_dict()}
        futures.append(async_save(state, checkpoint_id=path))
        return lambda: futures[-1].result() and None

    return save, lambda: not futures[-1].done()


def report(name: str, program: Program, ways: dict[str, Any], rounds: int) -> None:
    for way, make in ways.items():
        save, wait = make(program)
        measure(program, save, wait)  # the first one finds new memory and cold files
        found = [measure(program, save, wait) for _ in range(rounds)]
        middle = Figures(*(statistics.median(values) for values in zip(*map(_fields, found), strict=True)))
        print(f"{name:14} {way:18} {middle}", flush=True)


def _fields(figures: Figures) -> tuple[float, ...]:
    return figures.blocked_s, figures.gap_s, figures.median_s, figures.rate, figures.committed_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="little of everything, to see that it runs")
    arguments = parser.parse_args()
    megabytes, rounds = (4, 1) if arguments.smoke else (arguments.megabytes, arguments.rounds)
    torch.set_num_threads(max(1, (os.cpu_count() or 2) - 1))
    peers = {"torch.save+fsync": by_torch_save}
    store: Any = torch.distributed.HashStore()  # type: ignore[attr-defined]  # its stub leaves it out
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    peers["dcp.async_save"] = by_torch_distributed
    report("OneDevice", Program(rd.OneDeviceStrategy("cpu"), megabytes), {"raydist": by_manager, **peers}, rounds)
    torch.distributed.destroy_process_group()
    with rd.MirroredStrategy(["CPU:0", "CPU:1"]) as strategy:
        report("Mirrored(2)", Program(strategy, megabytes), {"raydist": by_manager}, rounds)


if __name__ == "__main__":
    main()
