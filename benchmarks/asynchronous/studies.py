"""What is found that is no time: the memory of a huge table's servers, and what asynchronous training learns.

`python -m benchmarks.asynchronous.studies` is the process of them, as that of a contender: a request names a study, the
answer has its findings.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn

import raydist as rd
from benchmarks.asynchronous.bars import ACCURACY, MEMORY_RATIO
from benchmarks.asynchronous.models import ScoredRows, make_step
from benchmarks.pipelines.generate import mnist_file, mnist_images
from benchmarks.pipelines.worker import Answer, serve
from benchmarks.processes import read_processes, started_by
from benchmarks.steps.cpu import SERVERS, kind_of

HUGE_ROWS, IDS = 10**9, 4096
TRAIN_ROWS, BATCH, EPOCHS = 8_000, 32, 3

Findings = dict[str, float]
Study = Callable[[bool], Findings]
"""Whether little work is to be done."""


def huge_table(smoke: bool) -> Findings:
    """Steps on rows of a table of 10^9: what a server remembers is what was touched."""
    steps = 20 if smoke else 1_000
    ids = power_law_ids(steps * IDS)
    strategy = rd.ParameterServerStrategy(2, 1)
    coordinator = rd.ClusterCoordinator(strategy)
    with strategy:
        with strategy.scope():
            network = ScoredRows(HUGE_ROWS)
            step = make_step(network, torch.optim.SGD(network.parameters(), 0.01))
        batches = rd.Dataset.from_tensor_slices((ids, (ids % 2).astype(np.float32))).batch(IDS)
        # The first step creates the table, and loads what a server needs for it.
        coordinator.fetch(strategy.run(step, args=((torch.zeros(2, dtype=torch.int64), torch.zeros(2)),)))
        before = server_bytes()
        for batch in strategy.distribute_dataset(batches):
            strategy.run(step, args=(batch,))
        coordinator.join()
        used = server_bytes() - before
    touched = len(np.unique(ids)) * network.table.embedding_dim * 4
    return {MEMORY_RATIO: used / touched, "server MB": used / 1e6, "touched MB": touched / 1e6, "steps": float(steps)}


def power_law_ids(count: int) -> np.ndarray[Any, Any]:
    """The k-th most frequent row is drawn in proportion to 1/k; which row that is looks random."""
    rank = np.floor(HUGE_ROWS ** np.random.default_rng(0).random(count)).astype(np.int64) - 1
    spread: np.ndarray[Any, Any] = rank * 387_420_489 % HUGE_ROWS
    return spread


def server_bytes() -> float:
    """Memory of all parameter servers of this process, each shared page counted in parts."""
    mine = started_by(os.getpid(), read_processes())
    servers = [process.pid for process in mine if kind_of(process, os.getpid()) == SERVERS]
    assert servers, "no process of a parameter server was found"
    return sum(_resident_bytes(pid) for pid in servers)


def _resident_bytes(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    (kilobytes,) = (int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return 1024.0 * kilobytes


def mnist(smoke: bool) -> Findings:
    """A small CNN on 8,000 of MNIST's test images, two workers that do not wait for each other; 2,000 tell."""
    if not mnist_file().is_file():
        raise FileNotFoundError("needs the images of MNIST: set RAYDIST_TEST_DATA")
    pixels, labels = mnist_images()
    inputs = pixels[:, None].astype(np.float32) / 255
    train, test = slice(TRAIN_ROWS // (20 if smoke else 1)), slice(TRAIN_ROWS, None)
    with rd.ParameterServerStrategy(2, 1) as strategy:
        torch.manual_seed(0)
        with strategy.scope():
            network = cnn()
            step = make_step(network, torch.optim.Adam(network.parameters(), 2e-3))
        rows = rd.Dataset.from_tensor_slices((inputs[train], labels[train]))
        batches = strategy.distribute_dataset(rows.shuffle(TRAIN_ROWS, seed=0).batch(BATCH))
        for _ in range(EPOCHS):
            for batch in batches:
                strategy.run(step, args=(batch,))
        with torch.no_grad():
            said = network(torch.from_numpy(inputs[test])).argmax(1)
    return {ACCURACY: float((said == torch.from_numpy(labels[test])).float().mean())}


def cnn() -> nn.Module:
    first = (nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    second = (nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(32 * 49, 64), nn.ReLU(), nn.Linear(64, 10))


STUDIES: Mapping[str, Study] = MappingProxyType({"huge_table": huge_table, "mnist": mnist})


class StudyWorker:
    """Answers requests."""

    def answer(self, request: Mapping[str, Any]) -> Answer:
        """Do what is asked; an error is an answer too."""
        try:
            return {"findings": STUDIES[request["study"]](bool(request["smoke"]))}
        except Exception as error:
            traceback.print_exc()
            return {"problem": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}

    def close(self) -> None:
        """Nothing stays open between studies."""


if __name__ == "__main__":
    serve(StudyWorker())
