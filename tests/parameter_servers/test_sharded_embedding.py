"""Embeddings whose rows exist once they are touched: in one process, as a state, and the gradients of rows."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from raydist.core.errors import InvalidArgumentError
from raydist.parameter_servers.local_rows import (
    LocalRows,
    RowGradient,
    access_to,
    add_row_gradient,
    attach_access,
    mark_table,
    pending_rows,
    reading_rows,
    spec_of,
)
from raydist.parameter_servers.row_table import RowTable
from raydist.parameter_servers.sharded_embedding import ShardedEmbedding, UniqueRows
from raydist.parameter_servers.table_spec import EmbeddingTableSpec
from raydist.pickling.pickler import dumps


@given(st.lists(st.integers(0, 9)), st.none() | st.integers(0, 9))
def test_every_number_finds_its_row(numbers: list[int], padding: int | None) -> None:
    found = UniqueRows.of(torch.tensor(numbers, dtype=torch.int64), 10, padding)
    rows = found.rows.tolist()
    assert rows == sorted(set(numbers) - {padding})
    assert found.padded is (padding in numbers)
    assert [[*rows, padding][place] for place in found.places.tolist()] == numbers


NUM, DIM = 20, 3

EVERY = torch.arange(NUM)


def embedding(mode: Any = "none", **options: Any) -> ShardedEmbedding:
    return ShardedEmbedding(NUM, DIM, mode, dtype=torch.float64, seed=3, **options)


def values(module: ShardedEmbedding) -> torch.Tensor:
    """All rows."""
    twin = ShardedEmbedding(NUM, DIM, dtype=torch.float64)
    twin.import_rows(module.export_rows())
    known = module.export_rows()[0]["rows"]
    rows: torch.Tensor = embedding()(EVERY).detach()
    rows[known] = twin(known).detach()
    return rows


def torchs(mode: str, padding_idx: int | None = None, sparse: bool = False) -> Any:
    """torch's own, with the same first values."""
    first = embedding()(EVERY).detach()
    if padding_idx is not None:
        first[padding_idx] = 0
    if mode == "none":
        return nn.Embedding(NUM, DIM, padding_idx, sparse=sparse, dtype=torch.float64, _weight=first)
    options: dict[str, Any] = {"mode": mode, "padding_idx": padding_idx, "sparse": sparse}
    return nn.EmbeddingBag(NUM, DIM, dtype=torch.float64, _weight=first, **options)


IDS = torch.randint(0, NUM, (7, 4), generator=torch.Generator().manual_seed(0))

CALLS: list[tuple[str, tuple[Any, ...]]] = [
    ("none", (IDS,)),
    ("none", (IDS[0, 0],)),
    ("none", (IDS[:0],)),
    ("sum", (IDS,)),
    ("mean", (IDS,)),
    ("mean", (IDS[0], torch.tensor([0, 1, 1]))),
    ("sum", (IDS[0], torch.tensor([0, 1, 1]))),
    ("sum", (IDS, None, torch.linspace(-1, 1, 28, dtype=torch.float64).reshape(7, 4))),
    ("sum", (IDS[:0], None)),
]


def test_results_and_gradients_are_those_of_torch() -> None:
    for (mode, args), padding_idx in itertools.product(CALLS, (None, int(IDS[0, 1]), -1)):
        case = f"{mode}, {args}, {padding_idx}"
        ours, reference = embedding(mode, padding_idx=padding_idx), torchs(mode, padding_idx)
        result, expected = ours(*args), reference(*args)
        assert torch.equal(result, expected), case
        (result**2).sum().backward()
        (expected**2).sum().backward()
        rows, gradients = pending_rows(ours.weight) or (EVERY[:0], torch.empty(0, DIM, dtype=torch.float64))
        dense = torch.zeros(NUM, DIM, dtype=torch.float64).index_copy_(0, rows, gradients)
        assert torch.allclose(dense, reference.weight.grad, rtol=1e-12, atol=1e-14), case
        assert set(rows.tolist()) == set(args[0].flatten().tolist()) - {ours.padding_idx}, case


def test_training_is_that_of_sparse_embeddings() -> None:
    kinds: list[Any] = [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
        lambda p: torch.optim.SparseAdam(p, lr=0.1),
    ]
    for kind in kinds:
        ours, reference = embedding("mean"), torchs("mean", sparse=True)
        for module in (ours, reference):
            torch.manual_seed(0)
            optimizer = kind(module.parameters())
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            for step in range(12):
                weights = torch.randn(4, DIM, dtype=torch.float64)
                for _ in range(2):  # accumulated; the bag's rows occur in both
                    (module(torch.randint(0, NUM, (4, 3))) * weights).pow(2).sum().backward()
                with torch.sparse.check_sparse_tensor_invariants():
                    optimizer.step()
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                scheduler.step()
        torch.testing.assert_close(values(ours), reference.weight.detach(), rtol=1e-9, atol=1e-12)


