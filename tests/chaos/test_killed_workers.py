"""Input workers are killed at random, half of them while one starts: the same elements come in the same order."""

from __future__ import annotations

import functools
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from raydist.actors.workers.epoch_pools import SharedExecutor
from raydist.actors.workers.handle import WorkerHandle
from raydist.actors.workers.pool import ActorExecutor
from raydist.dataset import Dataset
from raydist.options import Options, Timeouts
from raydist.pipelines.engine.executor import Executor
from tests.actors.workers.test_lost_nodes import random_pipeline
from tests.chaos.extent import how_many
from tests.contracts.op import iterate

KILLS = how_many(some=6, many=200)
KILLS_A_RUN = how_many(some=3, many=10)

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(60 + 12 * KILLS)]


def busy(x: Any, *, rng: np.random.Generator) -> Any:
    time.sleep(0.004)
    return {"x": x, "noise": rng.integers(1 << 30), "wide": np.full(int(x) % 50, x)}


def on_pool(pool: ActorExecutor, options: Options) -> Executor:
    """The pool, which the iterator leaves open."""
    return SharedExecutor(pool)


def rows_of(iterator: Any) -> list[Any]:
    return [
        (int(row["x"]), int(row["noise"]), row["wide"].tolist()) if isinstance(row, dict) else row.tobytes()
        for row in iterator
    ]


def pipeline(run: int) -> Dataset:
    """Small rows, which travel with the answers of workers, or large ones, which stay in the object store."""
    if run % 2:
        return random_pipeline(random.Random(run))
    return Dataset.range(600).shuffle(100, seed=1).map(busy).with_options(Options(seed=5))


class Killer(threading.Thread):
    """Kills workers of a pool, every other one while it starts, until there were enough."""

    def __init__(self, pool: ActorExecutor, rng: random.Random) -> None:
        super().__init__(name="killer", daemon=True)
        self.killed = {"running": 0, "starting": 0}
        self.stopped = threading.Event()
        self._pool = pool
        self._rng = rng

    @property
    def num_killed(self) -> int:
        return sum(self.killed.values())

    def run(self) -> None:
        while self.num_killed < KILLS_A_RUN and not self.stopped.is_set():
            kind = "starting" if self.killed["starting"] < self.killed["running"] else "running"
            with self._pool._lock:
                workers = [worker for worker in self._pool._workers if worker.started == (kind == "running")]
            if workers and self._kill(self._rng.choice(workers), kind):
                self.killed[kind] += 1
            self.stopped.wait(self._rng.uniform(0.0, 0.3) if kind == "running" else 0.002)

    def _kill(self, worker: WorkerHandle, kind: str) -> bool:
        if kind == "starting" and self._rng.random() < 0.5:
            time.sleep(self._rng.uniform(0.0, 0.5))
            if worker.started:
                return False
            ray.kill(worker._actor)  # wherever it is: perhaps it has no process yet
            return True
        pid = int(ray._private.state.state.actor_table(worker._actor._actor_id.hex()).get("Pid") or 0)
        if not pid or worker.started != (kind == "running") or "InputWorker" not in title_of(pid):
            return False
        os.kill(pid, signal.SIGKILL)
        return True


def title_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:  # it is dead already
        return ""


def test_whoever_is_killed_the_same_elements_come_in_the_same_order() -> None:
    killed = {"running": 0, "starting": 0}
    run = 0
    while sum(killed.values()) < KILLS:
        dataset = pipeline(run)
        expected = rows_of(dataset.as_numpy_iterator())
        pool = ActorExecutor(2, name=f"chaos-{run}", timeouts=Timeouts(start_s=60.0, element_s=60.0))
        killer = Killer(pool, random.Random(run))
        try:
            while killer.num_killed < KILLS_A_RUN:
                iterator = iterate(dataset, functools.partial(on_pool, pool))
                if not killer.is_alive():
                    killer.start()
                assert rows_of(iterator) == expected, f"run {run}, after {killer.killed}"
        finally:
            killer.stopped.set()
            killer.join(10)
            pool.close()
        killed = {kind: killed[kind] + killer.killed[kind] for kind in killed}
        run += 1
    assert min(killed.values()) >= KILLS // 2 - run, killed
