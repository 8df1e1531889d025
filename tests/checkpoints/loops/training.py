"""A training whose loop runs in the replicas, and checks of it for every strategy."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import raydist as rd

__all__ = ["Training", "TrainingOptions", "check_preemption_at_a_draw", "check_saves_after_draws", "names"]

ROWS = 24


@dataclass(frozen=True)
class TrainingOptions:
    """Options by which a strategy repeats the training to the bit."""

    dropout: float = 0.5


DEFAULT = TrainingOptions()


class Training:
    """A small model, trained by a loop in the replicas."""

    def __init__(self, strategy: rd.Strategy, directory: Path, training: TrainingOptions, **options: Any) -> None:
        torch.manual_seed(1)
        self.strategy = strategy
        with strategy.scope():
            self.model = torch.nn.Sequential(
                torch.nn.Linear(1, 4), torch.nn.Dropout(training.dropout), torch.nn.Linear(4, 1)
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


def check_saves_after_draws(strategy: rd.Strategy, tmp_path: Path, options: TrainingOptions = DEFAULT) -> None:
    """Check that replicas save between draws, and that a run resumed from such a checkpoint ends the same."""
    whole = Training(strategy, tmp_path / "run", options, checkpoint_interval=2)
    with whole.manager as manager:
        manager.restore_or_initialize()
        whole.strategy.run(whole.loop(), args=(iter(whole.data), None, True))
        manager.sync()
        assert manager._saves.calls == 6, "counted once, whatever number of replicas calls"
        assert names(tmp_path / "run") == ["ckpt-2", "ckpt-4", "ckpt-6"]
        end = whole.values()
    rest = Training(strategy, tmp_path / "other", options, checkpoint_interval=2)
    with rest.manager as manager:
        manager.watch()
        rest.checkpoint.restore(tmp_path / "run" / "ckpt-4")
        done = rest.strategy.run(rest.loop(), args=(iter(rest.data), None, True))
        assert rest.strategy.local_results(done) == (2,) * strategy.num_replicas_in_sync, (
            "it goes on with the next batch"
        )
        assert equal(rest.values(), end)


def check_preemption_at_a_draw(strategy: rd.Strategy, tmp_path: Path, options: TrainingOptions = DEFAULT) -> None:
    """Check that SIGTERM ends the run at a draw, and that the resumed run ends the same."""
    whole = Training(strategy, tmp_path / "whole", options)
    with whole.manager as manager:
        manager.restore_or_initialize()
        whole.strategy.run(whole.loop(), args=(iter(whole.data), None, False))
        end = whole.values()
    first = Training(strategy, tmp_path / "run", options)
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
    rest = Training(strategy, tmp_path / "run", options)
    with rest.manager as manager:
        assert manager.restore_or_initialize() is not None
        done = rest.strategy.run(rest.loop(), args=(iter(rest.data), None, False))
        assert 1 <= rest.strategy.local_results(done)[0] <= 4
        assert equal(rest.values(), end)
