from __future__ import annotations

import pytest

from raydist.core.errors import InvalidArgumentError
from raydist.dataset import Dataset
from raydist.pipelines.run.optional import Optional


def test_an_element_or_none() -> None:
    iterator = Dataset.range(1).as_numpy_iterator()
    first = iterator.get_next_as_optional()
    assert first.has_value()
    assert first.get_value() == 0
    last = iterator.get_next_as_optional()
    assert not last.has_value()
    with pytest.raises(InvalidArgumentError, match="has no value"):
        last.get_value()
    assert (repr(Optional.from_value(3)), repr(last)) == ("Optional(3)", "Optional.empty()")
