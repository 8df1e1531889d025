from __future__ import annotations

import pytest

from raydist.dataset import Dataset
from raydist.pipelines.sources.indexed import IndexedIterator


def test_blocks_follow_the_limit_and_the_state_is_the_next_index() -> None:
    access = Dataset.range(10, 15)._op.random_access()
    assert access is not None
    iterator = IndexedIterator(access)
    assert iterator.next_block(2).rows() == [10, 11]
    assert iterator.state_dict() == {"next": 2}
    resumed = IndexedIterator(access)
    resumed.load_state_dict({"next": 2})
    assert resumed.next_block(99).rows() == [12, 13, 14]
    for _ in range(2):
        with pytest.raises(StopIteration):
            resumed.next_block(1)
