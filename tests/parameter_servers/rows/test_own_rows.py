"""A server's rows among those that others had: found and taken piece by piece as in one go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raydist.errors import InvalidArgumentError
from raydist.parameter_servers.rows.row_table import RowTable, own_rows
from raydist.parameter_servers.rows.table_spec import EmbeddingTableSpec

SPEC = EmbeddingTableSpec(40, 3, torch.float64)


class Cut:
    """A tensor that comes in pieces; counts those that were asked for."""

    def __init__(self, whole: torch.Tensor, size: int) -> None:
        self.whole, self.size, self.num_read = whole, size, 0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.whole.shape)

    def pieces(self) -> Iterator[torch.Tensor]:
        for piece in self.whole.split(self.size):
            self.num_read += len(piece)
            yield piece


def cut(state: Any, size: int) -> Any:
    if isinstance(state, dict):
        return {key: cut(part, size) for key, part in state.items()}
    return Cut(state, size) if isinstance(state, torch.Tensor) and state.dim() else state


def tables(rows: list[int], num_servers: int) -> list[RowTable]:
    """With these rows, which Adam has stepped on."""
    found = [RowTable(SPEC, number, num_servers) for number in range(num_servers)]
    numbers = torch.tensor(rows)
    servers = SPEC.servers_of(numbers, num_servers)
    for table in found:
        mine = numbers[servers == table._server]
        table.push(mine, torch.sin(mine.double())[:, None].expand(-1, 3), torch.optim.Adam, {"lr": 0.1})
    return found


@given(
    rows=st.lists(st.integers(0, 39), unique=True, min_size=1),
    before=st.integers(1, 3),
    after=st.integers(1, 3),
    size=st.integers(1, 8),
)
@settings(deadline=None, max_examples=40)
def test_what_comes_in_pieces_makes_the_same_table(rows: list[int], before: int, after: int, size: int) -> None:
    states = [table.state() for table in tables(rows, before)]
    for number in range(after):
        whole, pieces = RowTable(SPEC, number, after), RowTable(SPEC, number, after)
        whole.load(states)
        pieces.load([cut(state, size) for state in states])
        torch.testing.assert_close(pieces.state(), whole.state(), rtol=0, atol=0)


def test_what_has_no_rows_of_a_server_is_not_read_and_all_else_to_its_end() -> None:
    states = [cut(table.state(), 3) for table in tables(list(range(40)), 2)]
    RowTable(SPEC, 0, 2).load(states)
    assert [state["values"].num_read for state in states] == [len(states[0]["values"].whole), 0]
    RowTable(SPEC, 1, 3).load(states)  # some of each
    assert states[1]["values"].num_read == len(states[1]["values"].whole)


@pytest.mark.parametrize("number", [-1, 40])
def test_rows_that_cannot_be_are_refused(number: int) -> None:
    state: dict[str, Any] = {"rows": torch.tensor([3, number]), "values": torch.ones(2, 3), "optimizers": {}}
    with pytest.raises(InvalidArgumentError, match="must be below 40 and have 3 values each, got 2 rows up to"):
        own_rows(state, SPEC, 0, 1)
    with pytest.raises(InvalidArgumentError, match="got their numbers as torch.int32"):
        own_rows({**state, "rows": state["rows"].int()}, SPEC, 0, 1)
    with pytest.raises(InvalidArgumentError, match=r"got 2 rows and values of shape \(2, 1\)"):
        own_rows({**state, "values": torch.ones(2, 1)}, SPEC, 0, 1)
    own = own_rows({**state, "rows": torch.tensor([3, 4])}, SPEC, 0, 1)
    with pytest.raises(InvalidArgumentError, match=r"must have the shape of their values, \(2, 3\), got \(2, 1\)"):
        list(own.taken(torch.ones(2, 1)))
