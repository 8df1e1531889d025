"""Models larger than a device: `rd.ShardedStrategy`, divided embedding tables and `rd.PipelineStrategy`.

`python -m benchmarks.sharded`

1. A model whose parameters, gradients and AdamW states take 800 MB trains on two sharded replicas that may take 600 MB
   each; a strategy that keeps it whole fails with an error that names ShardedStrategy.
2. A model of 1.5 GB is built on the device "meta": memory of the driver, and of each replica.
3. Rows of a table of 10^8 x 16 numbers, divided among two replicas, are trained by Adagrad: memory of each replica
   beside that of the touched rows.
4. Share of the time in which stages of a pipeline compute, if each takes 50 ms for a microbatch, beside the ideal one.
5. Time of a step of a transformer beside FSDP2 under torchrun, with the same gloo, in turn.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import raydist as rd

_LIMIT_BYTES = 600 << 20
_SHARE = {"CPU": 0.01}


def megabytes(name: str) -> float:
    """Return an entry of this process's status, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (int(megabytes("VmData") * 2**20) + _LIMIT_BYTES,) * 2)


def layers(count: int, width: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))


def train_within_limit(strategy: rd.Strategy) -> str:
    """Train 200 MB of parameters with AdamW; return what came of it."""
    strategy.run(limit_memory)
    with strategy.scope(), torch.device("meta"):
        model = layers(50, 1024)
    with strategy.scope():
        rd.materialize(model)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step(rows: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = model(rows).square().mean()
        loss.backward()
        optimizer.step()
        return float(loss)

    data = rd.Dataset.from_tensor_slices(torch.randn(24, 1024)).batch(8)
    try:
        for batch in strategy.distribute_dataset(data):
            losses = strategy.local_results(strategy.run(step, args=(batch,)))
    except (RuntimeError, MemoryError, rd.RaydistError) as error:
        notes = " ".join(getattr(error, "__notes__", ()))
        named = "ShardedStrategy" in notes
        return f"{type(error).__name__}: {str(error)[:90]}... {'(names ShardedStrategy)' if named else notes}"
    return f"trains, losses {losses}"


STRATEGIES: dict[str, Callable[[], rd.Strategy]] = {
    "sharded": lambda: rd.ShardedStrategy(2, 1, resources_per_replica=_SHARE),
    "mirrored": lambda: rd.MirroredStrategy(2, resources_per_replica=_SHARE, failure_options=rd.FailureOptions(False)),
    "one device": lambda: rd.OneDeviceStrategy("cpu"),
}


def grow_on_meta(count: int, width: int) -> str:
    """Make a model on the replicas; return peak memory above idle of the driver and of the replicas."""
    idle = megabytes("VmRSS")
    with STRATEGIES["sharded"]() as strategy:

        def reset() -> float:
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
            return megabytes("VmRSS")

        before = strategy.local_results(strategy.run(reset))
        with strategy.scope(), torch.device("meta"):
            model = layers(count, width)
        with strategy.scope():
            rd.materialize(model)

        def forward() -> float:
            with torch.no_grad():
                model(torch.ones(1, width))
            return megabytes("VmHWM")

        peaks = strategy.local_results(strategy.run(forward))
    size = count * width**2 * 4 / 2**20
    ranks = ", ".join(f"{peak - at:.0f}" for peak, at in zip(peaks, before, strict=True))
    return f"model of {size:.0f} MB: driver {megabytes('VmHWM') - idle:.0f} MB above idle, replicas {ranks} MB"


def touch_rows(steps: int, rows: int) -> list[str]:
    """Train new rows of a table in each step; return how many rows each replica holds, and its memory above idle."""
    told = []
    with STRATEGIES["mirrored"]() as strategy:
        with strategy.scope():
            table = rd.ShardedEmbedding(10**8, 16, seed=1)
            optimizer = torch.optim.Adagrad(table.parameters(), lr=0.1)

        def step(numbers: torch.Tensor) -> tuple[float, float]:
            began = time.perf_counter()
            if len(numbers):
                optimizer.zero_grad()
                table(numbers).square().mean().backward()
                optimizer.step()
            return time.perf_counter() - began, megabytes("RssAnon")

        def train(numbers: torch.Tensor) -> Any:
            data = rd.Dataset.from_tensors(numbers).unbatch().batch(max(1, len(numbers)))
            batch = next(iter(strategy.distribute_dataset(data)))
            return zip(*map(strategy.local_results, strategy.run(step, args=(batch,))), strict=True)

        list(train(torch.arange(1000)))
        idle = [memory for _, memory in train(torch.arange(1000))]
        order = torch.randperm(10**8 // 32) * 32
        for number in range(steps):
            found = list(train(order[number * rows : (number + 1) * rows]))
            if number + 1 in {1, steps // 4, steps // 2, steps}:
                above = ", ".join(f"{memory - at:.0f}" for (_, memory), at in zip(found, idle, strict=True))
                size = (number + 1) * rows // 2 * 16 * 2 * 4 / 2**20
                seconds = max(seconds for seconds, _ in found)
                told.append(
                    f"{(number + 1) * rows:>8} of 10^8 rows: replicas {above} MB above idle, of which values and sums "
                    f"of their rows {size:.0f} MB; step of {rows} rows {seconds:.2f} s"
                )
    return told


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)


def transformer() -> nn.Module:
    """10.5 million parameters."""
    return nn.Sequential(nn.Embedding(1000, 256), *(Block(256) for _ in range(12)), nn.Linear(256, 1000))


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], Any]:
    def step(tokens: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def seconds_of_raydist(steps: int) -> float:
    with STRATEGIES["sharded"]() as strategy:
        with strategy.scope():
            model = transformer()
            step = make_step(model, torch.optim.AdamW(model.parameters()))
        batch = next(iter(strategy.distribute_dataset(rd.Dataset.from_tensors(torch.randint(0, 1000, (16, 32))))))

        def run(count: int) -> float:
            began = time.perf_counter()
            for _ in range(count):
                result = strategy.run(step, args=(batch,))
            strategy.local_results(result)
            return (time.perf_counter() - began) / count

        run(3)
        return run(steps)


def step_as_torchrun(steps: int) -> None:
    """Run as one of two processes that torchrun has started; the first one prints the seconds of a step."""
    from torch.distributed import destroy_process_group, get_rank, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    model = transformer()
    for part in model.children():
        if isinstance(part, Block):
            fully_shard(part, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    step = make_step(model, torch.optim.AdamW(model.parameters()))
    tokens = torch.randint(0, 1000, (8, 32))
    for _ in range(3):
        step(tokens)
    began = time.perf_counter()
    for _ in range(steps):
        step(tokens)
    if get_rank() == 0:
        print("seconds", (time.perf_counter() - began) / steps)
    destroy_process_group()


def seconds_of_torchrun(steps: int) -> float:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29611"]
    found = subprocess.run(  # noqa: S603  # of this file
        [*command, "-m", "benchmarks.sharded", "--torchrun", str(steps)],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return float(next(line.split()[1] for line in found.stdout.splitlines() if line.startswith("seconds")))


class _Sleep(torch.autograd.Function):
    """The identity, which takes 20 ms forward and 30 ms backward, and no core."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(0.03)
        return gradient


class SlowLayer(nn.Linear):
    """A layer that takes 50 ms for a microbatch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        apply: Any = _Sleep.apply  # torch leaves it untyped
        found: torch.Tensor = apply(super().forward(x))
        return found


def use_of_pipeline(stages: int, microbatches: int, steps: int) -> str:
    """Run steps of a pipeline of slow stages; return the share of the time in which a stage computes."""
    with rd.PipelineStrategy(stages, num_microbatches=microbatches, resources_per_replica=_SHARE) as strategy:
        with strategy.scope():
            model = nn.Sequential(*(SlowLayer(8, 8) for _ in range(stages)))

        def step(count: int) -> float:
            began = time.perf_counter()
            for _ in range(count):
                inputs = torch.ones(2 * microbatches, 8)
                rd.get_replica_context().pipeline_step((inputs, None), lambda output, _: output.mean(), model)
            return (time.perf_counter() - began) / count

        strategy.local_results(strategy.run(step, args=(1,)))
        seconds = float(strategy.local_results(strategy.run(step, args=(steps,)))[0])
    share, ideal = microbatches * 0.05 / seconds, microbatches / (microbatches + stages - 1)
    return (
        f"pipeline of {stages} stages of 50 ms, {microbatches} microbatches: {seconds:.3f} s a step, stages compute "
        f"{share:.2f} of the time, ideal {ideal:.2f}: {share / ideal:.2f} of it (bar 0.9)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--limited", choices=STRATEGIES, help="train within a limit of memory, in this process")
    parser.add_argument("--torchrun", type=int, help="run as a process of torchrun")
    chosen = parser.parse_args()
    if chosen.torchrun:
        step_as_torchrun(chosen.torchrun)
        return
    if chosen.limited:
        strategy = STRATEGIES[chosen.limited]()
        print(f"within 600 MB, {chosen.limited}: {train_within_limit(strategy)}", flush=True)
        os._exit(0)  # a strategy that has run out of memory cannot close
    if not chosen.smoke:
        for name in STRATEGIES:
            command = [sys.executable, "-m", "benchmarks.sharded", "--limited", name]
            subprocess.run(command, timeout=300, check=True)  # noqa: S603  # of this file
    print(grow_on_meta(*((2, 256) if chosen.smoke else (96, 2048))), flush=True)
    print(*touch_rows(*((1, 1000) if chosen.smoke else (20, 100_000))), sep="\n", flush=True)
    print(use_of_pipeline(*((2, 2, 1) if chosen.smoke else (4, 16, 5))), flush=True)
    rounds, steps = (1, 1) if chosen.smoke else (5, 10)
    pairs = [(seconds_of_torchrun(steps), seconds_of_raydist(steps)) for _ in range(rounds)]
    ratio = statistics.median(mine / theirs for theirs, mine in pairs)
    theirs, mine = (1e3 * statistics.median(pair[place] for pair in pairs) for place in (0, 1))
    print(
        f"step of a transformer, 2 replicas: torchrun {theirs:.0f} ms, raydist {mine:.0f} ms: {ratio:.2f} x (bar 1.1)"
    )


if __name__ == "__main__":
    main()
