"""Embedding tables whose rows are divided among replicas train what one table trains; checkpoints fit elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import raydist as rd
from tests.shared_strategies import KeptStrategies

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

LIMITS = rd.Timeouts(start_s=60, collective_s=20, step_s=60, close_s=5)
RESOURCES = {"CPU": 0.01}
NUM, DIM = 40, 3
Mirrored = Callable[[int], rd.MirroredStrategy]


class Tables(nn.Module):
    """Two tables, one of them of bags, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = rd.ShardedEmbedding(NUM, DIM, dtype=torch.float64, seed=3)
        self.tags = rd.ShardedEmbedding(NUM, DIM, "mean", dtype=torch.float64, seed=4, padding_idx=0)
        self.out = nn.Linear(2 * DIM, 1, dtype=torch.float64)

    def forward(self, words: torch.Tensor, tags: torch.Tensor) -> Any:
        return self.out(torch.cat([self.words(words), self.tags(tags)], 1)).squeeze(1)


class Dense(Tables):
    """The same as ordinary embeddings, with the same initial values."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            words, tags = self.words(torch.arange(NUM)), self.tags(torch.arange(NUM).view(-1, 1))
        self.words: Any = nn.Embedding(NUM, DIM, _weight=words)
        self.tags: Any = nn.EmbeddingBag(NUM, DIM, mode="mean", padding_idx=0, _weight=tags)


def batches() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """26 rows, in batches of 6 and one of 2: of three replicas one has none. Numbers repeat, within bags too."""
    generator = torch.Generator().manual_seed(5)
    words = torch.randint(0, 12, (26,), generator=generator)
    tags = torch.randint(0, 9, (26, 4), generator=generator)
    return words, tags, torch.randn(26, dtype=torch.float64, generator=generator)


Optimizers = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizers] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.5),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.3),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.1),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.1),
    "SparseAdam": lambda model: torch.optim.SparseAdam([model.words.weight, model.tags.weight], lr=0.1),
}


def values_of(model: Any) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        words, tags = model.words(torch.arange(NUM)), model.tags(torch.arange(NUM).view(-1, 1))
    return {"words": words, "tags": tags, "out": model.out.weight.detach().clone()}


def made(kind: type[Tables], optimizer: str) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(2)
    model = kind()
    return model, OPTIMIZERS[optimizer](model)


def step_of(model: Any, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
    def step(batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        words, tags, labels = batch
        optimizer.zero_grad()
        F.mse_loss(model(words, tags), labels).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.4)
        optimizer.step()
        return norm

    return step


def alone(kind: type[Tables], optimizer: str) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    model, used = made(kind, optimizer)
    step = step_of(model, used)
    norms = [step(batch) for batch in zip(*(each.split(6) for each in batches()), strict=True)]
    return values_of(model), norms


def train(strategy: rd.Strategy, optimizer: str) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    with strategy.scope():
        model, used = made(Tables, optimizer)
    step = step_of(model, used)
    data = strategy.distribute_dataset(rd.Dataset.from_tensor_slices(batches()).batch(6))
    norms = [strategy.run(step, args=(batch,)) for batch in data]
    return values_of(model), [torch.stack([*strategy.local_results(norm)]) for norm in norms]


def require_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name, each in one.items():
        torch.testing.assert_close(each, other[name], rtol=0, atol=1e-9, msg=lambda told, name=name: f"{name}: {told}")


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_divided_rows_train_what_one_table_trains(mirrored: Mirrored, optimizer: str, count: int) -> None:
    kind = Dense if optimizer in ("SGD", "Adagrad") else Tables  # others leave rows without a gradient alone
    expected, expected_norms = alone(kind, optimizer)
    found, norms = train(mirrored(count), optimizer)
    require_close(found, expected)
    for of_replicas, norm in zip(norms, expected_norms, strict=True):
        torch.testing.assert_close(of_replicas, norm.expand(len(of_replicas)), rtol=0, atol=1e-9)


def advance(strategy: rd.Strategy | None, model: Any, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    step = step_of(model, optimizer)
    every = list(zip(*(each.split(6) for each in batches()), strict=True))
    for number in numbers:
        if strategy is None:
            step(every[number])
        elif isinstance(strategy, rd.ParameterServerStrategy):
            strategy.run(step, args=(every[number],)).get()
        else:
            data = rd.Dataset.from_tensor_slices(every[number]).batch(6)
            for batch in strategy.distribute_dataset(data):
                strategy.run(step, args=(batch,))


def scoped(strategy: rd.Strategy | None, optimizer: str) -> tuple[Any, torch.optim.Optimizer]:
    if strategy is None:
        return made(Tables, optimizer)
    with strategy.scope():
        return made(Tables, optimizer)


PLACES = ["process", "one device", "mirrored 1", "mirrored 2", "mirrored 3", "sharded 2", "servers"]


@pytest.fixture
def place(
    mirrored: Mirrored, kept: KeptStrategies, served: Callable[[int], rd.ParameterServerStrategy]
) -> Callable[[str], rd.Strategy | None]:
    def find(name: str) -> rd.Strategy | None:
        kind, _, number = name.partition(" ")
        match kind:
            case "mirrored":
                return mirrored(int(number))
            case "sharded":
                return kept.get(rd.ShardedStrategy, sharded, 2)
            case "servers":
                return served(2)
        return rd.OneDeviceStrategy("cpu") if kind == "one" else None

    return find


def sharded(count: int) -> rd.ShardedStrategy:
    return rd.ShardedStrategy(count, 1, timeouts=LIMITS, resources_per_replica=RESOURCES)


@pytest.mark.parametrize("after", PLACES)
@pytest.mark.parametrize("before", ["mirrored 2", "sharded 2", "process", "servers"])
def test_checkpoints_fit_other_numbers_of_replicas_servers_and_one_device(
    place: Callable[[str], rd.Strategy | None], tmp_path: Path, before: str, after: str
) -> None:
    expected, used = made(Tables, "Adam")
    advance(None, expected, used, range(5))
    strategy = place(before)
    model, optimizer = scoped(strategy, "Adam")
    advance(strategy, model, optimizer, range(2))
    rd.Checkpoint(model=model, optimizer=optimizer).save(tmp_path / "c")
    advance(strategy, model, optimizer, range(2, 3))  # which must not be in the checkpoint
    strategy = place(after)
    model, optimizer = scoped(strategy, "Adam")
    advance(strategy, model, optimizer, range(4, 5))
    rd.Checkpoint(model=model, optimizer=optimizer).restore(tmp_path / "c")
    advance(strategy, model, optimizer, range(2, 5))
    require_close(values_of(model), values_of(expected))
