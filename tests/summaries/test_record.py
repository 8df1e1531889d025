from __future__ import annotations

import torch

from raydist.summaries.scalar_values import ScalarValue
from tests.summaries.records import record_of


def test_a_record_is_settled_with_what_it_shows() -> None:
    assert record_of("loss", ScalarValue(torch.tensor(2.0))).settled() == record_of("loss", 2.0)
    settled = record_of("loss", 2.0)
    assert settled.settled() is settled


def test_its_place_is_what_records_of_replicas_have_in_common() -> None:
    assert record_of("a", 1.0).place == record_of("a", 2.0).place
    assert record_of("a", 1.0).place != record_of("a", 1.0, step=1).place
