"""A server's rows among those that others had: found and taken piece by piece as in one go."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raydist.core.errors import InvalidArgumentError
from raydist.parameter_servers.rows.row_table import RowTable, own_rows
from raydist.parameter_servers.rows.table_spec import EmbeddingTableSpec

SAVED = EmbeddingTableSpec(40, 3, torch.float64)


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
    found = [RowTable(SAVED, number, num_servers) for number in range(num_servers)]
    numbers = torch.tensor(rows)
    servers = SAVED.servers_of(numbers, num_servers)
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
        whole, pieces = RowTable(SAVED, number, after), RowTable(SAVED, number, after)
        whole.load(states)
        pieces.load([cut(state, size) for state in states])
        torch.testing.assert_close(pieces.state(), whole.state(), rtol=0, atol=0)


def test_what_has_no_rows_of_a_server_is_not_read_and_all_else_to_its_end() -> None:
    states = [cut(table.state(), 3) for table in tables(list(range(40)), 2)]
    RowTable(SAVED, 0, 2).load(states)
    assert [state["values"].num_read for state in states] == [len(states[0]["values"].whole), 0]
    RowTable(SAVED, 1, 3).load(states)  # some of each
    assert states[1]["values"].num_read == len(states[1]["values"].whole)


@pytest.mark.parametrize("number", [-1, 40])
def test_rows_that_cannot_be_are_refused(number: int) -> None:
    state: dict[str, Any] = {"rows": torch.tensor([3, number]), "values": torch.ones(2, 3), "optimizers": {}}
    with pytest.raises(InvalidArgumentError, match="must be below 40 and have 3 values each, got 2 rows up to"):
        own_rows(state, SAVED, 0, 1)
    with pytest.raises(InvalidArgumentError, match="got their numbers as torch.int32"):
        own_rows({**state, "rows": state["rows"].int()}, SAVED, 0, 1)
    with pytest.raises(InvalidArgumentError, match=r"got 2 rows and values of shape \(2, 1\)"):
        own_rows({**state, "values": torch.ones(2, 1)}, SAVED, 0, 1)
    own = own_rows({**state, "rows": torch.tensor([3, 4])}, SAVED, 0, 1)
    with pytest.raises(InvalidArgumentError, match=r"must have the shape of their values, \(2, 3\), got \(2, 1\)"):
        list(own.taken(torch.ones(2, 1)))


NUM_ROWS, DIM = 30, 3
SPEC = EmbeddingTableSpec(NUM_ROWS, DIM, torch.float64, seed=1)
# torch's own steps on sparse gradients; its options are those of a group.
SPARSE: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.1}),
    (torch.optim.SparseAdam, {"lr": 0.1}),
]
BATCHES = st.lists(st.lists(st.integers(0, NUM_ROWS - 1), max_size=12), min_size=1, max_size=6)
ALL = torch.arange(NUM_ROWS)


def gradients(rows: list[int]) -> torch.Tensor:
    return torch.randn(len(rows), DIM, dtype=torch.float64)


def torch_step(weight: torch.nn.Parameter, optimizer: torch.optim.Optimizer, rows: list[int], g: torch.Tensor) -> None:
    """What nn.Embedding(sparse=True) hands to an optimizer."""
    with torch.sparse.check_sparse_tensor_invariants():
        weight.grad = torch.sparse_coo_tensor(torch.tensor([rows], dtype=torch.int64), g, weight.shape)
        optimizer.step()


def pull_all(tables: list[RowTable]) -> torch.Tensor:
    servers = SPEC.servers_of(ALL, len(tables))
    values = torch.empty(NUM_ROWS, DIM, dtype=torch.float64)
    for number, table in enumerate(tables):
        values[servers == number] = table.pull(ALL[servers == number])
    return values


def push(tables: list[RowTable], rows: list[int], g: torch.Tensor, kind: Any, options: dict[str, Any]) -> None:
    servers = SPEC.servers_of(torch.tensor(rows, dtype=torch.int64), len(tables))
    for number, table in enumerate(tables):
        table.push(torch.tensor(rows, dtype=torch.int64)[servers == number], g[servers == number], kind, options)


@given(which=st.sampled_from(SPARSE), batches=BATCHES, num_servers=st.integers(1, 3))
@settings(deadline=None, max_examples=60)
def test_steps_are_those_of_torch_on_sparse_gradients(
    which: tuple[type[torch.optim.Optimizer], dict[str, Any]], batches: list[list[int]], num_servers: int
) -> None:
    kind, options = which
    tables = [RowTable(SPEC, number, num_servers) for number in range(num_servers)]
    weight = torch.nn.Parameter(pull_all(tables))
    optimizer = kind([weight], **options)
    for rows in batches:
        g = gradients(rows)
        push(tables, rows, g, kind, options)
        torch_step(weight, optimizer, rows, g)
    torch.testing.assert_close(pull_all(tables), weight.data, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RMSprop, torch.optim.AdamW, torch.optim.Rprop])
def test_others_step_on_the_rows_at_hand_as_if_there_were_no_others(kind: type[torch.optim.Optimizer]) -> None:
    table, rows = RowTable(SPEC), [3, 7, 20]
    weight = torch.nn.Parameter(table.pull(torch.tensor(rows)))
    optimizer = kind([weight], lr=0.1)  # type: ignore[call-arg]
    options = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    before = table.pull(ALL)
    for _ in range(5):
        weight.grad = gradients(rows)
        table.push(torch.tensor(rows), weight.grad.clone(), kind, options)
        optimizer.step()
    torch.testing.assert_close(table.pull(torch.tensor(rows)), weight.data, rtol=1e-9, atol=1e-12)
    others = [row for row in range(NUM_ROWS) if row not in rows]
    assert torch.equal(table.pull(ALL)[others], before[others])


@given(which=st.sampled_from(SPARSE), batches=BATCHES, before=st.integers(1, 4), after=st.integers(1, 4), more=BATCHES)
@settings(deadline=None, max_examples=40)
def test_rows_go_on_with_another_number_of_servers(
    which: tuple[type[torch.optim.Optimizer], dict[str, Any]],
    batches: list[list[int]],
    before: int,
    after: int,
    more: list[list[int]],
) -> None:
    kind, options = which
    tables = [RowTable(SPEC, number, before) for number in range(before)]
    for rows in batches:
        push(tables, rows, gradients(rows), kind, options)
    states = [table.state() for table in tables]
    others = [RowTable(SPEC, number, after) for number in range(after)]
    for table in others:
        table.load(states)
    assert sum(table.num_rows for table in others) == sum(table.num_rows for table in tables)
    for rows in more:
        g = gradients(rows)
        push(tables, rows, g, kind, options)
        push(others, rows, g, kind, options)
    torch.testing.assert_close(pull_all(others), pull_all(tables), rtol=1e-12, atol=1e-14)


def test_rows_are_what_they_are_in_whatever_order_they_are_touched() -> None:
    rows = torch.tensor([5, 1, 29, 5])
    one, other = RowTable(SPEC), RowTable(SPEC)
    together = one.pull(rows)
    for row in rows.flip(0):
        other.pull(row[None])
    assert torch.equal(other.pull(rows), together)
    assert one.num_rows == other.num_rows == 3
    together.zero_()  # memory of its own
    assert torch.equal(one.pull(rows), other.pull(rows))


def test_a_table_is_as_large_as_what_was_touched() -> None:
    """10^9 rows, drawn by a power law: rows, their numbers and the way to them, and what Adagrad remembers."""
    spec = EmbeddingTableSpec(10**9, 16)
    table = RowTable(spec)
    drawn = torch.distributions.Pareto(torch.tensor(1.0), torch.tensor(0.2))
    for _ in range(30):
        rows = torch.unique(drawn.sample((4096,)).long().clamp(max=10**9 - 1))
        table.push(rows, table.pull(rows), torch.optim.SGD, {"lr": 0.1})
        assert table.num_bytes <= 3 * table.num_rows * spec.row_bytes
    assert table.num_rows > 10_000
    table.push(rows, table.pull(rows), torch.optim.Adagrad, {"lr": 0.1})
    assert table.num_bytes <= 3 * table.num_rows * spec.row_bytes


def test_what_does_not_belong_together_is_refused() -> None:
    tables = [RowTable(SPEC, number, 2) for number in range(2)]
    push(tables, list(range(NUM_ROWS)), gradients(list(range(NUM_ROWS))), torch.optim.Adagrad, {"lr": 0.1})
    whole = [table.state() for table in tables]
    table = RowTable(SPEC)
    table.pull(torch.tensor([4]))
    for states, why in (
        ([whole[0], whole[0]], "must be in one of the states"),
        ([whole[0], {**whole[1], "optimizers": {}}], "must hold what torch.optim.adagrad.Adagrad remembers"),
        ([{**whole[0], "values": whole[0]["values"][:, :2]}], "must be below 30 and have 3 values each"),
        ([{**whole[0], "rows": whole[0]["rows"] + 30}], "got .* rows up to"),
    ):
        with pytest.raises(InvalidArgumentError, match=why):
            table.load(states)
    table.load(whole)
    assert torch.equal(table.pull(ALL), pull_all(tables))


def test_an_optimizer_that_needs_all_rows_is_refused_before_anything_changes() -> None:
    table, rows = RowTable(SPEC), torch.tensor([1, 2])
    before = table.pull(rows)
    with pytest.raises(InvalidArgumentError, match="LBFGS cannot"):
        table.require_optimizer(torch.optim.LBFGS, {"lr": 1.0})
    with pytest.raises(InvalidArgumentError, match="LBFGS cannot"):
        table.push(rows, torch.ones(2, DIM), torch.optim.LBFGS, {"lr": 1.0})
    assert torch.equal(table.pull(rows), before)


def test_a_rule_for_rows_leaves_none_out() -> None:
    for num_servers in (2, 3):
        tables = [RowTable(SPEC, number, num_servers) for number in range(num_servers)]
        pull_all(tables)
        held = [table.state()["rows"].tolist() for table in tables]
        assert sorted(itertools.chain(*held)) == list(range(NUM_ROWS))
