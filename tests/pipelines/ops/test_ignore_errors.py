from __future__ import annotations

import logging

import pytest

from raydist.core.values import UNKNOWN_CARDINALITY
from raydist.dataset import Dataset

INVERSE = Dataset.from_tensor_slices([1, 2, 0, 4, 5]).map(lambda x: 1 / int(x))


def test_before_a_batch_and_behind_it() -> None:
    before = [batch.tolist() for batch in INVERSE.ignore_errors().batch(2)]
    assert before == [[1, 0.5], [0.25, pytest.approx(0.2)]]
    behind = [batch.tolist() for batch in INVERSE.batch(2).ignore_errors()]
    assert behind == [[1, 0.5], [pytest.approx(0.2)]]


def test_errors_are_logged_on_request(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="raydist"):
        assert len(list(INVERSE.ignore_errors())) == 4
        assert not caplog.records
        assert len(list(INVERSE.ignore_errors(log_warning=True))) == 4
    (record,) = caplog.records
    assert "left out an element: ZeroDivisionError" in record.getMessage()
    assert "element 2 of its input" in record.getMessage()


def test_cardinality() -> None:
    assert Dataset.range(5).ignore_errors().cardinality() == UNKNOWN_CARDINALITY
    assert Dataset.range(5).repeat().ignore_errors().cardinality() == UNKNOWN_CARDINALITY
