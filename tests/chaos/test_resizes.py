"""Random changes of the number of replicas while they train."""

from __future__ import annotations

import random

import pytest

import raydist as rd
from tests.chaos.extent import how_many
from tests.strategies.test_resize import LIMITS, RESOURCES, require_same, train

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(1800)]


@pytest.mark.long
def test_random_schedules_give_the_results_of_one_device() -> None:
    once = train(rd.OneDeviceStrategy("cpu"), {})
    with rd.MirroredStrategy(1, resources_per_replica=RESOURCES, timeouts=LIMITS) as strategy:
        for seed in range(how_many(2, 20)):
            rng = random.Random(seed)
            steps = sorted(rng.sample(range(26), 5))
            sizes = dict(zip(steps, (2, 4, 3, 1, 2), strict=True))
            require_same(train(strategy, sizes, ahead=rng.randrange(3)), once)
            strategy.resize(1)
