"""Every operation keeps its contract on pools of actors too: same elements, same order, exact resuming."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from raydist.actors.workers.epoch_pools import SharedExecutor
from raydist.actors.workers.pool import ActorExecutor
from raydist.options import Options
from raydist.pipelines.engine.executor import Executor
from tests.conftest import live_actors
from tests.contracts.datasets import DATASETS
from tests.contracts.op import MakeExecutor, check_op

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

ELEMENTS = 9  # of each dataset: a save and a load at each of them


@pytest.fixture(scope="module")
def pools(ray_cluster: None, shared_actors: set[str]) -> Iterator[tuple[MakeExecutor, ...]]:
    """Pools of one and of three workers, shared by all iterators, those that are not finished included."""
    opened = [ActorExecutor(num_workers, name="contract") for num_workers in (1, 3)]
    for pool in opened:
        pool.start()
    shared_actors |= live_actors()
    yield tuple(map(_lender, opened))
    for pool in opened:
        pool.close()


def _lender(pool: ActorExecutor) -> Callable[[Options], Executor]:
    return lambda options: SharedExecutor(pool)


@pytest.mark.parametrize("name", DATASETS)
def test_operation_keeps_its_contract_on_pools(name: str, pools: tuple[MakeExecutor, ...]) -> None:
    check_op(DATASETS[name], limit=ELEMENTS, executors=pools)
