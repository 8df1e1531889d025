"""Rows of embeddings as a state: of each table once, whatever names it has."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import raydist as rd
from raydist.core.errors import InvalidArgumentError
from raydist.parameter_servers.local_rows import pending_rows, spec_of
from raydist.parameter_servers.sharded_embedding import SavedRows, ShardedEmbedding, UniqueRows


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


@pytest.mark.parametrize(("mode", "args"), CALLS)
@pytest.mark.parametrize("padding_idx", [None, int(IDS[0, 1]), -1])
def test_results_and_gradients_are_those_of_torch(mode: str, args: tuple[Any, ...], padding_idx: int | None) -> None:
    ours, reference = embedding(mode, padding_idx=padding_idx), torchs(mode, padding_idx)
    result, expected = ours(*args), reference(*args)
    assert torch.equal(result, expected)
    (result**2).sum().backward()
    (expected**2).sum().backward()
    rows, gradients = pending_rows(ours.weight) or (EVERY[:0], torch.empty(0, DIM, dtype=torch.float64))
    dense = torch.zeros(NUM, DIM, dtype=torch.float64).index_copy_(0, rows, gradients)
    torch.testing.assert_close(dense, reference.weight.grad, rtol=1e-12, atol=1e-14)
    assert set(rows.tolist()) == set(args[0].flatten().tolist()) - {ours.padding_idx}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
        (torch.optim.SparseAdam, {"lr": 0.1}),
    ],
)
def test_training_is_that_of_sparse_embeddings(kind: Any, options: dict[str, Any]) -> None:
    ours, reference = embedding("mean"), torchs("mean", sparse=True)
    for module in (ours, reference):
        torch.manual_seed(0)
        optimizer = kind(module.parameters(), **options)
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_results_of_another_dtype(dtype: torch.dtype) -> None:
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


def test_the_seed_is_drawn_as_all_else_is() -> None:
    made = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        made.append(ShardedEmbedding(NUM, DIM)(EVERY))
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: ShardedEmbedding(0, 3), "num_embeddings must be an integer >= 1, got 0"),
        (lambda: ShardedEmbedding(3, 2.5), "embedding_dim must be an integer >= 1, got 2.5"),  # type: ignore[arg-type]
        (lambda: ShardedEmbedding(3, 2, "max"), "mode must be one of none, sum, mean, got 'max'"),  # type: ignore[arg-type]
        (lambda: ShardedEmbedding(3, 2, initializer="ones"), "initializer must be one of"),  # type: ignore[arg-type]
        (lambda: ShardedEmbedding(3, 2, padding_idx=3), "padding_idx must be one of the 3 rows, got 3"),
        (lambda: ShardedEmbedding(3, 2, dtype=torch.int64), "dtype must be a floating point one"),
        (lambda: embedding()(IDS, torch.tensor([0])), 'must be given with bags only, .* mode="none"'),
        (lambda: embedding("sum")(IDS[0]), r"must be 2-D, or 1-D with offsets; got shape \(4,\) without offsets"),
        (lambda: embedding("sum")(IDS, torch.tensor([0])), r"got shape \(7, 4\) with offsets"),
        (lambda: embedding("mean")(IDS, None, torch.ones(7, 4)), 'with mode="sum" only, got mode="mean"'),
        (lambda: embedding()(torch.tensor([3, 20])), r"between 0 and 19 \(num_embeddings=20\), got 20 at \[1\]"),
    ],
)
def test_what_cannot_be_meant_is_refused(make: Any, why: str) -> None:
    with pytest.raises(InvalidArgumentError, match=why):
        make()


def test_on_one_device_rows_lie_in_the_process() -> None:
    strategy = rd.OneDeviceStrategy("cpu")
    with strategy.scope():
        ours = embedding("mean")
        optimizer = torch.optim.SGD(ours.parameters(), lr=1.0)

    def step(ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = ours(ids).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = [strategy.run(step, args=(IDS,)).item() for _ in range(3)]
    assert losses == sorted(losses, reverse=True)


class Words(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.deep = nn.ModuleList([rd.ShardedEmbedding(50, 2, seed=seed), nn.Linear(2, 1)])
        self.same = self.deep[0]


def test_each_table_is_there_once_and_its_rows_come_back() -> None:
    one, other = Words(1), Words(2)
    row = one.same(torch.tensor([3, 7]))
    state = SavedRows(one).state_dict()
    assert list(state) == ["deep.0/0"]
    SavedRows(other).load_state_dict(state)
    assert torch.equal(other.same(torch.tensor([3, 7])), row)
    assert not SavedRows(nn.Linear(1, 1))
    assert SavedRows(one)