def test_what_is_frozen_has_no_gradient() -> None:
    ours = embedding()
    with torch.no_grad():
        assert not ours(IDS).requires_grad
    ours.weight.requires_grad_(False)
    assert not ours(IDS).requires_grad
    assert ours.weight.grad is None


def test_results_of_another_dtype() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        ours = ShardedEmbedding(NUM, DIM, seed=3)
        rows = ours(EVERY)
        optimizer = torch.optim.SGD(ours.to(dtype).parameters(), lr=1.0)
        result = ours(EVERY)
        assert result.dtype is dtype
        result.sum().backward()
        optimizer.step()
        assert torch.equal(ours.float()(EVERY), rows - 1)  # rows are what they were made as


def test_copies_and_pickles_have_rows_of_their_own() -> None:
    ours = embedding()
    optimizer = torch.optim.Adagrad(ours.parameters(), lr=0.1)
    ours(EVERY).pow(2).sum().backward()
    optimizer.step()
    trained = values(ours)
    buffer = io.BytesIO()
    torch.save(ours, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), torch.load(buffer, weights_only=False)):
        assert spec_of(twin.weight) == spec_of(ours.weight)
        assert torch.equal(values(twin), trained)
        twin(EVERY).sum().backward()
        torch.optim.Adagrad(twin.parameters(), lr=0.1).step()
        assert not torch.equal(values(twin), trained)
    assert torch.equal(values(ours), trained)


def test_states_hold_a_handle_and_rows_travel_apart() -> None:
    ours, other = embedding(), embedding()
    optimizer = torch.optim.Adagrad(ours.parameters(), lr=0.1)
    ours(IDS).pow(2).sum().backward()
    optimizer.step()
    assert {name: tuple(value.shape) for name, value in ours.state_dict().items()} == {"weight": (0, DIM)}
    other.load_state_dict(ours.state_dict())
    buffer = io.BytesIO()
    torch.save(ours.export_rows(), buffer)
    buffer.seek(0)
    other.import_rows(torch.load(buffer))
    assert torch.equal(values(other), values(ours))
    for module, stepped in ((ours, optimizer), (other, torch.optim.Adagrad(other.parameters(), lr=0.1))):
        module.zero_grad()
        module(IDS).pow(2).sum().backward()
        stepped.step()
    assert torch.equal(values(other), values(ours))


def test_what_cannot_be_meant_is_refused() -> None:
    new: Any = ShardedEmbedding
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: new(0, 3), "num_embeddings must be an integer >= 1, got 0"),
        (lambda: new(3, 2.5), "embedding_dim must be an integer >= 1, got 2.5"),
        (lambda: new(3, 2, "max"), "mode must be one of none, sum, mean, got 'max'"),
        (lambda: new(3, 2, initializer="ones"), "initializer must be one of"),
        (lambda: new(3, 2, padding_idx=3), "padding_idx must be one of the 3 rows, got 3"),
        (lambda: new(3, 2, dtype=torch.int64), "dtype must be a floating point one"),
        (lambda: embedding()(IDS, torch.tensor([0])), 'must be given with bags only, .* mode="none"'),
        (lambda: embedding("sum")(IDS[0]), r"must be 2-D, or 1-D with offsets; got shape \(4,\) without offsets"),
        (lambda: embedding("sum")(IDS, torch.tensor([0])), r"got shape \(7, 4\) with offsets"),
        (lambda: embedding("mean")(IDS, None, torch.ones(7, 4)), 'with mode="sum" only, got mode="mean"'),
        (lambda: embedding()(torch.tensor([3, 20])), r"between 0 and 19 \(num_embeddings=20\), got 20 at \[1\]"),
    ]
    for make, why in cases:
        with pytest.raises(InvalidArgumentError, match=why):
            make()


SPEC = EmbeddingTableSpec(10, 2, torch.float64, initializer="zeros")

TWO_ROWS = torch.tensor([3, 7])

ONES = torch.ones(2, 2, dtype=torch.float64)


def table() -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.empty(0, 2, dtype=torch.float64))
    mark_table(weight, SPEC)
    return weight


def row_values(weight: torch.nn.Parameter) -> list[float]:
    return access_to(weight).pull(weight, TWO_ROWS)[:, 0].tolist()


def test_steps_reach_tables_and_all_else() -> None:
    weight, other, dense = table(), table(), torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    groups: list[dict[str, Any]] = [{"params": [dense, weight]}, {"params": [other], "lr": 10.0}]
    optimizer = torch.optim.SGD(groups, lr=1.0, momentum=0.9)
    for step in range(2):
        row_values(weight), row_values(other)
        optimizer.zero_grad()
        dense.grad = torch.ones_like(dense)
        add_row_gradient(weight, TWO_ROWS, ONES.clone())
        if step == 0:
            add_row_gradient(other, TWO_ROWS[:1], ONES[:1].clone())
        optimizer.step()
    assert dense.item() == pytest.approx(-2.9)
    assert row_values(weight) == pytest.approx([-2.9, -2.9])
    assert row_values(other) == [-10, 0]
    assert pending_rows(weight) is not None  # it stays until zero_grad, as all gradients do


