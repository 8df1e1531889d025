"""What recovery costs a training step, and how long a lost replica is missed: `python -m benchmarks.failures`.

Steps of two replicas with `FailureOptions(recover=True)` and without, in turn. Then replicas are killed, and the time
from the kill to the end of the next step is taken; the same for two workers of Ray Train, with a checkpoint every 20
steps, which start again from the last one.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train.torch import TorchTrainer, prepare_model

import raydist as rd
from benchmarks.steps.models import MODELS, make_step, sgd

LIMIT = 1.06  # times the step without
_CHECKPOINT_STEPS = 20
SLOWEST_S = (10.0, 3.0)  # from a kill to the end of the next step, without and with a spare process


class Program:
    """A model on some replicas, and one batch of it again and again."""

    def __init__(self, name: str, *, recover: bool, spares: int = 0, kind: str = "mirrored") -> None:
        model = MODELS[name]
        options = rd.FailureOptions(recover=recover, spares=spares, max_failures=1000)
        strategy: Any = rd.CentralStorageStrategy if kind == "central" else rd.MirroredStrategy
        self.strategy = strategy(
            1 if kind == "one replica" else 2,
            failure_options=options,
            resources_per_replica={"CPU": 0.01},
            timeouts=rd.Timeouts(collective_s=20),
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


def overhead(name: str, *, steps: int, rounds: int, kind: str = "mirrored") -> tuple[float, float, float]:
    """Return milliseconds without and with recovery, and the median of the ratios of neighbouring rounds."""
    programs = [Program(name, recover=recover, kind=kind) for recover in (False, True)]
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


def train_loop(config: dict[str, Any]) -> None:
    """Train as Ray Train's users do: each worker notes its process, and the first one each step."""
    context = ray.train.get_context()
    rank, folder = context.get_world_rank(), Path(config["folder"])
    model = MODELS[config["model"]]
    network = prepare_model(model.make(), parallel_strategy="ddp")
    optimizer = sgd(network)
    step = make_step(network, optimizer)
    first, found = 0, ray.train.get_checkpoint()
    if found is not None:
        with found.as_directory() as directory:
            state = torch.load(Path(directory, "state.pt"))
        first = state["step"]
        network.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    rows = model.global_batch // 2
    batch = torch.randn(rows, 1, 28, 28), torch.randint(0, 10, (rows,))
    for number in range(first, 1_000_000):
        step(batch)
        if rank == 0:
            with (folder / "steps").open("a") as file:
                file.write(f"{number} {time.time()}\n")
        if number % _CHECKPOINT_STEPS == 0:
            _report(rank, {"step": number + 1, "model": network.state_dict(), "optimizer": optimizer.state_dict()})
        if (folder / "end").exists() and number % _CHECKPOINT_STEPS == 0:
            return


def _report(rank: int, state: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        if rank == 0:
            torch.save(state, Path(directory, "state.pt"))
        checkpoint = ray.train.Checkpoint.from_directory(directory) if rank == 0 else None
        ray.train.report({}, checkpoint=checkpoint)


def pauses_of_ray_train(name: str, kills: int) -> list[tuple[float, int]]:
    """Return the seconds from a kill to the end of the next step, and the steps that ran again, for some kills."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        trainer = TorchTrainer(
            train_loop,
            train_loop_config={"folder": directory, "model": name},
            scaling_config=ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.01}),
            run_config=ray.train.RunConfig(
                storage_path=str(folder / "results"), failure_config=ray.train.FailureConfig(max_failures=-1)
            ),
        )
        training = threading.Thread(target=trainer.fit, daemon=True)
        training.start()
        found = []
        for number in range(kills):
            last = _await_step(folder, after=-1.0, more=3 * _CHECKPOINT_STEPS // 2)[0]
            os.kill(int((folder / f"pid-{number % 2}").read_text()), signal.SIGKILL)
            killed = time.time()
            step, at = _await_step(folder, after=killed + 1.0)
            found.append((at - killed, last - step + 1))
        (folder / "end").touch()
        training.join(120)
        return sorted(found)


def _await_step(folder: Path, *, after: float, more: int = 0) -> tuple[int, float]:
    """Return the first step that ended after a time, and when; `more` steps later."""
    first, end = None, time.monotonic() + 180
    while time.monotonic() < end:
        lines = (folder / "steps").read_text().splitlines() if (folder / "steps").exists() else []
        steps = [(int(number), float(at)) for number, _, at in (line.partition(" ") for line in lines)]
        first = len(lines) if first is None else first
        later = [each for each in steps if each[1] > after]
        if later and len(lines) >= first + more:
            return later[-1] if more else later[0]
        time.sleep(0.01)
    raise TimeoutError("Ray Train must go on with its steps, but did not within 180 s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--only", nargs="+", default=["mlp16", "mlp1024", "cnn"], choices=list(MODELS))
    parser.add_argument("--kills", type=int, default=10)
    chosen = parser.parse_args()
    names, kills = (["mlp16"], 1) if chosen.smoke else (chosen.only, chosen.kills)
    programs = [(name, "mirrored") for name in names] + [(names[-1], kind) for kind in ("one replica", "central")]
    for name, kind in programs:
        steps, rounds = (2, 1) if chosen.smoke else (300 if name == "mlp16" else 100 if kind != "mirrored" else 20, 9)
        without, with_it, ratio = overhead(name, steps=steps, rounds=rounds, kind=kind)
        times = f"{without:7.2f} ms without recovery, {with_it:7.2f} with"
        print(f"{name:8} {kind:11} {times}: {ratio:.3f} x (bar {LIMIT})", flush=True)
    for spares in (0, 1):
        found = pauses("mlp1024" if not chosen.smoke else "mlp16", kills, spares)
        middle, longest, bar = statistics.median(found), found[-1], SLOWEST_S[spares]
        print(f"{kills} kills, {spares} spares: median {middle:.1f} s, longest {longest:.1f} s (bar {bar})")
    others = pauses_of_ray_train("mlp1024" if not chosen.smoke else "mlp16", kills)
    middle, again = (statistics.median(each[place] for each in others) for place in (0, 1))
    print(f"Ray Train, {kills} kills: median {middle:.1f} s, longest {others[-1][0]:.1f} s, {again:g} steps ran again")


if __name__ == "__main__":
    main()
