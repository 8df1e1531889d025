"""raydist: memory and state."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np

import raydist as rd
from benchmarks.pipelines.memory import peak_over_idle
from benchmarks.pipelines.peers.raydist_passes import reading
from benchmarks.pipelines.scene import MakePass, Pass, Scene


def memory(scene: Scene) -> Pass:
    blocks = rd.Dataset.range(scene.rows // 256).map(lambda i: np.full((256, 1024), i, np.float32))
    dataset = blocks.unbatch().shuffle(10_000).batch(256)
    return lambda: peak_over_idle(reading(dataset))


def state(scene: Scene) -> Pass:
    def measure() -> int:
        dataset = rd.Dataset.range(scene.rows).shuffle(scene.rows, seed=1).batch(256).repeat()
        iterator = iter(dataset)
        for _ in range(3 * (scene.rows // 256) + 10):
            next(iterator)
        saved = json.dumps(iterator.state_dict())
        following = [next(iterator) for _ in range(10)]
        other = iter(dataset)
        other.load_state_dict(json.loads(saved))
        if not all(batch.equal(next(other)) for batch in following):
            raise AssertionError("A restored iterator must give the same elements.")
        return len(saved)

    return measure


PASSES: Mapping[str, MakePass] = {"memory": memory, "state": state}