def test_a_step_with_a_closure() -> None:
    weight = table()
    row_values(weight)
    for optimizer in (torch.optim.SGD([weight], lr=1.0), torch.optim.SparseAdam([weight], lr=1.0)):

        def closure(optimizer: Any = optimizer) -> float:
            optimizer.zero_grad()
            add_row_gradient(weight, TWO_ROWS, ONES.clone())
            return 3.0

        assert optimizer.step(closure) == 3.0
    assert row_values(weight) == pytest.approx([-2, -2])


def test_an_optimizer_that_cannot_step_on_rows_changes_nothing() -> None:
    weight, dense = table(), torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    row_values(weight)
    dense.grad = torch.ones_like(dense)
    optimizer = torch.optim.SGD([weight, dense], lr=1.0, momentum=0.9, dampening=0.5)
    with pytest.raises(InvalidArgumentError, match="SGD cannot"):
        optimizer.step()
    assert dense.item() == 0


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_compiled_steps_go_on_beside_a_table() -> None:
    """The hooks of a process that has a table are around the steps of all its optimizers."""
    row_values(table())
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend="eager")
    def step() -> None:
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()

    before = model.bias.item()
    step()
    assert model.bias.item() == pytest.approx(before - 0.2)


def bare_weight(*gradients: tuple[list[int], list[float]]) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.empty(0, 2, dtype=torch.float64))
    for rows, numbers in gradients:
        add_row_gradient(weight, torch.tensor(rows), pairs(*numbers))
    return weight


def pairs(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)[:, None].expand(-1, 2).contiguous()


def as_dict(parameter: torch.nn.Parameter) -> dict[int, list[float]]:
    pending = pending_rows(parameter)
    assert pending is not None
    assert pending[0].tolist() == sorted(set(pending[0].tolist()))
    return dict(zip(pending[0].tolist(), pending[1].tolist(), strict=True))


def test_clipping_counts_rows_as_the_values_that_they_are() -> None:
    for others in (False, True):
        parameter, dense = bare_weight(([1, 4], [1, 2]), ([1], [1])), torch.nn.Parameter(torch.zeros(3).double())
        dense.grad = torch.ones_like(dense)
        expected = torch.cat([dense.grad.clone(), pairs(2, 2).flatten()][not others :]).norm()
        norm = torch.nn.utils.clip_grad_norm_([dense, parameter] if others else [parameter], 0.5)
        assert norm == pytest.approx(float(expected))
        scaled = pytest.approx([2 * 0.5 / float(expected)] * 2, rel=1e-5)
        assert as_dict(parameter) == {1: scaled, 4: scaled}
    parameter = bare_weight(([1, 4], [1, -7]))
    torch.nn.utils.clip_grad_value_([parameter], 0.5)
    assert as_dict(parameter) == {1: [0.5, 0.5], 4: [-0.5, -0.5]}


def test_a_scaler_sees_infinities_and_divides() -> None:
    parameter = bare_weight()
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for value, found in ((8.0, 0.0), (float("inf"), 1.0)):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(1))
        optimizer.zero_grad()
        add_row_gradient(parameter, torch.tensor([1]), pairs(value))
        scaler.unscale_(optimizer)
        assert as_dict(parameter) == {1: [value / 4] * 2}
        assert sum(scaler._found_inf_per_device(optimizer).values()) == found


def test_zero_grad_drops_it() -> None:
    for set_to_none, foreach in itertools.product((False, True), repeat=2):
        parameter, dense = bare_weight(([1], [1])), torch.nn.Parameter(torch.zeros(3))
        dense.grad = torch.ones(3)
        optimizer = torch.optim.SGD([parameter, dense], lr=1.0, foreach=foreach)
        optimizer.zero_grad(set_to_none=set_to_none)
        pending = pending_rows(parameter)
        assert pending is None if set_to_none else pending is not None and len(pending[0]) == len(pending[1]) == 0
        assert dense.grad is None or not dense.grad.any()
        add_row_gradient(parameter, torch.tensor([2]), pairs(5))
        assert as_dict(parameter) == {2: [5, 5]}


def test_copies_are_their_own() -> None:
    parameter = bare_weight(([2], [5]))
    assert parameter.grad is not None
    twins = [copy.deepcopy(parameter.grad), pickle.loads(pickle.dumps(parameter.grad)), parameter.grad.clone()]
    assert pickle.loads(dumps(parameter.grad.detach(), lambda _: None)).joined()[0].tolist() == [2]
    for twin in twins:
        assert isinstance(twin, RowGradient)
        twin.mul_(2)
        assert twin.joined()[1].tolist() == [[10, 10]]
    assert as_dict(parameter) == {2: [5, 5]}


def test_whoever_runs_a_step_goes_first() -> None:
    weight, there, driver = table(), LocalRows(RowTable(SPEC)), LocalRows(RowTable(SPEC))
    attach_access(weight, driver)
    assert access_to(weight) is driver
    with reading_rows(there):
        assert access_to(weight) is there
