from __future__ import annotations

import numpy as np

from raydist import Dataset, Options
from raydist.pipelines.metering.iteration_meters import IterationMeters
from raydist.pipelines.metering.meter import Reading

PLAIN = Options()
PLAIN.optimization.inject_prefetch = False
PLAIN.autotune.enabled = False


def named(readings: tuple[Reading, ...]) -> dict[str, Reading]:
    return {reading.name: reading for reading in readings}


def test_one_meter_a_stage_whatever_number_of_passes() -> None:
    meters = IterationMeters()
    first = meters.meter("range-0", owner=("RangeOp",))
    assert meters.meter("range-0", owner=("RangeOp",)) is first
    assert len(meters.readings()) == 1


def test_two_stages_of_one_name_stay_apart() -> None:
    meters = IterationMeters()
    meters.meter("memory-0", owner=("RangeOp",))
    assert meters.meter("memory-0", owner=("GatherOp",)).name == "memory-0*"
    assert [reading.name for reading in meters.readings()] == ["memory-0", "memory-0*"]


def test_inputs_come_before_their_consumers() -> None:
    meters = IterationMeters()
    meters.meter("repeat-1", inputs=[7])
    meters.meter("range-0")
    meters.tops[7] = "range-0"
    assert [(reading.name, reading.inputs) for reading in meters.readings()] == [
        ("range-0", ()),
        ("repeat-1", ("range-0",)),
    ]


def test_a_stage_that_reads_itself_is_listed_once() -> None:
    meters = IterationMeters()
    meters.meter("map-1", inputs=["map-1"])
    assert len(meters.readings()) == 1


def test_an_input_that_is_not_open_yet_has_no_name() -> None:
    meters = IterationMeters()
    meters.meter("concatenate-2", inputs=[1, 2])
    assert meters.readings()[0].inputs == ()


def test_disabled_meters_read_nothing() -> None:
    meters = IterationMeters(enabled=False)
    assert meters.meter("range-0") is meters.meter("map-1")
    assert meters.readings() == ()
    assert meters.inside("range-0") is meters


def test_old_decisions_are_forgotten() -> None:
    meters = IterationMeters()
    for number in range(150):
        meters.decide(str(number))
    assert (len(meters.decisions), meters.decisions[-1]) == (100, "149")


def test_totals_can_begin_again() -> None:
    iterator = Dataset.range(100).batch(2).as_numpy_iterator()
    next(iterator)
    iterator.meters.begin_again()
    assert iterator.meters.elapsed_s == 0.0
    assert [reading.elements for reading in iterator.meters.readings()] == [0, 0]
    list(iterator)
    assert named(iterator.meters.readings())["batch-1"].elements == 49
    assert iterator.meters.elapsed_s > 0.0


def test_time_is_the_consumers_waiting_and_working() -> None:
    meters = IterationMeters()
    assert meters.elapsed_s == 0.0
    meters.consumer_asks()
    assert meters.elapsed_s > 0.0
    meters.consumer_goes()
    meters.consumer_asks()
    meters.consumer_goes()
    assert meters.elapsed_s == meters.consumer_wait_s + meters.consumer_busy_s
    assert min(meters.consumer_wait_s, meters.consumer_busy_s) > 0.0


def test_an_iteration_counts_elements_and_bytes_of_every_stage() -> None:
    dataset = Dataset.range(100).map(lambda x: x + 1).filter(lambda x: x % 2 == 0).batch(10)
    iterator = dataset.with_options(PLAIN).as_numpy_iterator()
    assert len(list(iterator)) == 5
    readings = named(iterator.meters.readings())
    counts = {name: (reading.elements, reading.bytes) for name, reading in readings.items()}
    assert counts == {"range-0": (100, 800), "map-1+filter-2": (50, 400), "batch-3": (5, 400)}
    assert readings["batch-3"].inputs == ("map-1+filter-2",)
    assert readings["map-1+filter-2"].inputs == ("range-0",)
    assert [reading.kind for reading in readings.values()] == ["source", "stage", "stage"]


def test_errors_are_counted_where_they_pass() -> None:
    iterator = Dataset.range(4).map(lambda x: 6 // (x - 1)).batch(1).ignore_errors().as_numpy_iterator()
    assert len(list(iterator)) == 3
    readings = named(iterator.meters.readings())
    assert [readings[name].errors for name in ("range-0", "map-1", "batch-2", "ignore_errors-3")] == [0, 1, 1, 0]


def test_a_pass_of_repeat_goes_on_with_the_meters() -> None:
    iterator = Dataset.range(5).repeat(3).as_numpy_iterator()
    assert len(list(iterator)) == 15
    assert [(reading.name, reading.elements) for reading in iterator.meters.readings()] == [
        ("range-0", 15),
        ("repeat-1", 15),
    ]


def test_datasets_inside_a_function_make_no_meters() -> None:
    iterator = Dataset.range(50).flat_map(lambda x: Dataset.range(int(x)).map(lambda y: y)).as_numpy_iterator()
    list(iterator)
    readings = named(iterator.meters.readings())
    assert list(readings) == ["range-0", "flat_map-1"]
    assert readings["flat_map-1"].busy_s > readings["range-0"].busy_s


def test_threads_of_datasets_inside_a_function_report_their_work() -> None:
    def dataset(x: int) -> Dataset:
        return Dataset.range(200).map(lambda y: sum(range(500)))

    iterator = Dataset.range(4).interleave(dataset, cycle_length=2, num_parallel_calls=2).as_numpy_iterator()
    list(iterator)
    reading = named(iterator.meters.readings())["interleave-1"]
    assert (reading.place, reading.parallelism, reading.kind) == ("threads", 2, "stage")
    assert reading.busy_s > 0.0
    assert reading.wait_s - reading.input_wait_s > 0.0


def test_threads_report_their_work() -> None:
    iterator = Dataset.range(4000).map(lambda x: x + 1, num_parallel_calls=2).as_numpy_iterator()
    list(iterator)
    reading = named(iterator.meters.readings())["map-1"]
    assert (reading.place, reading.parallelism, reading.buffered) == ("threads", 2, 0)
    assert reading.cpu_s > 0.0
    assert reading.busy_s > reading.handling_s > 0.0
    assert reading.buffer_limit > 1


def test_a_prefetch_shows_its_queue() -> None:
    iterator = Dataset.range(100).prefetch(8).as_numpy_iterator()
    list(iterator)
    reading = named(iterator.meters.readings())["prefetch-1"]
    assert (reading.kind, reading.elements, reading.buffer_limit) == ("prefetch", 100, 8)
    assert reading.wait_s > reading.input_wait_s == 0.0  # the input works in the other thread


def test_one_dataset_read_twice_is_counted_twice() -> None:
    source = Dataset.from_tensor_slices(np.arange(10)).map(lambda x: x)
    iterator = Dataset.zip((source, source)).as_numpy_iterator()
    list(iterator)
    readings = iterator.meters.readings()
    assert len(readings) == len({reading.name for reading in readings})
    assert named(readings)["zip-2"].elements == 10


def test_totals_go_on_after_an_engine_was_closed() -> None:
    iterator = Dataset.range(10).as_numpy_iterator()
    beginning = iterator.state_dict()
    list(iterator)
    iterator.load_state_dict(beginning)
    list(iterator)
    assert [(reading.name, reading.elements) for reading in iterator.meters.readings()] == [("range-0", 20)]
