"""Pipelines on a real pool, whose results stay in the object store: nothing changes."""

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
from raydist.dataset import Dataset
from raydist.options import Timeouts
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import Item
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.engine.kernel import Kernel, StageSpec
from tests.chaos.extent import how_many
from tests.contracts.datasets import DATASETS
from tests.contracts.op import collect, iterate, same
from tests.pipelines.random_pipelines import Pipeline, pipelines

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(1200)]

LIMIT = 60
CASES = settings(max_examples=how_many(some=80, many=1000), suppress_health_check=[HealthCheck.function_scoped_fixture])


@dataclass(frozen=True, eq=False)
class StoreEverything(Kernel):
    """Lets a worker store results of any size, as large ones are."""

    label: ClassVar[str] = "store everything"  # type: ignore[misc]  # one name for all

    def run(self, block: Block, start: int) -> Sequence[Item]:
        stored_results._LEAST_ROW_BYTES = stored_results._LEAST_BYTES = 0
        time.sleep(0.5)  # the next of these calls goes to another worker
        return [block]


@pytest.fixture(scope="module")
def pool(ray_cluster: None) -> Iterator[ActorExecutor]:
    pool = ActorExecutor(2, name="invariants", timeouts=Timeouts(start_s=60.0, element_s=60.0))
    pool.start()
    spec = StageSpec("everything", (StoreEverything(),))
    block = Block(LEAF, (TensorSpec((), np.int64),), (np.arange(1),), 1)
    for _ in range(2):  # the first calls wait for their workers
        for result in [pool.submit(spec, block, (0,)) for _ in range(2)]:
            result.result()
    yield pool
    pool.close()


def check(pool: ActorExecutor, build: Callable[[], Dataset], limit: int, at: Callable[[int], int]) -> None:
    """The first elements and errors of a dataset are those of this process, however it is saved and loaded."""
    expected = collect(iterate(build()), limit)
    done = at(len(expected))
    first = iterate(build(), lambda _: SharedExecutor(pool))
    assert same(collect(first, done), expected[:done])
    state = json.loads(json.dumps(first.state_dict()))
    assert same(collect(first, limit - done), expected[done:])
    first.close()
    for resumed in (iterate(build()), iterate(build(), lambda _: SharedExecutor(pool))):
        resumed.load_state_dict(state)
        assert same(collect(resumed, limit - done), expected[done:])
        resumed.close()


@CASES
@given(pipeline=pipelines(), data=st.data())
def test_elements_errors_order_and_states(pool: ActorExecutor, pipeline: Pipeline, data: st.DataObject) -> None:
    check(pool, pipeline.build, LIMIT, lambda count: data.draw(st.integers(0, count)))


def test_every_operation_keeps_them(pool: ActorExecutor) -> None:
    for number, (name, build) in enumerate(DATASETS.items()):
        try:
            check(pool, build, 9, lambda count, number=number: number % (count + 1))  # type: ignore[misc]  # of an int
        except AssertionError as error:
            raise AssertionError(f"the dataset {name!r} of tests/contracts/datasets.py") from error


def double(x: Any) -> Any:
    return 2 * x


def test_results_were_stored(pool: ActorExecutor) -> None:
    numbers = Pipeline("range", (50,), {}, "number").then("map", double).then("batch", 10)
    iterator = iterate(numbers.build(), lambda _: SharedExecutor(pool))
    assert [batch.tolist() for batch in collect(iterator)] == [list(range(n, n + 20, 2)) for n in range(0, 100, 20)]
    mapped = next(stage for stage in iterator.stats().stages if stage.name.startswith("map"))
    assert mapped.bytes > 0
    assert mapped.bytes_here == 0
