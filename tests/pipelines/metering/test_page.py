from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from raydist.pipelines.metering.meter import Reading
from raydist.pipelines.metering.stats import PipelineStats, summarise
from raydist.pipelines.run.profile import render_page

READINGS = (
    Reading(
        "range-0", "range(9)", kind="source", elements=2_000_000, bytes=8 * 10**6, bytes_here=8 * 10**6, busy_s=0.5
    ),
    Reading(
        "map-1", "map(a.py:3 <lambda>)", ("range-0",), errors=7, busy_s=3.0, cpu_s=1.5, wait_s=0.5, input_wait_s=0.5
    ),
    Reading("prefetch-2", "prefetch(4)", ("map-1",), kind="prefetch", wait_s=3.0, buffer_limit=4, mean_buffered=3.0),
)
STATS = summarise(READINGS, elapsed_s=4.0, decisions=["map-1: 1 -> 2 threads <because> it was busy"])
_VOID = {"meta"}


class Page(HTMLParser):
    """Checks that tags are closed, and collects what a reader sees."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.seen: list[str] = []
        self.cells: list[list[str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in _VOID:
            self.open.append(tag)
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open and data.strip():
            self.seen.append(data)
            if {"td", "th"} & set(self.open):
                self.cells[-1][-1] += data


@pytest.fixture
def page() -> Page:
    return Page(render_page(STATS, title="Profile of <Dataset>", notes=["Two <epochs>."]))


def test_text_is_escaped_and_shown(page: Page) -> None:
    assert page.seen.count("Profile of <Dataset>") == 2
    for text in (
        "Two <epochs>.",
        STATS.headline,
        "map-1: 1 -> 2 threads <because> it was busy",
        "map(a.py:3 <lambda>)",
    ):
        assert text in page.seen


def test_the_table_has_a_row_for_each_stage(page: Page) -> None:
    head, *rows = page.cells
    assert head == ["stage", "where", "elements/s", "MB/s", "busy", "CPU", "queue", "errors", "waits for"]
    assert rows[0] == ["range-0range(9)", "inline", "500 k", "2.0", "12 %", "", "", "", "map-1 (88 %)"]
    assert rows[1][4:8] == ["75 %", "50 %", "", "7"]
    assert rows[2][6] == "75 %"


def test_the_bottleneck_is_marked_in_words_graph_and_table(page: Page) -> None:
    assert "▲ Bottleneck: " in page.seen
    assert "▲ bottleneck" in page.seen
    assert ("class", "marked") in page.attributes
    assert ("class", "box marked") in page.attributes


def test_it_needs_nothing_else(page: Page) -> None:
    assert not {name for name, _ in page.attributes} & {"src", "href", "srcset", "data", "onclick", "onload"}
    text = render_page(STATS, title="x")
    assert "http" not in text
    assert "@import" not in text
    assert re.findall(r"url\((?!#)", text) == []


def test_it_suits_dark_rooms_and_phones(page: Page) -> None:
    assert "prefers-color-scheme: dark" in render_page(STATS, title="x")
    assert ("name", "viewport") in page.attributes
    assert page.attributes.count(("class", "wide")) == 2  # what is wider than a phone scrolls in its own box


def test_nothing_ran() -> None:
    page = Page(render_page(PipelineStats(), title="x"))
    assert "Nothing was changed while it ran." in page.seen
    assert not any("Bottleneck" in text for text in page.seen)
