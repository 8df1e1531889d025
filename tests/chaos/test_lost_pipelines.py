"""Input pipelines are killed at random moments: the replicas get the same batches in the same order."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

import raydist as rd
from raydist.actors.supervision import kill_actors
from tests.actors.workers.test_lost_nodes import random_pipeline
from tests.chaos.extent import how_many

KILLS = how_many(some=2, many=30)

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(120 + 60 * KILLS)]


@pytest.fixture
def strategy(ray_cluster: None) -> Iterator[rd.MirroredStrategy]:
    limits = rd.Timeouts(start_s=60, collective_s=15, step_s=60, close_s=5)
    options = rd.FailureOptions(recover=True, max_failures=1000)
    resources = {"CPU": 0.01}
    strategy = rd.MirroredStrategy(2, timeouts=limits, failure_options=options, resources_per_replica=resources)
    with strategy:
        yield strategy


def test_replicas_get_the_same_batches(strategy: rd.MirroredStrategy) -> None:
    def step(rows: torch.Tensor) -> torch.Tensor:
        rd.get_replica_context().all_reduce("SUM", 1.0)
        return rows[:, :4]

    killed = 0
    for seed in range(KILLS):
        chance = random.Random(seed)
        dataset = random_pipeline(chance)
        expected = [torch.from_numpy(batch[:, :4]) for batch in dataset.as_numpy_iterator()]
        kills = chance.sample(range(len(expected) - 1), 1 + (chance.random() < 0.3))
        options = rd.InputOptions(num_input_workers=chance.choice([0, 2]))
        results = []
        for number, batch in enumerate(strategy.distribute_dataset(dataset, options)):
            results.append(strategy.run(step, args=(batch,)))
            if number in kills:
                kill_actors([strategy._pipelines()._main.actor])
                killed += 1
        found = [torch.cat(strategy.local_results(each)) for each in results]
        assert len(found) == len(expected), seed
        assert all(map(torch.equal, found, expected)), seed
    assert killed >= KILLS
