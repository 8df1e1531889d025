from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from raydist.parameter_servers.rows.local_rows import (
    attach_access,
    mark_of,
    mark_table,
    reading_rows,
    row_access,
    spec_of,
)
from raydist.parameter_servers.rows.table_spec import EmbeddingTableSpec


class Nowhere:
    def pull(self, weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return torch.empty(0, 2)

    def export_rows(self, weight: torch.Tensor) -> list[dict[str, Any]]:
        return []

    def import_rows(self, weight: torch.Tensor, states: Sequence[Mapping[str, Any]]) -> None: ...


def test_who_runs_a_step_says_where_rows_are() -> None:
    outer, inner = Nowhere(), Nowhere()
    assert row_access() is None
    with reading_rows(outer):
        with reading_rows(inner):
            assert row_access() is inner
        assert row_access() is outer
    assert row_access() is None


def test_a_parameter_stands_for_a_table() -> None:
    weight, other = torch.nn.Parameter(torch.empty(0, 2)), torch.nn.Parameter(torch.empty(0, 2))
    spec = EmbeddingTableSpec(10, 2)
    mark_table(weight, spec)
    assert spec_of(weight) == spec
    assert spec_of(other) is None
    assert mark_of(other) is None


def test_rows_that_lie_elsewhere_are_not_kept_here() -> None:
    weight = torch.nn.Parameter(torch.empty(0, 2))
    mark = mark_table(weight, EmbeddingTableSpec(10, 2))
    mark.local = Nowhere()
    there = Nowhere()
    attach_access(weight, there)
    assert mark.access is there
    assert mark.local is None
