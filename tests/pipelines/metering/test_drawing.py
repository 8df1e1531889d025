from __future__ import annotations

from xml.etree import ElementTree

from raydist.pipelines.metering.meter import Reading
from raydist.pipelines.metering.stats import PipelineStats, summarise
from raydist.pipelines.run.profile import draw

SOURCE = Reading("range-0", "range(9)", kind="source", elements=9, busy_s=1.0)
OTHER = Reading("range-1", "range(9)", kind="source", elements=9, busy_s=1.0)
MAP = Reading("map-2", "map(<lambda>)", ("range-1",), elements=9, busy_s=6.0, parallelism=2, place="threads")
ZIP = Reading("zip-3", "zip", ("range-0", "map-2"), elements=9)
AHEAD = Reading("prefetch-4", "prefetch(4)", ("zip-3",), kind="prefetch", elements=9, buffer_limit=4, mean_buffered=1.0)
STATS = summarise([SOURCE, OTHER, MAP, ZIP, AHEAD], elapsed_s=10.0, consumer_busy_s=2.0)


def boxes(stats: PipelineStats) -> dict[str, list[str]]:
    """The texts of each box, by its name, from above to below."""
    root = ElementTree.fromstring(draw(stats))
    found = {}
    for box in root.iter("div"):
        if box.get("class", "").startswith("box"):
            texts = ["".join(part.itertext()) for part in box.iter("p")]
            found[texts[0].removeprefix("▲ bottleneck")] = [*texts, *(bar.get("style", "") for bar in box.iter("i"))]
    return found


def test_inputs_stand_above_their_readers_and_the_consumer_at_the_end() -> None:
    assert list(boxes(STATS)) == ["range-0", "range-1", "map-2", "zip-3", "prefetch-4", "consumer"]


def test_the_bottleneck_is_marked() -> None:
    found = boxes(STATS)
    assert [name for name, texts in found.items() if texts[0] != name] == ["map-2"]
    assert found["consumer"][1] == "waited 80 % of the time"


def test_a_slow_consumer_is_marked() -> None:
    found = boxes(summarise([SOURCE], elapsed_s=9.0, consumer_busy_s=8.0))
    assert found["consumer"][0] == "▲ bottleneckconsumer"
    handing = boxes(summarise([SOURCE], elapsed_s=9.0, convert_s=8.0))["consumer"]
    assert handing[0] == "▲ bottleneckconsumer"
    assert handing[2] == "handing elements over takes longest"


def test_bars_show_work_or_what_is_in_the_queue() -> None:
    filled = {name: texts[-1] for name, texts in boxes(STATS).items()}
    assert (filled["range-0"], filled["map-2"], filled["prefetch-4"]) == ("width:10%", "width:30%", "width:25%")


def test_a_dataset_that_two_branches_read_is_drawn_once() -> None:
    left = Reading("map-1", "map", ("range-0",))
    right = Reading("map-2", "map", ("range-0",))
    drawn = draw(summarise([SOURCE, left, right, Reading("zip-3", "zip", ("map-1", "map-2"))], elapsed_s=1.0))
    assert drawn.count('<div class="box') == 5
    assert drawn.count("range-0") == 2  # the second branch names it


def test_nothing_ran() -> None:
    assert "waited 0 %" in draw(summarise([], elapsed_s=0.0))
