"""What follows from the rows of a batch."""

from __future__ import annotations

import pytest

from raydist.replicas.batch_rows import BatchRows, weights_of


@pytest.mark.parametrize(
    ("rows", "weights"),
    [((3, 1), (0.75, 0.25)), ((2, 0), (1.0, 0.0)), ((0, 0), (0.5, 0.5)), (None, (0.5, 0.5))],
)
def test_weights_are_shares_of_rows(rows: tuple[int, ...] | None, weights: tuple[float, ...]) -> None:
    assert weights_of(rows, 2) == weights
    assert BatchRows.of(rows, 2, padding=True).shares == weights


@pytest.mark.parametrize(
    ("rows", "padding", "standing_in", "present"),
    [
        ((3, 1), True, (False, False), (True, True)),
        ((2, 0), True, (False, True), (True, False)),
        ((2, 0), False, (False, False), (True, True)),
        # Of a batch without rows there is nothing to work on: all count, as none does.
        ((0, 0), True, (True, True), (True, True)),
        (None, True, (False, False), (True, True)),
    ],
)
def test_who_has_no_rows_stands_in_and_does_not_count(
    rows: tuple[int, ...] | None, padding: bool, standing_in: tuple[bool, ...], present: tuple[bool, ...]
) -> None:
    batch = BatchRows.of(rows, 2, padding=padding)
    assert (batch.padding, batch.present, batch.all_present) == (standing_in, present, all(present))
