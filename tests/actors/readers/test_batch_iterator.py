"""The ways to ask for the next batch."""

from __future__ import annotations

from typing import Any, final

import pytest

from raydist.actors.readers.batch_iterator import BatchIterator
from raydist.core.errors import OutOfRangeError


@final
class Listed(BatchIterator):
    """Batches from a list."""

    def __init__(self, *batches: Any) -> None:
        self._batches = iter(batches)

    def __next__(self) -> Any:
        return next(self._batches)


def test_get_next_says_when_there_is_none() -> None:
    iterator = Listed(1)
    assert iterator.get_next() == 1
    with pytest.raises(OutOfRangeError):
        iterator.get_next()


def test_an_optional_has_a_value_or_none() -> None:
    iterator = Listed(1)
    assert iterator.get_next_as_optional().get_value() == 1
    assert not iterator.get_next_as_optional().has_value()


def test_it_is_an_iterator() -> None:
    assert list(Listed(1, 2)) == [1, 2]
