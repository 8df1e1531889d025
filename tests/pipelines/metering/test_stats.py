"""Statistics: rates, who waits for whom, the bottleneck, and their text."""

from __future__ import annotations

from raydist import Dataset
from raydist.pipelines.metering.iteration_meters import IterationMeters
from raydist.pipelines.metering.meter import Reading
from raydist.pipelines.metering.stats import (
    CONSUMER,
    HANDING_OVER,
    PipelineStats,
    StageStats,
    find_bottleneck,
    quantity,
    render,
    stats_of,
    summarise,
    threads_of,
)
from tests.contracts.op import collect, iterate
from tests.pipelines.storing_executor import StoringExecutor

SOURCE = Reading("range-0", "range(9)", kind="source", elements=100, bytes=800, bytes_here=800, busy_s=1.0)

MAP = Reading(
    "map-1",
    "map(f)",
    ("range-0",),
    elements=100,
    bytes=400,
    bytes_here=400,
    errors=3,
    busy_s=6.5,
    handling_s=0.5,
    cpu_s=3.0,
    wait_s=7.0,
    input_wait_s=1.0,
    parallelism=2,
    buffer_limit=8,
    mean_buffered=6.0,
    place="threads",
)

PREFETCH = Reading(
    "prefetch-2", "prefetch(4)", ("map-1",), kind="prefetch", wait_s=1.0, buffer_limit=4, mean_buffered=4.0, elements=50
)


def stage(stats: PipelineStats, name: str) -> StageStats:
    return next(stage for stage in stats.stages if stage.name == name)


def test_rates_shares_and_who_waits_for_whom() -> None:
    stats = summarise([SOURCE, MAP, PREFETCH], elapsed_s=10.0, consumer_busy_s=9.0)
    mapped = stage(stats, "map-1")
    assert (mapped.elements_per_s, mapped.bytes_per_s, mapped.errors) == (10.0, 40.0, 3)
    assert (mapped.busy, mapped.cpu, mapped.queue_fill) == (0.325, 0.5, 0.75)
    assert stage(stats, "range-0").cpu is None
    assert (stats.elements, stats.consumer_waited) == (50, 0.1)
    waits = [(row.name, row.waits_for, row.waiting) for row in stats.stages]
    assert waits == [("range-0", "map-1", 0.9), ("map-1", "its workers", 0.6), ("prefetch-2", "consumer", 0.9)]


def test_the_slowest_of_several_inputs_is_named() -> None:
    slow = Reading("map-1", "map", busy_s=5.0)
    zipped = Reading("zip-2", "zip", ("range-0", "map-1"), input_wait_s=6.0, wait_s=6.0)
    assert stage(summarise([SOURCE, slow, zipped], elapsed_s=7.0), "zip-2").waits_for == "map-1"
    empty = Reading("prefetch-2", "prefetch(4)", ("map-1",), kind="prefetch", wait_s=8.0)
    assert stage(summarise([MAP, empty], elapsed_s=10.0), "prefetch-2").waits_for == "map-1"


def test_the_bottleneck_and_why() -> None:
    stats = summarise([SOURCE, MAP], elapsed_s=4.0)
    assert (stats.bottleneck, stats.because) == ("map-1", "its 2 threads: busy 75 % of the time")
    stats = summarise([SOURCE], elapsed_s=4.0, consumer_busy_s=3.0)
    assert stats.bottleneck == "consumer"
    assert stats.because == "75 % of the work of the consumer's thread, which was busy 100 % of the time"
    alone = summarise([Reading("range-0", "range", busy_s=1.0)], elapsed_s=2.0)
    assert alone.because == "the consumer's thread: busy 50 % of the time"


def test_the_text_shows_stages_bottleneck_and_decisions() -> None:
    text = str(summarise([SOURCE, MAP], elapsed_s=4.0, decisions=["map-1: 1 -> 2 threads, it was busy"]))
    lines = text.splitlines()
    assert lines[0] == "100 elements in 4.00 s, 25 a second; the consumer waited 100 % of the time."
    assert lines[3].split()[:2] == ["range-0", "inline"]
    assert "2 threads" in lines[4]
    assert lines[-2].startswith("Bottleneck: map-1 (its 2 threads: busy")
    assert lines[-1] == "Autotune: map-1: 1 -> 2 threads, it was busy"


