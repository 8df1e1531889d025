"""What recovery costs a training step, and how long a lost replica is missed: `python -m benchmarks.failures`.

Steps of two replicas with `FailureOptions(recover=True)` and without, in turn. Then replicas are killed, and the time
from the kill to the end of the next step is taken.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import time

import torch

import raydist as rd
from benchmarks.steps.models import MODELS, make_step, sgd

LIMIT = 1.06  # times the step without
SLOWEST_S = (10.0, 3.0)  # from a kill to the end of the next step, without and with a spare process


class Program:
    """A model on two replicas, and one batch of it again and again."""

    def __init__(self, name: str, *, recover: bool, spares: int = 0) -> None:
        model = MODELS[name]
        options = rd.FailureOptions(recover=recover, spares=spares, max_failures=1000)
        self.strategy = rd.MirroredStrategy(
            2, failure_options=options, resources_per_replica={"CPU": 0.01}, timeouts=rd.Timeouts(collective_s=20)
        )
        with self.strategy.scope():
            network = model.make()
            optimizer = sgd(network)
        self._step = make_step(network, optimizer)
        rows = model.global_batch
        data = rd.Dataset.from_tensors((torch.randn(rows, 1, 28, 28), torch.randint(0, 10, (rows,))))
        self._batch = next(iter(self.strategy.distribute_dataset(data)))

    def seconds(self, steps: int) -> float:
        """Run some steps; return the seconds of one."""
        began = time.perf_counter()
        for _ in range(steps):
            result = self.strategy.run(self._step, args=(self._batch,))
        self.strategy.local_results(result)
        return (time.perf_counter() - began) / steps

    def seconds_to_recover(self, rank: int) -> float:
        """Kill a replica amid steps; return the seconds to the end of the next step."""
        pid = self.strategy.local_results(self.strategy.run(os.getpid))[rank]
        for _ in range(10):
            self.strategy.run(self._step, args=(self._batch,))
        os.kill(pid, signal.SIGKILL)
        return self.seconds(1)


def overhead(name: str, *, steps: int, rounds: int) -> tuple[float, float, float]:
    """Return milliseconds without and with recovery, and the median of the ratios of neighbouring rounds."""
    programs = [Program(name, recover=recover) for recover in (False, True)]
    for program in programs:
        program.seconds(steps)
    found = [[program.seconds(steps) for program in programs] for _ in range(rounds)]
    for program in programs:
        program.strategy.close()
    without, with_it = ([1e3 * each[place] for each in found] for place in (0, 1))
    ratio = statistics.median(b / a for a, b in found)
    return statistics.median(without), statistics.median(with_it), ratio


def pauses(name: str, kills: int, spares: int) -> list[float]:
    """Return the seconds from a kill to the end of the next step, for some kills."""
    program = Program(name, recover=True, spares=spares)
    program.seconds(2)
    found = []
    for number in range(kills):
        time.sleep(8.0 if spares else 0.0)  # until the spare is ready
        found.append(program.seconds_to_recover(number % 2))
    program.strategy.close()
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--only", nargs="+", default=["mlp16", "mlp1024", "cnn"], choices=list(MODELS))
    parser.add_argument("--kills", type=int, default=10)
    chosen = parser.parse_args()
    names, kills = (["mlp16"], 1) if chosen.smoke else (chosen.only, chosen.kills)
    for name in names:
        steps, rounds = (2, 1) if chosen.smoke else (300 if name == "mlp16" else 20, 9)
        without, with_it, ratio = overhead(name, steps=steps, rounds=rounds)
        print(
            f"{name:8} {without:7.2f} ms without recovery, {with_it:7.2f} with: {ratio:.3f} x (bar {LIMIT})", flush=True
        )
    for spares in (0, 1):
        found = pauses("mlp1024" if not chosen.smoke else "mlp16", kills, spares)
        middle, longest, bar = statistics.median(found), found[-1], SLOWEST_S[spares]
        print(f"{kills} kills, {spares} spares: median {middle:.1f} s, longest {longest:.1f} s (bar {bar})")


if __name__ == "__main__":
    main()
