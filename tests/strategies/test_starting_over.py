"""Replicas are killed whose state no other replica has: all of them start again from a copy, and nothing is lost."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import raydist as rd
from raydist.replicas import state_copies
from tests.strategies.test_recovery import PROGRAMS, Fragile, Kill, same, train

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

Strategy = rd.MirroredStrategy | rd.CentralStorageStrategy | rd.MultiWorkerMirroredStrategy

LIMITS = rd.Timeouts(start_s=60, collective_s=15, step_s=60, close_s=5)
OPTIONS = rd.FailureOptions(recover=True)


def make(kind: str) -> Any:
    name, _, number = kind.partition(" ")
    cls: Any = {
        "mirrored": rd.MirroredStrategy,
        "central": rd.CentralStorageStrategy,
        "workers": rd.MultiWorkerMirroredStrategy,
    }[name]
    return cls(int(number), resources_per_replica={"CPU": 0.01}, timeouts=LIMITS, failure_options=OPTIONS)


@pytest.fixture
def strategy(ray_cluster: None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Strategy]:
    monkeypatch.setattr(state_copies, "_MOST_STEPS", 4)  # so that a test passes several copies
    with make(request.param) as strategy:
        yield strategy


@pytest.mark.parametrize(
    ("strategy", "program", "kills"),
    [
        ("mirrored 1", "convolutions", [("forward", 3, 0), ("update", 12, 0)]),
        ("central 2", "convolutions", [("forward", 2, 1), ("update", 9, 0)]),
        pytest.param("central 2", "accumulation", [("end", 4, 0), ("end", 9, 1)], marks=pytest.mark.long),
    ],
    indirect=["strategy"],
)
def test_a_killed_replica_without_a_peer_loses_nothing(
    strategy: Strategy, program: str, kills: list[tuple[str, int, int]], tmp_path: Path
) -> None:
    step, _ = PROGRAMS[program]
    undisturbed = train(strategy, step, (), tmp_path / "undisturbed")
    disturbed = train(strategy, step, [Kill(*kill) for kill in kills], tmp_path / "disturbed")
    assert same(disturbed, undisturbed) == []
    assert disturbed.mean == undisturbed.mean
    assert disturbed.losses == undisturbed.losses
    assert [failure.ranks for failure in disturbed.failures] == [(rank,) for *_, rank in kills]
    if program == "convolutions":  # from a copy, and not from the beginning
        assert all(failure.step > 0 for failure in disturbed.failures)


def loops(strategy: Strategy, folder: Path, *kills: Kill) -> tuple[dict[str, torch.Tensor], list[Any], float]:
    """Train by loops inside the replicas, by a step with a batch between two of them, and in a second epoch."""
    torch.manual_seed(0)
    data = rd.Dataset.from_tensor_slices((torch.randn(120, 6), torch.randint(0, 3, (120,)))).shuffle(50, seed=1)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
        optimizer, mean = torch.optim.Adam(model.parameters(), lr=0.01), rd.Mean()

    def step(batch: Any) -> torch.Tensor:
        inputs, labels = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        mean.update(inputs.sum(), weight=len(inputs))
        return loss.detach()

    def loop(batches: Any, most: int, part: int) -> list[float]:
        losses = []
        for number, batch in enumerate(itertools.islice(batches, most)):
            losses.append(float(step(batch)))
            for kill in kills:
                kill.at(f"part {part}", number, folder)
        return losses

    found = []
    view = strategy.distribute_dataset(data.batch(10))
    for epoch in range(2):
        iterator = iter(view)
        found.append(strategy.run(loop, args=(iterator, 2, 4 * epoch)))
        found.append(strategy.run(loop, args=(iterator, 3, 4 * epoch + 1)))
        found.append(strategy.run(step, args=(next(iterator),)))
        found.append(strategy.run(loop, args=(iterator, 2, 4 * epoch + 2)))
        found.append(strategy.run(loop, args=(iterator, 99, 4 * epoch + 3)))
    results = [tuple(strategy.local_results(each)) for each in found]
    return {name: each.clone() for name, each in model.state_dict().items()}, results, float(mean.compute())


@pytest.mark.parametrize(
    ("strategy", "kills"),
    [
        ("mirrored 2", [("part 0", 1, 1), ("part 2", 0, 0), ("part 7", 3, 1)]),
        pytest.param("mirrored 1", [("part 1", 1, 0), ("part 6", 0, 0)], marks=pytest.mark.long),
    ],
    indirect=["strategy"],
)
def test_a_loop_in_the_replicas_runs_again_from_its_beginning(
    strategy: Strategy, kills: list[tuple[str, int, int]], tmp_path: Path
) -> None:
    values, results, mean = loops(strategy, tmp_path)
    again, results_again, mean_again = loops(strategy, tmp_path, *(Kill(*kill) for kill in kills))
    assert [failure.ranks for failure in strategy.failures()] == [(rank,) for *_, rank in kills]
    assert all(torch.equal(each, again[name]) for name, each in values.items())
    assert str(results_again) == str(results)
    assert mean_again == mean


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["mirrored 2"], indirect=True)
def test_fit_with_several_steps_in_one_execution_goes_on(strategy: Strategy, tmp_path: Path) -> None:
    def fit(name: str, *calls: tuple[int, int]) -> tuple[dict[str, torch.Tensor], dict[str, list[float]], list[str]]:
        torch.manual_seed(0)
        rows, labels = torch.randn(100, 6), torch.randint(0, 3, (100,))
        with strategy.scope():
            module = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), Fragile(tmp_path, calls), nn.Linear(8, 3))
            model = rd.Model(module)
            optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
            model.compile(optimizer, "cross_entropy", steps_per_execution=4)
        data = rd.Dataset.from_tensor_slices((rows, labels)).shuffle(60, seed=1).batch(10)
        checkpoint = rd.CheckpointManager(rd.Checkpoint(model=model), tmp_path / name, 2, checkpoint_interval=3)
        history = model.fit(data, epochs=3, verbose=False, checkpoint=checkpoint).history
        checkpoint.close()
        saved = [path.rpartition("/")[2] for path in checkpoint.checkpoints]
        return {key: each.clone() for key, each in module.state_dict().items()}, history, saved

    values, history, saved = fit("undisturbed")
    again, history_again, saved_again = fit("disturbed", (6, 1), (23, 0))
    assert [failure.ranks for failure in strategy.failures()] == [(1,), (0,)]
    assert all(torch.equal(each, again[key]) for key, each in values.items())
    assert (history_again, saved_again) == (history, saved)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["mirrored 2"], indirect=True)
def test_a_loop_that_saves_checkpoints_saves_the_same_ones(strategy: Strategy, tmp_path: Path) -> None:
    def train(name: str, *kills: Kill) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        data = rd.Dataset.from_tensor_slices(torch.randn(60, 4)).batch(10)
        view = strategy.distribute_dataset(data)
        with strategy.scope():
            model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3))
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        checkpoint = rd.Checkpoint(model=model, optimizer=optimizer, data=view)
        manager = rd.CheckpointManager(checkpoint, tmp_path / name, None)
        manager.restore_or_initialize()

        def loop(batches: Any) -> int:
            for number, batch in enumerate(batches):
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
                manager.save()
                for kill in kills:
                    kill.at("loop", number, tmp_path)
            return number

        assert strategy.run(loop, args=(iter(view),)).values == (5, 5)
        manager.close()
        assert [Path(path).name for path in manager.checkpoints] == [f"ckpt-{number}" for number in range(1, 7)]
        found: dict[str, torch.Tensor] = {}
        for number in (2, 4, 6):
            rd.Checkpoint(model=model).restore(tmp_path / name / f"ckpt-{number}", strict=False)
            found |= {f"{number} {key}": each.clone() for key, each in model.state_dict().items()}
        return found

    values = train("undisturbed")
    again = train("disturbed", Kill("loop", 2, 0), Kill("loop", 4, 1))
    assert [failure.ranks for failure in strategy.failures()] == [(0,), (1,)]
    assert all(torch.equal(each, again[name]) for name, each in values.items())


@pytest.mark.parametrize("strategy", ["workers 2"], indirect=True)
def test_an_iterator_with_separate_parts_cannot_run_again(strategy: Strategy, tmp_path: Path) -> None:
    kill = Kill("loop", 1, 1)
    data = strategy.distribute_datasets_from_function(lambda _: rd.Dataset.range(40).batch(2))

    def loop(batches: Any) -> int:
        for number, _ in enumerate(batches):
            rd.get_replica_context().all_reduce("SUM", 1.0)
            kill.at("loop", number, tmp_path)
        return 0

    strategy.run(int)
    with pytest.raises(rd.UnavailableError) as caught:
        _ = strategy.run(loop, args=(iter(data),)).values
    assert "read separate parts" in "".join(caught.value.__notes__)
    strategy._abort(fetch=False)
