"""Rows of an embedding table on one server: their first values, their index, their updates, their states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raydist.core.errors import InvalidArgumentError
from raydist.parameter_servers.row_index import DirectIndex, GrowingRows, HashIndex, RowIndex
from raydist.parameter_servers.row_optimizer import LazyUpdate, RowMemory
from raydist.parameter_servers.row_table import RowTable, own_rows
from raydist.parameter_servers.table_spec import EmbeddingTableSpec, first_values

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
@settings(deadline=None, max_examples=25)
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


def test_rows_that_cannot_be_are_refused() -> None:
    state: dict[str, Any] = {"rows": torch.tensor([3, 4]), "values": torch.ones(2, 3), "optimizers": {}}
    for change, why in (
        ({"rows": torch.tensor([3, -1])}, "must be below 40 and have 3 values each, got 2 rows up to"),
        ({"rows": torch.tensor([3, 40])}, "must be below 40 and have 3 values each, got 2 rows up to"),
        ({"rows": torch.tensor([3, 4]).int()}, "got their numbers as torch.int32"),
        ({"values": torch.ones(2, 1)}, r"got 2 rows and values of shape \(2, 1\)"),
    ):
        with pytest.raises(InvalidArgumentError, match=why):
            own_rows({**state, **change}, SAVED, 0, 1)
    with pytest.raises(InvalidArgumentError, match=r"must have the shape of their values, \(2, 3\), got \(2, 1\)"):
        list(own_rows(state, SAVED, 0, 1).taken(torch.ones(2, 1)))


NUM_ROWS, DIM = 30, 3

SPEC = EmbeddingTableSpec(NUM_ROWS, DIM, torch.float64, seed=1)

# torch's own steps on sparse gradients; its options are those of a group.
SPARSE: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.1}),
    (torch.optim.SparseAdam, {"lr": 0.1}),
    (torch.optim.SparseAdam, {"lr": 0.1, "betas": (0.5, 0.8), "eps": 1e-3, "maximize": True}),
]

BATCHES = st.lists(st.lists(st.integers(0, NUM_ROWS - 1), max_size=12), min_size=1, max_size=6)

ALL = torch.arange(NUM_ROWS)


def gradients(rows: list[int]) -> torch.Tensor:
    return torch.randn(len(rows), DIM, dtype=torch.float64)


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


def test_others_step_on_the_rows_at_hand_as_if_there_were_no_others() -> None:
    rows = [3, 7, 20]
    for kind in (torch.optim.Adam, torch.optim.RMSprop, torch.optim.AdamW, torch.optim.Rprop):
        table = RowTable(SPEC)
        weight = torch.nn.Parameter(table.pull(torch.tensor(rows)))
        optimizer = kind([weight], lr=0.1)
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
@settings(deadline=None, max_examples=20)
def test_steps_are_those_of_torch_on_sparse_gradients_and_go_on_with_another_number_of_servers(
    which: tuple[type[torch.optim.Optimizer], dict[str, Any]],
    batches: list[list[int]],
    before: int,
    after: int,
    more: list[list[int]],
) -> None:
    """As nn.Embedding(sparse=True) makes an optimizer step."""
    kind, options = which
    tables = [RowTable(SPEC, number, before) for number in range(before)]
    weight = torch.nn.Parameter(first_values(SPEC, ALL))
    optimizer = kind([weight], **options)

    def step(tables: list[RowTable], rows: list[int]) -> None:
        g = gradients(rows)
        push(tables, rows, g, kind, options)
        with torch.sparse.check_sparse_tensor_invariants():
            weight.grad = torch.sparse_coo_tensor(torch.tensor([rows], dtype=torch.int64), g, weight.shape)
            optimizer.step()

    for rows in batches:
        step(tables, rows)
    others = [RowTable(SPEC, number, after) for number in range(after)]
    states = [table.state() for table in tables]
    for table in others:
        table.load(states)
    assert sum(table.num_rows for table in others) == sum(table.num_rows for table in tables)
    torch.testing.assert_close(pull_all(tables), weight.data, rtol=1e-9, atol=1e-12)
    for rows in more:
        step(others, rows)
    torch.testing.assert_close(pull_all(others), weight.data, rtol=1e-9, atol=1e-12)


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


def follow(index: RowIndex, batches: list[list[int]]) -> None:
    """Do to the index what is done to a dict."""
    known: dict[int, int] = {}
    for batch in batches:
        rows = np.array(batch, np.int64)
        assert index.find(rows).tolist() == [known.get(row, -1) for row in batch]
        new = [row for row in batch if row not in known]
        places = index.add(np.array(new, np.int64))
        known.update(zip(new, places.tolist(), strict=True))
    assert index.rows().tolist() == list(known)
    assert list(known.values()) == list(range(len(known)))
    assert index.find(np.array(list(known), np.int64)).tolist() == list(known.values())


@given(st.lists(st.lists(st.integers(0, 5000), max_size=400, unique=True), max_size=8))
def test_an_index_is_a_dict(batches: list[list[int]]) -> None:
    follow(HashIndex(), [[row * 199_999 for row in batch] for batch in batches])
    follow(DirectIndex(5001), batches)


def test_rows_that_are_used_much_are_spread_over_servers() -> None:
    rows = torch.arange(10_000)  # the first ones: what a vocabulary sorted by frequency has most
    for num_servers in (1, 2, 3, 7):
        servers = EmbeddingTableSpec(10**9, 16).servers_of(rows, num_servers)
        counts = torch.bincount(servers, minlength=num_servers)
        assert counts.sum() == len(rows)
        assert counts.min() > 0.9 * len(rows) / num_servers


def test_a_row_is_what_it_is_whatever_is_made_with_it() -> None:
    rows = torch.randint(0, 10**9, (333,))
    cases: list[tuple[int, Any, torch.dtype]] = [
        (1, "normal", torch.float64),
        (3, "uniform", torch.float32),
        (16, "zeros", torch.bfloat16),
        (3, "normal", torch.bfloat16),
    ]
    for dim, initializer, dtype in cases:
        spec = EmbeddingTableSpec(10**9, dim, dtype, seed=5, initializer=initializer)
        together = first_values(spec, rows)
        assert together.shape == (333, dim)
        assert together.dtype is dtype
        assert torch.equal(first_values(spec, rows.flip(0)).flip(0), together)
        assert torch.equal(torch.cat([first_values(spec, row[None]) for row in rows]), together)


def test_first_values_are_distributed_as_they_should_be() -> None:
    values = first_values(EmbeddingTableSpec(10**9, 16, torch.float64, scale=2.0), torch.arange(20_000)) / 2
    assert abs(values.mean()) < 0.01
    assert abs(values.std() - 1) < 0.01
    assert abs((values**4).mean() - 3) < 0.1
    inside = [(values.abs() < bound).double().mean().item() for bound in (1.0, 2.0, 3.0)]
    assert inside == pytest.approx([0.6827, 0.9545, 0.9973], abs=0.003)
    assert torch.corrcoef(values.T).fill_diagonal_(0).abs().max() < 0.03  # columns
    assert torch.corrcoef(values[:16]).fill_diagonal_(0).abs().max() < 0.9  # neighbours
    uniform = first_values(EmbeddingTableSpec(10**9, 5, initializer="uniform", scale=3.0), torch.arange(20_000))
    assert uniform.abs().max() <= 3.0
    counts = torch.histc(uniform.flatten(), bins=10, min=-3, max=3) / uniform.numel()
    assert (counts - 0.1).abs().max() < 0.005


OPTIMIZERS: dict[type[torch.optim.Optimizer], tuple[set[str], set[str]]] = {
    torch.optim.Adagrad: ({"sum"}, {"step"}),
    torch.optim.ASGD: ({"ax"}, {"step", "eta", "mu"}),
    torch.optim.SGD: (set(), set()),
    torch.optim.SparseAdam: ({"exp_avg", "exp_avg_sq"}, {"step"}),
}


def options_of(kind: type[torch.optim.Optimizer], **options: Any) -> dict[str, Any]:
    group = kind([torch.nn.Parameter(torch.zeros(1))], lr=0.1, **options).param_groups[0]  # type: ignore[call-arg]
    return {name: value for name, value in group.items() if name != "params"}


def test_what_optimizers_remember() -> None:
    for kind, (rows, scalars) in OPTIMIZERS.items():
        memory = RowMemory.of(kind, options_of(kind), torch.float64)
        assert (set(memory.rows), set(memory.scalars)) == (rows, scalars), kind
        assert memory.sparse is (kind is torch.optim.SparseAdam), kind
    momentum = RowMemory.of(torch.optim.SGD, {"lr": 1.0, "momentum": 0.9}, torch.float32)
    assert set(momentum.rows) == {"momentum_buffer"}
    amsgrad = RowMemory.of(torch.optim.Adam, options_of(torch.optim.Adam, amsgrad=True), torch.float32)
    assert "max_exp_avg_sq" in amsgrad.rows
    refused: list[tuple[type[torch.optim.Optimizer], dict[str, Any], str]] = [
        (torch.optim.LBFGS, {}, "closure"),
        (torch.optim.Adafactor, {}, "row_var"),
        (torch.optim.Muon, {}, "depends on others"),
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}, "first step is of another kind"),
    ]
    for kind, options, why in refused:
        with pytest.raises(InvalidArgumentError, match=f"(?s){kind.__name__} cannot: .*{why}.*SparseAdam"):
            RowMemory.of(kind, {"lr": 1.0, **options}, torch.float32)


def growing(count: int) -> GrowingRows:
    made = GrowingRows(2, torch.float64)
    made.extend(count)
    return made


def test_options_may_change_from_step_to_step_and_state_that_is_not_used_now_has_all_rows_too() -> None:
    table = growing(1)
    update, one = LazyUpdate(table), torch.ones(1, 2, dtype=torch.float64)
    for lr, momentum in ((1.0, 0.0), (0.5, 0.0), (1.0, 0.9), (1.0, 0.8), (1.0, 0.0)):
        update.apply(torch.tensor([0]), one, torch.optim.SGD, {"lr": lr, "momentum": momentum})
        table.extend(table.count + 1)
    # 1, 0.5, then the buffer: 1 and 0.8 * 1 + 1; then 1.
    assert table.values[0].tolist() == [pytest.approx(-(1 + 0.5 + 1 + 1.8 + 1))] * 2
    assert update.state()["rows"]["momentum_buffer"][:, 0].tolist() == [pytest.approx(1.8), *[0] * (table.count - 1)]
