from __future__ import annotations

import pickle

from raydist.summaries.order import SummaryOrder


def test_an_order_travels() -> None:
    order = SummaryOrder("writer", 3, wanted=False)
    assert pickle.loads(pickle.dumps(order)) == order
