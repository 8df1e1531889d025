from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import raydist as rd
from raydist.actors.epochs.input_pipeline import InputMetrics


class Taken:
    def __init__(self) -> None:
        self.total: Counter[str] = Counter()
        self.fills: dict[str, float] = {}

    def raise_by(self, amounts: Mapping[str, float]) -> None:
        self.total.update(amounts)

    def set(self, value: float, tags: Mapping[str, str]) -> None:
        self.fills[tags["stage"]] = value


def stats_after(batches: int) -> rd.PipelineStats:
    data = rd.Dataset.range(2 * batches).batch(2).prefetch(2)
    list(data)
    return data.stats()


def test_each_pass_counts_what_it_has_done_since() -> None:
    taken = Taken()
    metrics = InputMetrics("input", taken, taken)
    metrics.update("a", stats_after(3), 0.5)
    metrics.update("a", stats_after(5), 0.75)
    metrics.update("b", stats_after(2), 1.0)
    assert taken.total["raydist_input_batches"] == 7
    assert taken.total["raydist_input_bytes"] == taken.total["raydist_input_bytes_here"] == 7 * 16
    assert taken.total["raydist_input_wait_seconds"] == 1.75
    assert taken.fills.keys() == {"prefetch-2"}
    metrics.forget("a")
    metrics.update("a", stats_after(1), 0.0)
    assert taken.total["raydist_input_batches"] == 8
