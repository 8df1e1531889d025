from __future__ import annotations

import numpy as np

from raydist.dataset import Dataset
from raydist.options import OptimizationOptions, Options
from raydist.pipelines.ops.gather import _bytes_of
from tests.contracts.op import collect, iterate, same

ROWS = Dataset.from_tensor_slices({"image": np.arange(60).reshape(20, 3), "name": [str(i) for i in range(20)]})


def test_indices_move_and_rows_are_read_behind() -> None:
    dataset = ROWS.shuffle(5).repeat(2).skip(3).take(30)
    now = Options(optimization=OptimizationOptions(late_gather=False))
    assert "gather(" in dataset.explain()
    assert "gather(" not in dataset.with_options(now).explain()
    assert same(collect(iterate(dataset)), collect(iterate(dataset.with_options(now))))


def test_what_is_in_memory_is_not_sent_to_workers() -> None:
    lines = ROWS.shuffle(5).map(lambda row: row).explain().splitlines()
    assert "  from_tensor_slices-0: in the consumer's thread" in lines
    assert "  map-2: on the iterator's executor" in lines


def test_nothing_is_gathered_where_only_numbers_move() -> None:
    assert "gather(" not in Dataset.range(20).shuffle(5).explain()


def test_it_is_known_how_large_rows_of_numbers_are() -> None:
    images = Dataset.from_tensor_slices({"image": np.zeros((20, 3)), "label": np.zeros(20, np.int32)})
    assert _bytes_of(images.element_spec) == 28
    assert _bytes_of(ROWS.element_spec) is None


def test_a_consecutive_read_is_a_view() -> None:
    source = np.arange(60).reshape(20, 3)
    access = Dataset.from_tensor_slices(source)._op.random_access()
    assert access is not None
    assert np.shares_memory(access.gather(np.arange(4, 9)).columns[0], source)
    assert not np.shares_memory(access.gather(np.array([4, 6])).columns[0], source)
