from __future__ import annotations

from raydist.pipelines.metering.meter import Reading
from raydist.pipelines.metering.stats import CONSUMER, HANDING_OVER, find_bottleneck, threads_of

SOURCE = Reading("range-0", "range", kind="source", busy_s=1.0)
MAP = Reading("map-1", "map", ("range-0",), busy_s=2.0)
PREFETCH = Reading("prefetch-2", "prefetch", ("map-1",), kind="prefetch", busy_s=0.1)
BATCH = Reading("batch-3", "batch", ("prefetch-2",), busy_s=2.5)


def test_nothing_ran() -> None:
    assert find_bottleneck([]).name == ""


def test_stages_of_one_thread_count_together() -> None:
    found = find_bottleneck([SOURCE, MAP, PREFETCH, BATCH])
    assert (found.name, found.where, found.busy_s) == ("map-1", "the thread of prefetch-2", 3.0)
    assert found.share == 2 / 3


def test_the_consumers_thread_does_more_than_the_stages() -> None:
    found = find_bottleneck([SOURCE, MAP, PREFETCH, BATCH], consumer_busy_s=0.5, convert_s=0.4)
    assert (found.name, found.where) == ("batch-3", "the consumer's thread")
    assert find_bottleneck([SOURCE], consumer_busy_s=9.0).name == CONSUMER
    assert find_bottleneck([SOURCE], convert_s=9.0).name == HANDING_OVER


def test_workers_share_their_work() -> None:
    parallel = Reading("map-1", "map", ("range-0",), busy_s=8.5, handling_s=0.5, parallelism=4, place="actors")
    found = find_bottleneck([SOURCE, parallel])
    assert (found.name, found.where, found.busy_s, found.share) == ("map-1", "its 4 actors", 2.0, 1.0)
    found = find_bottleneck([Reading("range-0", "range", busy_s=3.0), parallel])
    assert (found.name, found.where, found.busy_s) == ("range-0", "the consumer's thread", 3.5)


def test_threads_begin_at_a_prefetch() -> None:
    other = Reading("range-4", "range")
    zipped = Reading("zip-5", "zip", ("batch-3", "range-4"))
    threads = threads_of([SOURCE, MAP, PREFETCH, BATCH, other, zipped])
    assert {threads[name] for name in ("range-0", "map-1")} == {"the thread of prefetch-2"}
    assert {threads[name] for name in ("prefetch-2", "batch-3", "range-4", "zip-5")} == {"the consumer's thread"}
