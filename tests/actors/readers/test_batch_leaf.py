"""What the driver knows of a leaf of a batch without fetching it."""

from __future__ import annotations

from typing import Any

import pytest

from raydist.actors.readers.driver_iterator import BatchLeaf
from raydist.dataset import Dataset
from raydist.distributed_dataset import distribute, distribute_from_function
from raydist.options import InputOptions
from tests.actors.readers.fakes import fake_side


@pytest.mark.parametrize("on_host", [False, True])
def test_parts_say_where_they_are_and_where_they_go(on_host: bool) -> None:
    options = InputOptions(num_input_workers=0, experimental_fetch_to_device=not on_host)
    with fake_side(2) as side:
        leaf: Any = next(iter(distribute(Dataset.range(3).batch(3), side, options)))
        assert isinstance(leaf, BatchLeaf)
        parts = [leaf.part_on(rank) for rank in range(2)]
        assert (leaf.num_parts, leaf.rows) == (2, (2, 1))
        assert [part.ref for part in parts] == list(leaf.batch.group.refs)
        assert [part.on_host for part in parts] == [on_host] * 2


def test_a_replica_whose_worker_has_ended_works_on_rows_of_another() -> None:
    options = InputOptions(num_input_workers=0)
    with fake_side(2, num_workers=2) as side:
        dataset = distribute_from_function(
            lambda context: Dataset.range(3 + 2 * context.input_pipeline_id).batch(3), side, options
        )
        leaf: Any = list(dataset)[1]
        assert [value.tolist() for value in leaf.values] == [[], [3, 4]]
        part = leaf.part_on(0, padding=True)
        assert part.ref is leaf.part_on(1).ref
        assert part.ref.leaf(part.leaf_index, part.place).tolist() == [3, 4]
        none = leaf.part_on(0)
        assert none.ref.leaf(none.leaf_index, none.place).shape == (0,)
