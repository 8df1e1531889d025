"""The program of tests/test_preempted_jobs.py: trains 200 MB of state on two replicas, and saves when it is to end.

preempted_program.py DIRECTORY SECONDS_A_STEP [workers]: with `workers`, each replica is on a node of its own.
"""

from __future__ import annotations

import os
import sys
import time
import zlib

import torch

import raydist as rd
from raydist.cluster.ray_session import this_node

WIDTH, LAYERS, ROWS, EPOCHS = 1024, 16, 32, 3  # 16.8M float32 values, and two of Adam's for each


def main(directory: str, seconds_a_step: float, workers: str = "") -> None:
    torch.manual_seed(3)
    with rd.MultiWorkerMirroredStrategy(2, 1) if workers else rd.MirroredStrategy(["CPU:0", "CPU:1"]) as strategy:
        with strategy.scope():
            layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
            model = torch.nn.Sequential(torch.nn.Dropout(0.3), *layers)
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
        rows = torch.rand(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
        data = strategy.distribute_dataset(rd.Dataset.from_tensor_slices(rows).shuffle(ROWS, seed=1).batch(4))
        progress = rd.State(step=0, epoch=0)

        def step(batch: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

        checkpoint = rd.Checkpoint(model=model, optimizer=optimizer, data=data, progress=progress)
        with rd.CheckpointManager(checkpoint, directory, max_to_keep=2) as manager:
            print("nodes", this_node(), *strategy.local_results(strategy.run(this_node)), flush=True)
            print("replicas", *strategy.local_results(strategy.run(os.getpid)), flush=True)
            print("restored", manager.restore_or_initialize(), flush=True)
            while progress.epoch < EPOCHS:
                for batch in data:
                    strategy.run(step, args=(batch,))
                    progress.step += 1
                    time.sleep(seconds_a_step)
                    print("step", progress.step, flush=True)
                progress.epoch += 1
            values = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
            print("digest", zlib.crc32(values), progress.step, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), *sys.argv[3:])
