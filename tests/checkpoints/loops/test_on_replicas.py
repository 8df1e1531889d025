"""Loops in replicas: they save between draws, and a preempted run stops at a draw."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torchmetrics import MeanMetric

import raydist as rd
from tests.checkpoints.loops.training import check_preemption_at_a_draw, check_saves_after_draws, names
from tests.summary.reading import curves

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]


def test_replicas_save_between_draws_and_stop_at_one(
    mirrored: Callable[[int], rd.MirroredStrategy], tmp_path: Path
) -> None:
    check_saves_after_draws(mirrored(2), tmp_path / "saved")
    check_preemption_at_a_draw(mirrored(2), tmp_path / "preempted")


@pytest.mark.long
def test_replicas_around_one_copy_save_between_draws_and_stop_at_one(
    central: Callable[[int], rd.CentralStorageStrategy], tmp_path: Path
) -> None:
    check_saves_after_draws(central(2), tmp_path / "saved")
    check_preemption_at_a_draw(central(2), tmp_path / "preempted")


def test_running_statistics_of_replicas_are_merged_in_saves(
    mirrored: Callable[[int], rd.MirroredStrategy], tmp_path: Path
) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        norm: Any = torch.nn.BatchNorm1d(1).double()
        mean = rd.Mean()
    data = strategy.distribute_dataset(rd.Dataset.range(22).batch(8))  # its last batch is smaller
    checkpoint = rd.Checkpoint(norm=norm, mean=mean, data=data)

    def loop(batches: Iterator[torch.Tensor], saves: bool) -> None:
        for batch in batches:
            norm(batch[:, None].double())
            mean.update(batch.double())
            if saves:
                manager.save()

    with rd.CheckpointManager(checkpoint, tmp_path, None) as manager:
        manager.watch()
        strategy.run(loop, args=(iter(data), True))
        manager.sync()
        end, mean_end = norm.running_mean.clone(), float(mean.compute())
        for number, expected in ((1, 3.5), (2, 7.5), (3, 10.5)):
            checkpoint.restore(tmp_path / f"ckpt-{number}")
            assert float(mean.compute()) == pytest.approx(expected)
        checkpoint.restore(tmp_path / "ckpt-1")
        strategy.run(loop, args=(iter(data), False))
        assert torch.allclose(norm.running_mean, end, rtol=1e-12)
        assert float(mean.compute()) == mean_end


def test_summaries_up_to_a_save_are_on_disk_when_the_checkpoint_is(
    mirrored: Callable[[int], rd.MirroredStrategy], tmp_path: Path
) -> None:
    strategy = mirrored(2)
    data = strategy.distribute_dataset(rd.Dataset.range(24).batch(4))
    writer = rd.summary.create_file_writer(tmp_path / "logs")
    expected = [(0, 1.5), (1, 5.5), (2, 9.5)]  # means of batches of four rows

    def loop(batches: Iterator[torch.Tensor]) -> int:
        for number, batch in enumerate(batches):
            rd.summary.scalar("mean", batch.double().mean(), step=number)
            if number == 2:
                saved: Any = manager.save()
            if number == 4:
                saved.wait()
                raise ValueError("as a killed run")  # what it recorded after the save is lost
        return 0

    with rd.CheckpointManager(rd.Checkpoint(data=data), tmp_path / "run", None) as manager:
        manager.watch()
        with pytest.raises(ValueError, match="as a killed run"), writer.as_default():
            strategy.local_results(strategy.run(loop, args=(iter(data),)))
        assert manager.latest_checkpoint is not None
        assert curves(tmp_path / "logs").scalars("mean") == expected  # before the writer is closed
    writer.close()
    assert curves(tmp_path / "logs").scalars("mean") == expected


def test_everything_in_a_checkpoint_is_from_the_same_draw(
    mirrored: Callable[[int], rd.MirroredStrategy], tmp_path: Path
) -> None:
    """Modules of which the function uses parts, metrics in modules, gradients that no step has used."""
    strategy = mirrored(2)
    with strategy.scope():
        inner = torch.nn.Linear(1, 1, bias=False).double()
        outer = torch.nn.ModuleDict({"inner": inner, "unused": torch.nn.Linear(1, 1)})
        model: Any = torch.nn.ModuleDict({"sum": MeanMetric().set_dtype(torch.float64), "layer": torch.nn.Linear(1, 1)})
        model["sum"].persistent(True)
    data = strategy.distribute_dataset(rd.Dataset.range(1, 13).batch(4))

    def loop(batches: Iterator[torch.Tensor]) -> None:
        for number, batch in enumerate(batches):
            inner(batch[:, None].double()).mean().backward()
            model["sum"].update(batch.double())
            with torch.no_grad():
                inner.weight.fill_(number + 1.0)
            manager.save()

    checkpoint = rd.Checkpoint(outer=outer, model=model, data=data, gradients=True)
    with rd.CheckpointManager(checkpoint, tmp_path, None) as manager:
        manager.watch()
        strategy.run(loop, args=(iter(data),))
        manager.sync()
        assert names(tmp_path) == ["ckpt-1", "ckpt-2", "ckpt-3"]
        for number in (2, 1, 3):
            checkpoint.restore(tmp_path / f"ckpt-{number}")
            rows = torch.arange(1.0, 4 * number + 1, dtype=torch.float64)
            assert inner.weight.item() == number
            assert inner.weight.grad is not None
            assert inner.weight.grad.item() == pytest.approx(rows.sum().item() / 4)
            assert float(model["sum"].compute()) == pytest.approx(rows.mean().item())


def await_file(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def test_states_of_the_driver_are_those_at_the_beginning_of_the_run(
    mirrored: Callable[[int], rd.MirroredStrategy], tmp_path: Path
) -> None:
    strategy, state = mirrored(2), rd.State(epoch=1)
    data = strategy.distribute_dataset(rd.Dataset.range(8).batch(2))
    checkpoint = rd.Checkpoint(state=state, data=data)

    def loop(batches: Iterator[torch.Tensor]) -> None:
        next(batches)
        await_file(tmp_path / "go")
        manager.save()
        for _ in batches:
            pass
        manager.save()

    with rd.CheckpointManager(checkpoint, tmp_path / "run", None) as manager:
        manager.watch()
        strategy.run(loop, args=(iter(data),))
        state.epoch = 2
        (tmp_path / "go").touch()
        manager.sync()
        for number, num_batches in ((1, 3), (2, 4)):  # an epoch that has ended is followed by a new one
            checkpoint.restore(tmp_path / "run" / f"ckpt-{number}")
            assert state.epoch == 1
            assert len(list(data)) == num_batches
