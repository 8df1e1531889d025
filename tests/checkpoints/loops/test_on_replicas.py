"""Loops in replicas: each draw is a boundary, at which they save, and at which a process that is to end is left."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import raydist as rd

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]

ROWS = 24


class Training:
    """A small model, trained by a loop in the replicas. What each step has seen is in a buffer."""

    def __init__(self, strategy: rd.Strategy, directory: Path, **options: Any) -> None:
        torch.manual_seed(1)
        self.strategy = strategy
        with strategy.scope():
            self.model = torch.nn.Sequential(
                torch.nn.Linear(1, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1)
            ).double()
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.progress = rd.State(epoch=0)
        data = rd.Dataset.range(ROWS).shuffle(ROWS, seed=3).batch(4)
        self.data = strategy.distribute_dataset(data)
        self.checkpoint = rd.Checkpoint(
            model=self.model, optimizer=self.optimizer, data=self.data, progress=self.progress
        )
        self.manager = rd.CheckpointManager(self.checkpoint, directory, 10, **options)

    def loop(self) -> Callable[..., Any]:
        model, optimizer, manager = self.model, self.optimizer, self.manager

        def run(batches: Iterator[torch.Tensor], ready: str | None, saves: bool) -> int:
            done = 0
            for batch in batches:
                optimizer.zero_grad()
                model(batch[:, None].double()).square().mean().backward()
                optimizer.step()
                done += 1
                if saves:
                    manager.save()
                if ready is not None and done >= 2:
                    Path(ready).touch()
                    time.sleep(0.5)
            return done

        return run

    def values(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name.startswith("ckpt"))


def test_replicas_save_after_draws_and_each_is_a_whole_checkpoint(
    mirrored: Callable[[int], rd.MirroredStrategy], tmp_path: Path
) -> None:
    whole = Training(mirrored(2), tmp_path / "run", checkpoint_interval=2)
    with whole.manager as manager:
        manager.restore_or_initialize()
        whole.strategy.run(whole.loop(), args=(iter(whole.data), None, True))
        manager.sync()
        assert manager._saves.calls == 6, "counted once, whatever number of replicas calls"
        assert names(tmp_path / "run") == ["ckpt-2", "ckpt-4", "ckpt-6"]
        end = whole.values()
    rest = Training(mirrored(2), tmp_path / "other", checkpoint_interval=2)
    with rest.manager as manager:
        manager.watch()
        rest.checkpoint.restore(tmp_path / "run" / "ckpt-4")
        done = rest.strategy.run(rest.loop(), args=(iter(rest.data), None, True))
        assert rest.strategy.local_results(done) == (2, 2), "it goes on with the next batch"
        assert equal(rest.values(), end)


def test_a_process_that_is_to_end_is_left_at_a_draw(
    mirrored: Callable[[int], rd.MirroredStrategy], tmp_path: Path
) -> None:
    whole = Training(mirrored(2), tmp_path / "whole")
    with whole.manager as manager:
        manager.restore_or_initialize()
        whole.strategy.run(whole.loop(), args=(iter(whole.data), None, False))
        end = whole.values()
    first = Training(mirrored(2), tmp_path / "run")
    ready = str(tmp_path / "ready")

    def terminate() -> None:
        while not os.path.exists(ready):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=terminate)
    first.manager.restore_or_initialize()
    thread.start()
    with first.manager, pytest.raises(rd.Preempted, match="it received SIGTERM. What it reached is in .*0") as ended:
        first.strategy.run(first.loop(), args=(iter(first.data), ready, False))
    thread.join()
    assert ended.value.code == 42
    rest = Training(mirrored(2), tmp_path / "run")
    with rest.manager as manager:
        assert manager.restore_or_initialize() is not None
        done = rest.strategy.run(rest.loop(), args=(iter(rest.data), None, False))
        assert 1 <= rest.strategy.local_results(done)[0] <= 4
        assert equal(rest.values(), end)


def test_what_replicas_count_apart_is_merged_where_they_save(
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
