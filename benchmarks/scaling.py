"""How training scales over replicas, on a *simulated* device: `python -m benchmarks.scaling`.

A step sleeps for 200 ms, as a driver does that waits for an accelerator, and then all-reduces 64 KB. So a core has work
for many replicas, and what is measured is raydist alone: dispatch, agreement, collectives, and what Ray does beside
them. It says nothing about how fast a device computes, nor about a network. A replica takes 210 MB: 64 need 14 GB.
On a virtual machine it says how much of the cores' time others were given: what is beside the bar is as noisy as that.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import ray
import torch
from ray.cluster_utils import Cluster

import raydist as rd
from benchmarks.quiet import read_stat, stolen_share

DEVICE_S = 0.2
NUMBERS = 16 * 1024  # float32: 64 KB
BARS = {8: 0.97, 64: 0.92}
RESULTS = Path(__file__).parent / "results" / "scaling.json"
_LIMITS = rd.Timeouts(start_s=900)  # interpreters that import torch: 64 of them take minutes on two cores
_HEADING = (
    "| nodes | replicas | driven | ms a step, simulated device | efficiency, simulated device | worth | start s "
    "| MB a replica | time of cores given to other machines |\n|---|---|---|---|---|---|---|---|---|"
)

Step = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Scene:
    """What is measured.

    Attributes:
        nodes: Raylets, all on this machine.
        replicas: On all nodes together.
        driven: "run": a call of `strategy.run` for each step; "loop": one for all of them.
    """

    nodes: int
    replicas: int
    driven: str


@dataclass(frozen=True)
class Measured:
    """One scene.

    Attributes:
        scene: What was measured.
        step_s: Seconds of a step, the mean of each round.
        device_s: Of which the device was busy.
        start_s: Until the replicas had run their first step.
        replica_mb: Memory of a replica's process, shared pages counted in parts.
        stolen: Of the time in which cores had work, what the host of a virtual machine gave to others.
    """

    scene: Scene
    step_s: tuple[float, ...]
    device_s: float
    start_s: float
    replica_mb: float
    stolen: float = 0.0

    @property
    def efficiency(self) -> float:
        """Of replicas that do nothing but wait for their devices."""
        return self.device_s / statistics.median(self.step_s)

    def __str__(self) -> str:
        scene, share = self.scene, self.efficiency
        bar = BARS.get(scene.replicas)
        verdict = "" if bar is None else f" ({'>=' if share >= bar else 'BELOW'} {bar:.0%})"
        return (
            f"| {scene.nodes} | {scene.replicas} | {scene.driven} | {1000 * statistics.median(self.step_s):.1f} "
            f"| {share:.1%}{verdict} | {share * scene.replicas:.1f} of {scene.replicas} | {self.start_s:.0f} "
            f"| {self.replica_mb:.0f} | {self.stolen:.0%} |"
        )


def simulated_step(device_s: float) -> Step:
    """A step on a device that is busy for so long."""

    def step() -> torch.Tensor:
        time.sleep(device_s)
        total = rd.get_replica_context().all_reduce(rd.ReduceOp.SUM, torch.ones(NUMBERS))
        first: torch.Tensor = total[0]
        return first

    return step


def memory_mb() -> float:
    """Of this process, each page divided by the processes that share it."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    (kilobytes,) = [int(line.split()[1]) for line in lines if line.startswith("Pss:")]
    return kilobytes / 1000


@contextlib.contextmanager
def cluster_of(nodes: int, replicas: int) -> Iterator[None]:
    """Raylets of this machine that have room for so many replicas; this process is connected to them."""
    share = replicas // nodes
    cluster = Cluster(shutdown_at_exit=False)
    try:
        for _ in range(nodes):
            cluster.add_node(num_cpus=share, object_store_memory=100 * 2**20)
        ray.init(address=cluster.address, log_to_driver=False)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def strategy_of(scene: Scene) -> rd.Strategy:
    if scene.nodes == 1:
        return rd.MirroredStrategy(scene.replicas, timeouts=_LIMITS)
    return rd.MultiWorkerMirroredStrategy(scene.nodes, scene.replicas // scene.nodes, timeouts=_LIMITS)


def run_steps(strategy: rd.Strategy, step: Step, count: int, driven: str) -> None:
    """So many steps, and wait for the last one."""

    def loop(times: int) -> torch.Tensor:
        for _ in range(times):
            last = step()
        return last

    if driven == "loop":
        results = [strategy.run(loop, args=(count,))]
    else:
        results = [strategy.run(step) for _ in range(count)]
    expected = float(strategy.num_replicas_in_sync)
    assert all(float(one) == expected for one in strategy.local_results(results[-1]))


def measure(scenes: Sequence[Scene], *, steps: int, rounds: int, device_s: float) -> Iterator[Measured]:
    """Scenes of one number of nodes and of replicas."""
    began = time.perf_counter()
    with strategy_of(scenes[0]) as strategy:
        step = simulated_step(device_s)
        run_steps(strategy, step, 2, "run")
        start_s = time.perf_counter() - began
        memory = [float(one) for one in strategy.local_results(strategy.run(memory_mb))]
        for scene in scenes:
            run_steps(strategy, step, 2, scene.driven)
            times, before = [], read_stat()
            for _ in range(rounds):
                began = time.perf_counter()
                run_steps(strategy, step, steps, scene.driven)
                times.append((time.perf_counter() - began) / steps)
            stolen = stolen_share(before, read_stat())
            yield Measured(scene, tuple(times), device_s, start_s, statistics.mean(memory), stolen)


def write_json(path: Path, results: Sequence[Measured]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"device": "simulated", "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    measured = [{**asdict(one), "efficiency": one.efficiency} for one in results]
    path.write_text(json.dumps({**about, "results": measured}, indent=1) + "\n")


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 4], help="raylets, all on this machine")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--driven", nargs="+", choices=["run", "loop"], default=["run", "loop"])
    parser.add_argument("--steps", type=int, default=50, help="of a round, at whose end the driver waits for all")
    parser.add_argument("--repeat", type=int, default=5, help="rounds; the median counts")
    parser.add_argument("--smoke", action="store_true", help="two short steps: to see that everything runs")
    parser.add_argument("--json", type=Path, default=RESULTS)
    return parser.parse_args(args)


def main(args: Sequence[str] | None = None) -> list[Measured]:
    options = parse_args(args)
    steps, rounds, device_s = (2, 1, 0.01) if options.smoke else (options.steps, options.repeat, DEVICE_S)
    results: list[Measured] = []
    print(f"Simulated device: a step sleeps {1000 * device_s:.0f} ms and all-reduces {NUMBERS * 4 >> 10} KB.\n")
    print(_HEADING)
    for nodes in options.nodes:
        for replicas in [count for count in options.replicas if count % nodes == 0]:
            scenes = [Scene(nodes, replicas, driven) for driven in options.driven]
            with cluster_of(nodes, replicas):
                for one in measure(scenes, steps=steps, rounds=rounds, device_s=device_s):
                    results.append(one)
                    print(one, flush=True)
    write_json(options.json, results)
    return results


if __name__ == "__main__":
    main()
