"""Embedding tables whose rows are divided among replicas train what one table trains; checkpoints fit elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import raydist as rd
from raydist.core.errors import CollectiveMismatchError, DataLossError, FailedPreconditionError
from raydist.replicas import state_copies
from tests.shared_strategies import KeptStrategies
from tests.strategies.test_recovery import Kill

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
    "SparseAdam": lambda model: torch.optim.SparseAdam(list(model.parameters())[:2], lr=0.1),
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
        assert float((each - other[name]).abs().max()) < 1e-9, name


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


WAYS = {
    "accumulates": (1, False),
    "keeps gradients local": (3, False),
    "loads its batches itself": (1, True),
}


@pytest.mark.parametrize("way", WAYS)
def test_accumulated_gradients_and_loops_of_replicas_give_the_same(mirrored: Mirrored, way: str) -> None:
    every, loops = WAYS[way]
    strategy = mirrored(2)
    model, optimizer = made(Tables, "Adagrad")
    data = rd.Dataset.from_tensor_slices(batches()).batch(6).take(3)
    for number, batch in enumerate(zip(*(each.split(6) for each in batches()), strict=True)):
        if number < 3:
            accumulate(model, optimizer, batch, number)
    expected = values_of(model)
    model, optimizer = scoped(strategy, "Adagrad")

    def step(batch: Any, number: int) -> None:
        context = rd.get_replica_context()
        with context.no_sync() if (number + 1) % every else contextlib.nullcontext():
            accumulate(model, optimizer, batch, number)

    def loop(iterator: Any) -> None:
        for number, batch in enumerate(iterator):
            step(batch, number)

    distributed = strategy.distribute_dataset(data)
    if loops:
        strategy.run(loop, args=(iter(distributed),))
    else:
        for number, batch in enumerate(distributed):
            strategy.run(step, args=(batch, number))
    require_close(values_of(model), expected)


def accumulate(model: Any, optimizer: torch.optim.Optimizer, batch: Any, number: int) -> None:
    """Update after three batches of 6 rows."""
    words, tags, labels = batch
    F.mse_loss(model(words, tags), labels).backward()
    if number % 3 == 2:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def test_cleared_gradients_of_no_sync_are_not_exchanged(mirrored: Mirrored) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        table = rd.ShardedEmbedding(NUM, DIM, dtype=torch.float64, initializer="zeros")
        optimizer = torch.optim.SGD(table.parameters(), lr=1.0)

    def step(set_to_none: bool) -> None:
        numbers = torch.arange(4) + 4 * rd.get_replica_context().replica_id_in_sync_group
        with rd.get_replica_context().no_sync():
            table(numbers).sum().backward()
        optimizer.zero_grad(set_to_none=set_to_none)
        table(numbers[:2]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for number, set_to_none in enumerate((True, False), 1):
        strategy.run(step, args=(set_to_none,))
        expected = -0.5 * number * torch.tensor([1, 1, 0, 0, 1, 1, 0, 0])
        with torch.no_grad():
            assert torch.equal(table(torch.arange(8))[:, 0], expected.double())


def test_an_update_exchanges_the_gradients_of_no_sync(mirrored: Mirrored) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        table = rd.ShardedEmbedding(NUM, DIM, dtype=torch.float64, initializer="zeros")
        optimizer = torch.optim.SGD(table.parameters(), lr=1.0)

    def step() -> None:
        numbers = torch.arange(2) + 2 * rd.get_replica_context().replica_id_in_sync_group
        with rd.get_replica_context().no_sync():
            table(numbers).sum().backward()
        optimizer.step()

    strategy.run(step)
    with torch.no_grad():
        assert table(torch.arange(5))[:, 0].tolist() == [-0.5, -0.5, -0.5, -0.5, 0]


def test_the_driver_reads_and_replaces_rows_of_all_replicas(mirrored: Mirrored) -> None:
    strategy = mirrored(3)
    with strategy.scope():
        table = rd.ShardedEmbedding(10**8, DIM, dtype=torch.float64, seed=1)
        frozen = rd.ShardedEmbedding(NUM, DIM, dtype=torch.float64, seed=2).requires_grad_(False)
    twin = rd.ShardedEmbedding(10**8, DIM, dtype=torch.float64, seed=1)
    numbers = torch.tensor([[7, 99_999_999, 3], [3, 7, 12_345_678]])

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        rank = rd.get_replica_context().replica_id_in_sync_group
        with torch.no_grad():
            found = table(numbers[:, : rank + 1]), frozen(torch.arange(rank))
        return found

    for rank, (found, still) in enumerate(zip(*map(strategy.local_results, strategy.run(step)), strict=True)):
        assert torch.equal(found, twin(numbers[:, : rank + 1]))
        assert still.shape == (rank, DIM)
    with torch.no_grad():
        assert torch.equal(table(numbers), twin(numbers))
    states = table.export_rows()
    assert sorted(torch.cat([state["rows"] for state in states]).tolist()) == [3, 7, 12_345_678, 99_999_999]
    assert len(states) == 3
    other = rd.ShardedEmbedding(10**8, DIM, dtype=torch.float64, seed=9)
    table.import_rows([{**state, "values": state["values"] + 1} for state in states])
    other.import_rows(table.export_rows())
    with torch.no_grad():
        assert torch.equal(table(numbers), twin(numbers) + 1)
        assert torch.equal(other(numbers), twin(numbers) + 1)
    assert table.weight.grad is None


def test_scalers_skip_a_step_on_all_replicas_and_norms_are_of_all_rows(mirrored: Mirrored) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        model: Any = nn.ModuleDict({"table": rd.ShardedEmbedding(NUM, DIM, seed=1), "out": nn.Linear(DIM, 1)})
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", 64.0)

    def step(factor: float) -> torch.Tensor:
        rank = rd.get_replica_context().replica_id_in_sync_group
        optimizer.zero_grad()
        factors = torch.tensor([factor if rank else 1.0, 1.0, 1.0, 1.0]).unsqueeze(1)  # one row, which one replica has
        loss = (model["table"](torch.arange(8 * rank, 8 * rank + 4)) * factors).sum()
        scaler.scale(loss + model["out"](torch.ones(1, DIM)).sum()).backward()
        scaler.unscale_(optimizer)
        weight: Any = model["table"].weight
        kinds = (1.0, 2.0, float("inf"))
        norms = [
            nn.utils.get_total_norm([weight.grad], kind, foreach=foreach) for kind in kinds for foreach in (False, True)
        ]
        scaler.step(optimizer)
        scaler.update()
        return torch.stack(norms)

    for norms in strategy.local_results(strategy.run(step, args=(1.0,))):  # 24 numbers of 0.5
        torch.testing.assert_close(norms, torch.tensor([12.0, 12.0, 6**0.5, 6**0.5, 0.5, 0.5]))
    before = [state["values"] for state in model["table"].export_rows()]
    for norms in strategy.local_results(strategy.run(step, args=(float("inf"),))):
        assert not norms.isfinite().any()
    assert all(map(torch.equal, before, [state["values"] for state in model["table"].export_rows()]))
    assert scaler.get_scale() == 32


def test_recomputed_activations_look_rows_up_again(mirrored: Mirrored) -> None:
    strategy = mirrored(2)
    expected, used = made(Tables, "SGD")
    words, tags, labels = batches()
    batch = words[:6], tags[:6], labels[:6]
    step_of(expected, used)(batch)
    model, optimizer = scoped(strategy, "SGD")

    def step(batch: Any) -> None:
        words, tags, labels = batch
        found = checkpoint(model, words, tags, use_reentrant=False)
        F.mse_loss(found, labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.4)
        optimizer.step()

    for each in strategy.distribute_dataset(rd.Dataset.from_tensor_slices(batch).batch(6)):
        strategy.run(step, args=(each,))
    require_close(values_of(model), values_of(expected))


@pytest.mark.parametrize("at_once", [1, 3])
def test_fit_trains_the_same_as_on_one_device(mirrored: Mirrored, at_once: int) -> None:
    found: list[dict[str, torch.Tensor]] = []
    results: list[Any] = []
    for strategy in (rd.OneDeviceStrategy("cpu"), mirrored(2)):
        with strategy.scope():
            module, optimizer = made(Tables, "Adagrad")
            model = rd.Model(module)
            model.compile(optimizer, "mse", clip_norm=0.4, steps_per_execution=at_once)
        words, tags, labels = batches()
        data = rd.Dataset.from_tensor_slices(((words, tags), labels)).batch(6)
        history = model.fit(data, epochs=2, verbose=False)
        results.append([*history.history["loss"], model.evaluate(data, verbose=False)["loss"]])
        found.append(values_of(module))
    require_close(*found)
    assert results[0] == pytest.approx(results[1], abs=1e-9)


def test_replicas_that_look_different_tables_up_are_told(mirrored: Mirrored) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        tables: Any = nn.ModuleList(rd.ShardedEmbedding(NUM, DIM, seed=seed) for seed in (1, 2))

    def touch(numbers: list[int]) -> None:
        tables[0](torch.tensor(numbers))

    strategy.run(touch, args=([1, 2, 3],))
    before = tables[0].export_rows()

    def step() -> torch.Tensor:
        found: torch.Tensor = tables[rd.get_replica_context().replica_id_in_sync_group](torch.tensor([1]))
        return found

    with pytest.raises(CollectiveMismatchError, match=r"rank 0: lookup in ShardedEmbedding\(40, 3\), variable"):
        strategy.local_results(strategy.run(step))
    strategy.run(touch, args=([2],))
    after = tables[0].export_rows()  # a step that failed takes no rows away
    assert [state["rows"].tolist() for state in after] == [state["rows"].tolist() for state in before]


def test_rows_without_a_finite_gradient_get_none_and_others_stay(mirrored: Mirrored) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        table = rd.ShardedEmbedding(NUM, DIM, initializer="zeros")
        optimizer = torch.optim.SGD(table.parameters(), lr=1.0)

    def step() -> None:
        rank = rd.get_replica_context().replica_id_in_sync_group
        (table(torch.tensor([4 + rank])) * (float("inf") if rank else 2.0)).sum().backward()
        optimizer.step()

    strategy.run(step)
    with torch.no_grad():
        assert table(torch.tensor([3, 4, 5, NUM - 1]))[:, 0].tolist() == [0, -1, -float("inf"), 0]
    assert sorted(torch.cat([state["rows"] for state in table.export_rows()]).tolist()) == [3, 4, 5, NUM - 1]


@pytest.mark.parametrize("choice", ["skip", "raise"])
def test_a_table_of_which_one_replica_has_no_finite_gradient_is_left_alone(mirrored: Mirrored, choice: Any) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        table = rd.ShardedEmbedding(NUM, DIM, dtype=torch.float64, seed=1)
        optimizer = torch.optim.SGD(table.parameters(), lr=1.0)

    def step(factor: float) -> torch.Tensor:
        rank = rd.get_replica_context().replica_id_in_sync_group
        optimizer.zero_grad()
        (table(torch.tensor([rank])) * (factor if rank else 1.0)).sum().backward()
        norm = nn.utils.clip_grad_norm_(table.parameters(), 100.0)
        optimizer.step()
        return norm

    strategy.run(step, args=(1.0,))
    before = [state["values"] for state in table.export_rows()]
    options, counts = rd.RunOptions(on_nonfinite=choice), strategy.stats()
    with pytest.raises(FailedPreconditionError, match="NaN") if choice == "raise" else contextlib.nullcontext():
        norms = strategy.local_results(strategy.run(step, args=(float("nan"),), options=options))
        assert all(map(torch.isnan, norms))
    after = strategy.stats()
    assert after.nonfinite_backwards == counts.nonfinite_backwards + 1
    assert after.skipped_updates == counts.skipped_updates + (choice == "skip")
    assert all(map(torch.equal, before, [state["values"] for state in table.export_rows()]))


@pytest.mark.parametrize("kind", ["central", "mesh"])
def test_replicas_that_cannot_divide_rows_refuse_tables(
    central: Callable[[int], rd.CentralStorageStrategy], kept: KeptStrategies, kind: str
) -> None:
    strategy = central(2) if kind == "central" else kept.get(rd.MeshStrategy, same_rows, 2)
    with strategy.scope():
        table = rd.ShardedEmbedding(NUM, DIM)
    with pytest.raises(FailedPreconditionError, match="MirroredStrategy"):
        strategy.run(lambda: table(torch.tensor([1])))


def same_rows(count: int) -> rd.MeshStrategy:
    mesh = {"shard": 1, "tensor": count}
    return rd.MeshStrategy(mesh, lambda model, mesh: None, timeouts=LIMITS, resources_per_replica=RESOURCES)


def test_gloo_exchanges_rows_between_workers(ray_cluster: None) -> None:
    expected, _ = alone(Dense, "Adagrad")
    options = rd.CommunicationOptions(implementation="gloo")
    strategy = rd.MultiWorkerMirroredStrategy(
        3, resources_per_replica=RESOURCES, timeouts=LIMITS, communication_options=options
    )
    with strategy:
        found, _ = train(strategy, "Adagrad")
        require_close(found, expected)


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


BEFORE = ["mirrored 2", "sharded 2", "process", "servers"]
OFTEN = [("mirrored 2", after) for after in PLACES] + [(before, "mirrored 2") for before in BEFORE[1:]]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(before, after, marks=() if (before, after) in OFTEN else pytest.mark.long)
        for before in BEFORE
        for after in PLACES
    ],
)
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
    rd.Checkpoint(model=model, optimizer=optimizer).restore(tmp_path / "c", only=["model", "optimizer"])
    advance(strategy, model, optimizer, range(2, 5))
    require_close(values_of(model), values_of(expected))


def anonymous_memory() -> float:
    """Return this process's own memory, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def test_memory_follows_touched_rows(mirrored: Mirrored) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        table = rd.ShardedEmbedding(10**8, 16, seed=1)  # 6.4 GB, and as much for Adagrad
        optimizer = torch.optim.Adagrad(table.parameters(), lr=0.1)

    def step(first: int) -> tuple[float, int]:
        numbers = torch.arange(first, 10**8, 1000)[:20_000] + rd.get_replica_context().replica_id_in_sync_group
        optimizer.zero_grad()
        table(numbers).square().mean().backward()
        optimizer.step()
        return anonymous_memory(), len(numbers)

    before, _ = map(strategy.local_results, strategy.run(step, args=(0,)))
    for number in range(1, 5):  # 160,000 rows more
        after, _ = map(strategy.local_results, strategy.run(step, args=(2 * number,)))
    states = table.export_rows()
    assert [len(state["rows"]) for state in states] == pytest.approx([100_000, 100_000], rel=0.02)
    row_mb = 2 * 16 * 4 / 2**20
    for one, other in zip(before, after, strict=True):
        assert other - one < 3 * 80_000 * row_mb + 30  # memory grows by half; and that of one step


