from __future__ import annotations

import pytest

from raydist.dataset import Dataset
from raydist.errors import FailedPreconditionError, InvalidArgumentError


@pytest.mark.parametrize("method", ["shuffle", "repeat", "take", "skip", "enumerate", "assert_cardinality"])
def test_counts_are_whole_numbers(method: str) -> None:
    with pytest.raises(InvalidArgumentError, match="must be a whole number, got 2.5"):
        getattr(Dataset.range(4), method)(2.5)


def test_a_global_shuffle_needs_elements_that_can_be_read_by_index() -> None:
    with pytest.raises(FailedPreconditionError, match="read by their index, got filter"):
        Dataset.range(4).filter(lambda x: True).global_shuffle()
