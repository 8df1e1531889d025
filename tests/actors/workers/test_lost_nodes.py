"""Nodes that hold stored results are killed: the elements and their order stay the same."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from typing import Any

import numpy as np
import pytest

from raydist.actors.workers.epoch_pools import SharedExecutor
from raydist.actors.workers.pool import ActorExecutor
from raydist.dataset import Dataset
from raydist.options import Options, Timeouts
from tests.contracts.op import iterate
from tests.several_nodes import cluster, descendants, several_nodes

pytestmark = [pytest.mark.long, pytest.mark.ray, pytest.mark.timeout(240)]


def lose_nodes(seed: int, losses: int) -> int:
    """Check that a random pipeline gives the same elements though nodes that hold its blocks are lost."""
    chance = random.Random(seed)
    dataset = random_pipeline(chance)
    expected = [batch.tobytes() for batch in dataset.as_numpy_iterator()]
    nodes = [_add_node() for _ in range(2)]
    pool = ActorExecutor(2, name="lost", timeouts=Timeouts(element_s=60.0, start_s=60.0), resources={"input": 1.0})
    iterator = iterate(dataset, lambda options: SharedExecutor(pool))
    lost = 0
    try:
        deaths = sorted(chance.sample(range(1, len(expected) - 1), losses))
        found = []
        for number in range(len(expected)):
            if number in deaths:
                nodes.append(_add_node())
                _kill(nodes.pop(chance.randrange(2)))
                lost += 1
            found.append(next(iterator).tobytes())
        assert found == expected
        assert next(iterator, None) is None
    finally:
        pool.close()
        for node in nodes:
            cluster().remove_node(node)
    return lost


def random_pipeline(chance: random.Random) -> Dataset:
    """Rows of 16 KB, which workers store, through operations that move rows and functions that make new ones."""

    def widen(x: Any) -> Any:
        return np.full(4_000, x, np.float32)

    dataset = Dataset.range(chance.randrange(200, 500)).map(widen)
    for _ in range(chance.randrange(1, 4)):
        kind = chance.choice(["shuffle", "filter", "repeat", "map", "batch"])
        if kind == "shuffle":
            dataset = dataset.shuffle(chance.randrange(2, 150), seed=chance.randrange(100))
        elif kind == "filter":
            dataset = dataset.filter(lambda row: row[0] % 3 > 0)
        elif kind == "repeat":
            dataset = dataset.repeat(2)
        elif kind == "map":
            dataset = dataset.map(lambda row: row * 2)
        else:
            dataset = dataset.batch(4).map(lambda rows: rows + 1).unbatch()
    return dataset.batch(8).with_options(Options(seed=5))


def _add_node() -> Any:
    return cluster().add_node(num_cpus=1, resources={"input": 2})


def _kill(node: Any) -> None:
    raylet = node.all_processes["raylet"][0].process.pid
    for pid in (raylet, *descendants(raylet)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    cluster().remove_node(node, allow_graceful=False)


def test_blocks_of_lost_nodes_are_made_again() -> None:
    with several_nodes(cpus=()) as nodes:
        assert nodes.run(lose_nodes, 1, 2) == 2
