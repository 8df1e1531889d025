"""Replicas and input pipelines are lost at random moments: training ends as if nothing had happened."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import raydist as rd
from raydist.testing import Fault, FaultPlan
from tests.chaos.extent import how_many

RUNS = how_many(some=1, many=10)
FAULTS, STEPS, ROWS = how_many(some=2, many=10), how_many(some=20, many=80), 12

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(120 + 150 * RUNS)]


@dataclass
class Trained:
    values: dict[str, torch.Tensor]
    mean: float
    num_rows: int
    num_lost_results: int


def train(faults: list[Fault], *, by_fit: bool) -> Trained:
    """Train a CNN with batch norm, dropout, Adam, a schedule and a metric."""
    torch.manual_seed(0)
    rows, labels = torch.randn(STEPS * ROWS, 1, 8, 8), torch.randint(0, 3, (STEPS * ROWS,))
    data = rd.Dataset.from_tensor_slices((rows, labels)).shuffle(100, seed=1).batch(ROWS)
    limits = rd.Timeouts(start_s=60, collective_s=15, step_s=60, close_s=5)
    options = rd.FailureOptions(recover=True, max_failures=1000)
    resources = {"CPU": 0.01}
    with rd.MirroredStrategy(2, timeouts=limits, failure_options=options, resources_per_replica=resources) as strategy:
        with strategy.scope():
            layers = [
                nn.Conv2d(1, 4, 3),
                nn.BatchNorm2d(4),
                nn.ReLU(),
                nn.Flatten(),
                nn.Dropout(0.2),
                nn.Linear(144, 3),
            ]
            network, mean = nn.Sequential(*layers), rd.Mean()
            optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
            model = rd.Model(network)
            model.compile(optimizer, "cross_entropy")
        FaultPlan(*faults).arm(strategy)
        num_rows = 0
        if by_fit:
            model.fit(data, epochs=1, verbose=False)
        else:

            def step(batch: tuple[torch.Tensor, torch.Tensor]) -> int:
                inputs, targets = batch
                optimizer.zero_grad()
                mean.update(inputs.sum(), weight=len(inputs))
                F.cross_entropy(network(inputs), targets).backward()
                optimizer.step()
                return len(inputs)

            results = []
            for batch in strategy.distribute_dataset(data):
                results.append(strategy.run(step, args=(batch,)))
                scheduler.step()
            num_rows = sum(sum(strategy.local_results(each)) for each in results)
        values = {name: each.clone() for name, each in network.state_dict().items()}
        for number, state in enumerate(optimizer.state.values()):
            values |= {f"{number}.{name}": torch.as_tensor(each).clone() for name, each in state.items()}
        lost = sum(failure.num_lost_results for failure in strategy.failures())
        return Trained(values, float(mean.compute()) if not by_fit else 0.0, num_rows, lost)


@pytest.mark.long
@pytest.mark.parametrize("by_fit", [False, True])
def test_training_ends_as_if_nothing_had_been_lost(by_fit: bool) -> None:
    undisturbed = train([], by_fit=by_fit)
    for seed in range(RUNS):
        draw = random.Random(seed)
        steps = sorted(draw.sample(range(1, STEPS - 1), FAULTS))
        faults = [
            Fault(step, "input") if draw.random() < 0.2 else Fault(step, rank=draw.randrange(2)) for step in steps
        ]
        trained = train(faults, by_fit=by_fit)
        different = [name for name, each in undisturbed.values.items() if not torch.equal(each, trained.values[name])]
        assert different == [], (seed, faults)
        if not trained.num_lost_results:
            assert (trained.mean, trained.num_rows) == (undisturbed.mean, undisturbed.num_rows), (seed, faults)