def test_nothing_ran() -> None:
    assert stats_of(None) == stats_of(IterationMeters()) == PipelineStats()
    assert str(stats_of(None)) == "Nothing has run yet: iterate over the dataset first."
    assert summarise([SOURCE], elapsed_s=0.0).stages[0].elements_per_s == 0.0


def test_an_iterator_tells_while_it_runs() -> None:
    iterator = Dataset.range(50_000).map(lambda x: x + 1).batch(10).as_numpy_iterator()
    assert iterator.stats() == PipelineStats()
    next(iterator)
    begun = iterator.stats()
    list(iterator)
    ended = iterator.stats()
    assert 1 <= begun.elements < ended.elements == 5000
    assert 0.0 < begun.elapsed_s < ended.elapsed_s
    assert ended.bottleneck in {"range-0", "map-1", "batch-2", "consumer", "handing over"}


def test_bytes_that_stay_with_workers_are_told() -> None:
    dataset = Dataset.range(40).map(lambda x: x).shuffle(5, seed=1).batch(4)
    iterator = iterate(dataset, StoringExecutor)
    collect(iterator)
    stats = iterator.stats()
    assert [(each.bytes, each.bytes_here) for each in stats.stages[:4]] == [(320, 320), (320, 0), (320, 0), (320, 0)]
    assert "shuffle-2: 100 % of 0.0 MB stayed with input workers." in str(stats)
    list(dataset)
    assert "stayed" not in str(dataset.stats())


ONE_SECOND = Reading("range-0", "range", kind="source", busy_s=1.0)
TWO_SECONDS = Reading("map-1", "map", ("range-0",), busy_s=2.0)
AHEAD = Reading("prefetch-2", "prefetch", ("map-1",), kind="prefetch", busy_s=0.1)
BATCH = Reading("batch-3", "batch", ("prefetch-2",), busy_s=2.5)


def test_who_is_the_bottleneck() -> None:
    stages = [ONE_SECOND, TWO_SECONDS, AHEAD, BATCH]
    found = find_bottleneck(stages)  # stages of one thread count together
    assert (found.name, found.where, found.busy_s, found.share) == ("map-1", "the thread of prefetch-2", 3.0, 2 / 3)
    found = find_bottleneck(stages, consumer_busy_s=0.5, convert_s=0.4)
    assert (found.name, found.where) == ("batch-3", "the consumer's thread")
    assert find_bottleneck([ONE_SECOND], consumer_busy_s=9.0).name == CONSUMER
    assert find_bottleneck([ONE_SECOND], convert_s=9.0).name == HANDING_OVER
    parallel = Reading("map-1", "map", ("range-0",), busy_s=8.5, handling_s=0.5, parallelism=4, place="actors")
    found = find_bottleneck([ONE_SECOND, parallel])  # workers share their work
    assert (found.name, found.where, found.busy_s, found.share) == ("map-1", "its 4 actors", 2.0, 1.0)
    found = find_bottleneck([Reading("range-0", "range", busy_s=3.0), parallel])
    assert (found.name, found.where, found.busy_s) == ("range-0", "the consumer's thread", 3.5)
    zipped = Reading("zip-5", "zip", ("batch-3", "range-4"))
    threads = threads_of([*stages, Reading("range-4", "range"), zipped])
    assert {threads[name] for name in ("range-0", "map-1")} == {"the thread of prefetch-2"}
    assert {threads[name] for name in ("prefetch-2", "batch-3", "range-4", "zip-5")} == {"the consumer's thread"}


def test_quantities_have_three_digits_and_words_stand_to_the_left() -> None:
    numbers = [0.0, 0.1234, 999, 999.7, 12_345, 5e6, 2.5e9]
    assert [quantity(number) for number in numbers] == ["0", "0.123", "999", "1 k", "12.3 k", "5 M", "2.5 G"]
    rows = [("range-0", "inline", "1 M", "8.0", "3 %", "", "", "map-1 (9 %)", "range(5)")]
    rows.append(("map-1+filter-2", "2 threads", "12.5 M", "0.1", "100 %", "90 %", "5 %", "", "map(f)"))
    assert render(rows) == [
        "stage           where      elements/s  MB/s   busy   cpu  queue  waits for    operation",
        "range-0         inline            1 M   8.0    3 %               map-1 (9 %)  range(5)",
        "map-1+filter-2  2 threads      12.5 M   0.1  100 %  90 %    5 %               map(f)",
    ]
