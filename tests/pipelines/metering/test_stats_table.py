from __future__ import annotations

import pytest

from raydist.pipelines.metering.stats import percent, quantity, render


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.0, "0"), (0.1234, "0.123"), (999, "999"), (999.7, "1 k"), (12_345, "12.3 k"), (5e6, "5 M"), (2.5e9, "2.5 G")],
)
def test_quantities_have_three_digits(number: float, text: str) -> None:
    assert quantity(number) == text


def test_shares_are_whole_percentages() -> None:
    assert [percent(share) for share in (0.0, 0.004, 0.5, 1.0)] == ["0 %", "0 %", "50 %", "100 %"]


def test_words_stand_to_the_left_and_numbers_to_the_right() -> None:
    rows = [("range-0", "inline", "1 M", "8.0", "3 %", "", "", "map-1 (9 %)", "range(5)")]
    rows.append(("map-1+filter-2", "2 threads", "12.5 M", "0.1", "100 %", "90 %", "5 %", "", "map(f)"))
    assert render(rows) == [
        "stage           where      elements/s  MB/s   busy   cpu  queue  waits for    operation",
        "range-0         inline            1 M   8.0    3 %               map-1 (9 %)  range(5)",
        "map-1+filter-2  2 threads      12.5 M   0.1  100 %  90 %    5 %               map(f)",
    ]


def test_only_the_headings_without_stages() -> None:
    assert len(render([])) == 1
