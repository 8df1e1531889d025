"""Random pipelines on real pools of one and three workers, whose results stay in the object store: nothing changes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raydist.actors.workers import stored_results
from raydist.actors.workers.epoch_pools import SharedExecutor
from raydist.actors.workers.pool import ActorExecutor
from raydist.core.nest import LEAF
from raydist.options import Options, Timeouts
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import Item
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.engine.executor import Executor
from raydist.pipelines.engine.kernel import Kernel, StageSpec
from tests.chaos.extent import how_many
from tests.conftest import live_actors
from tests.contracts.datasets import DATASETS
from tests.contracts.op import MakeExecutor, check_op, collect, iterate, same
from tests.pipelines.random_pipelines import Pipeline, pipelines

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(1200)]

LIMIT = 60
CASES = settings(
    max_examples=how_many(some=100, many=1000), suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@dataclass(frozen=True, eq=False)
class StoreEverything(Kernel):
    """Lets a worker store results of any size, as large ones are."""

    label: ClassVar[str] = "store everything"  # type: ignore[misc]  # one name for all

    def run(self, block: Block, start: int) -> Sequence[Item]:
        stored_results._LEAST_ROW_BYTES = stored_results._LEAST_BYTES = 0
        time.sleep(0.5)  # the next of these calls goes to another worker
        return [block]


@pytest.fixture(scope="module", params=[1, 3])
def pool(request: pytest.FixtureRequest) -> Iterator[ActorExecutor]:
    timeouts = Timeouts(start_s=60.0, element_s=60.0)
    pool = ActorExecutor(request.param, name=f"invariants-{request.param}", timeouts=timeouts)
    spec = StageSpec("everything", (StoreEverything(),))
    block = Block(LEAF, (TensorSpec((), np.int64),), (np.arange(1),), 1)
    for _ in range(2):  # the first calls wait for their workers
        for result in [pool.submit(spec, block, (0,)) for _ in range(request.param)]:
            result.result()
    yield pool
    pool.close()


@CASES
@given(pipeline=pipelines(), data=st.data())
def test_elements_errors_order_and_states(pool: ActorExecutor, pipeline: Pipeline, data: st.DataObject) -> None:
    expected = collect(iterate(pipeline.build()), LIMIT)
    done = data.draw(st.integers(0, len(expected)))
    first = iterate(pipeline.build(), lambda _: SharedExecutor(pool))
    assert same(collect(first, done), expected[:done])
    state = json.loads(json.dumps(first.state_dict()))
    assert same(collect(first, LIMIT - done), expected[done:])
    first.close()
    for resumed in (iterate(pipeline.build()), iterate(pipeline.build(), lambda _: SharedExecutor(pool))):
        resumed.load_state_dict(state)
        assert same(collect(resumed, LIMIT - done), expected[done:])
        resumed.close()


def test_results_were_stored(pool: ActorExecutor) -> None:
    numbers = Pipeline("range", (50,), {}, "number").then("map", _doubled).then("batch", 10)
    iterator = iterate(numbers.build(), lambda _: SharedExecutor(pool))
    assert [batch.tolist() for batch in collect(iterator)] == [list(range(n, n + 20, 2)) for n in range(0, 100, 20)]
    mapped = next(stage for stage in iterator.stats().stages if stage.name.startswith("map"))
    assert mapped.bytes > 0
    assert mapped.bytes_here == 0


def _doubled(x: Any) -> Any:
    return 2 * x


# --- the contract of operations, on pools -----------------------------------------------------------------------------

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
