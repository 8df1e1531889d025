from __future__ import annotations

import itertools
from xml.etree import ElementTree

from raydist.pipelines.metering.page import draw, drawn_stages, lay_out
from raydist.pipelines.metering.reading import Reading
from raydist.pipelines.metering.stats import summarise

SOURCE = Reading("range-0", "range(9)", kind="source", elements=9, busy_s=1.0)
OTHER = Reading("range-1", "range(9)", kind="source", elements=9, busy_s=1.0)
MAP = Reading("map-2", "map(<lambda>)", ("range-1",), elements=9, busy_s=6.0, parallelism=2, place="threads")
ZIP = Reading("zip-3", "zip", ("range-0", "map-2"), elements=9)
AHEAD = Reading("prefetch-4", "prefetch(4)", ("zip-3",), kind="prefetch", elements=9, buffer_limit=4, mean_buffered=1.0)
STATS = summarise([SOURCE, OTHER, MAP, ZIP, AHEAD], elapsed_s=10.0, consumer_busy_s=2.0)


def test_the_bottleneck_is_marked_and_the_consumer_stands_at_the_end() -> None:
    nodes = drawn_stages(STATS)
    assert [node.name for node in nodes if node.marked] == ["map-2"]
    assert (nodes[-1].name, nodes[-1].inputs, nodes[-1].lines) == (
        "consumer",
        ("prefetch-4",),
        ("waited 80 % of the time",),
    )


def test_a_slow_consumer_is_marked() -> None:
    nodes = drawn_stages(summarise([SOURCE], elapsed_s=9.0, consumer_busy_s=8.0))
    assert [node.marked for node in nodes] == [False, True]
    handing = drawn_stages(summarise([SOURCE], elapsed_s=9.0, convert_s=8.0))[-1]
    assert handing.marked
    assert handing.lines[1] == "handing elements over takes longest"


def test_bars_show_work_or_what_is_in_the_queue() -> None:
    filled = {node.name: node.filled for node in drawn_stages(STATS)}
    assert (filled["range-0"], filled["map-2"], filled["prefetch-4"]) == (0.1, 0.3, 0.25)


def test_inputs_stand_above_their_readers_and_no_box_covers_another() -> None:
    nodes = drawn_stages(STATS)
    corners = lay_out(nodes)
    for node in nodes:
        assert all(corners[name][1] < corners[node.name][1] for name in node.inputs)
    for (x1, y1), (x2, y2) in itertools.combinations(corners.values(), 2):
        assert abs(x1 - x2) >= 280 or abs(y1 - y2) >= 84


def test_a_dataset_that_two_branches_read_is_drawn_once() -> None:
    left = Reading("map-1", "map", ("range-0",))
    right = Reading("map-2", "map", ("range-0",))
    stats = summarise([SOURCE, left, right, Reading("zip-3", "zip", ("map-1", "map-2"))], elapsed_s=1.0)
    corners = lay_out(drawn_stages(stats))
    assert len(corners) == 5
    assert corners["map-1"][1] == corners["map-2"][1] != corners["range-0"][1]


def test_a_dataset_stands_above_the_longest_of_its_branches() -> None:
    branches = [Reading("map-1", "map", ("range-0",)), Reading("map-2", "map", ("range-0",))]
    branches += [Reading("map-3", "map", ("map-2",)), Reading("zip-4", "zip", ("map-1", "map-3"))]
    corners = lay_out(drawn_stages(summarise([SOURCE, *branches], elapsed_s=1.0)))
    assert corners["range-0"][1] < corners["map-2"][1] < corners["map-3"][1] < corners["zip-4"][1]


def test_the_drawing_is_well_formed() -> None:
    root = ElementTree.fromstring(draw(STATS))
    texts = [element.text for element in root.iter() if element.text and element.text.strip()]
    assert "map(<lambda>)" in texts
    assert texts.count("▲ bottleneck") == 1
    assert len([path for path in root.iter("path") if path.get("class") == "arrow"]) == 5


def test_nothing_ran() -> None:
    assert "waited 0 %" in draw(summarise([], elapsed_s=0.0))


def test_long_names_are_cut() -> None:
    drawn = draw(summarise([Reading("map-1", "f" * 99)], elapsed_s=1.0))
    assert "f" * 37 + "…" in drawn
    assert "f" * 38 + "…" not in drawn