def test_replicas_save_and_restore_rows_without_the_driver(
    mirrored: Mirrored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = mirrored(2)
    model, optimizer = scoped(strategy, "Adam")
    advance(strategy, model, optimizer, range(2))
    expected = values_of(model)

    def never(*args: Any) -> None:
        raise AssertionError("rows came to the driver")

    with monkeypatch.context() as patch:
        patch.setattr("raydist.mirroring.driver._MirroredRows.export_rows", never)
        patch.setattr("raydist.mirroring.driver._MirroredRows.import_rows", never)
        rd.Checkpoint(model=model, optimizer=optimizer).save(tmp_path / "c")
        advance(strategy, model, optimizer, range(2, 4))
        rd.Checkpoint(model=model, optimizer=optimizer).restore(tmp_path / "c", only=["model", "optimizer"])
    require_close(values_of(model), expected)
    assert len(list((tmp_path / "c").glob("model.embedding_rows-*-of-*.safetensors"))) == 2


def test_a_damaged_file_of_rows_changes_nothing(mirrored: Mirrored, tmp_path: Path) -> None:
    strategy = mirrored(2)
    model, optimizer = scoped(strategy, "Adam")
    advance(strategy, model, optimizer, range(2))
    rd.Checkpoint(model=model, optimizer=optimizer).save(tmp_path / "c")
    advance(strategy, model, optimizer, range(2, 4))
    expected = values_of(model)
    damaged = max((tmp_path / "c").glob("model.embedding_rows-*-of-*.safetensors"))
    content = bytearray(damaged.read_bytes())
    content[-3] ^= 64
    damaged.write_bytes(content)
    with pytest.raises(DataLossError, match=r"embedding_rows"):
        rd.Checkpoint(model=model, optimizer=optimizer).restore(tmp_path / "c", only=["model", "optimizer"])
    require_close(values_of(model), expected)


@pytest.fixture
def fragile(ray_cluster: None) -> Iterator[rd.MirroredStrategy]:
    options = rd.FailureOptions(recover=True)
    strategy = rd.MirroredStrategy(2, resources_per_replica=RESOURCES, timeouts=LIMITS, failure_options=options)
    with strategy:
        yield strategy


def test_lost_replicas_and_their_rows_come_back_from_a_copy(
    fragile: rd.MirroredStrategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_copies, "_MOST_STEPS", 2)  # so that the run passes several copies
    expected, used = made(Tables, "Adam")
    advance(None, expected, used, range(5))
    advance(None, expected, used, range(5))
    kills = [Kill("forward", 1, 1), Kill("update", 5, 0), Kill("forward", 8, 1)]
    model, optimizer = scoped(fragile, "Adam")
    plain = step_of(model, optimizer)

    def step(batch: Any, number: int) -> torch.Tensor:
        for kill in kills:
            kill.at("forward", number, tmp_path)
        norm = plain(batch)
        for kill in kills:
            kill.at("update", number, tmp_path)
        return norm

    data = rd.Dataset.from_tensor_slices(batches()).batch(6).repeat(2)
    for number, batch in enumerate(fragile.distribute_dataset(data)):
        fragile.local_results(fragile.run(step, args=(batch, number)))  # waits, so that copies are complete
    require_close(values_of(model), values_of(expected))
    failures = fragile.failures()
    assert [failure.ranks for failure in failures] == [(kill.rank,) for kill in kills]
    assert [failure.step > 0 for failure in failures] == [False, True, True]


@pytest.mark.long
def test_rows_follow_when_replicas_come_and_go(fragile: rd.MirroredStrategy) -> None:
    expected, used = made(Tables, "Adam")
    model, optimizer = scoped(fragile, "Adam")
    for number, size in enumerate([2, 3, 1, 2]):
        fragile.resize(size)
        if number:
            states = model.words.export_rows()
            assert len(states) == size
            touched = torch.cat([state["rows"] for state in states])
            assert sorted(touched.tolist()) == sorted(expected.words.export_rows()[0]["rows"].tolist())
        advance(fragile, model, optimizer, range(number, number + 1))
        advance(None, expected, used, range(number, number + 1))
    fragile._move([1], why="a test")
    advance(fragile, model, optimizer, range(4, 5))
    advance(None, expected, used, range(4, 5))
    require_close(values_of(model), values_of(expected))


def test_a_manager_saves_rows_within_a_loop_of_the_replicas(mirrored: Mirrored, tmp_path: Path) -> None:
    strategy = mirrored(2)
    expected, used = made(Tables, "Adagrad")
    advance(None, expected, used, range(3))
    model, optimizer = scoped(strategy, "Adagrad")
    plain = step_of(model, optimizer)
    advance(strategy, model, optimizer, range(1))  # the replicas have the tables
    data = rd.Dataset.from_tensor_slices(batches()).batch(6).skip(1)
    with rd.CheckpointManager(rd.Checkpoint(model=model, optimizer=optimizer), tmp_path, None) as manager:
        manager.watch()

        def loop(iterator: Any) -> None:
            for batch in iterator:
                plain(batch)
                manager.save()

        strategy.run(loop, args=(iter(strategy.distribute_dataset(data)),))
        manager.sync()
    model, optimizer = scoped(None, "Adagrad")
    path = tmp_path / "ckpt-2"  # after the second batch of the loop
    rd.Checkpoint(model=model, optimizer=optimizer).restore(path, only=["model", "optimizer"])
    require_close(values_of(model), values_of(expected))
