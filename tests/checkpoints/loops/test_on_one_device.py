"""Loops under `OneDeviceStrategy`, in this process: saves between draws, preemption at a draw."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import raydist as rd
from raydist.strategies.one_device import OneDeviceStrategy

ROWS = 24


def drawn(iterator: Any, *, optional: bool) -> Iterator[torch.Tensor]:
    """Yield all batches, drawn by `next` or by `get_next_as_optional`."""
    if not optional:
        yield from iterator
    while (found := iterator.get_next_as_optional()).has_value():
        yield found.get_value()


def run(directory: Path, *, at: int | None, every: int | None = None, optional: bool = False) -> list[list[int]]:
    """Run one epoch with SIGTERM in step `at`, and return the batches that steps have seen."""
    strategy, seen = OneDeviceStrategy("cpu"), list[list[int]]()
    data = strategy.distribute_dataset(rd.Dataset.range(ROWS).shuffle(ROWS, seed=3).batch(4))
    progress = rd.State(step=0)

    def loop(iterator: Any) -> None:
        for batch in drawn(iterator, optional=optional):
            seen.append(batch.tolist())
            progress.step += 1
            if progress.step == at:
                os.kill(os.getpid(), signal.SIGTERM)
            if every is not None:
                manager.save()

    checkpoint = rd.Checkpoint(data=data, progress=progress)
    with rd.CheckpointManager(checkpoint, directory, None, checkpoint_interval=every) as manager:
        manager.restore_or_initialize()
        with contextlib.nullcontext() if at is None else pytest.raises(rd.Preempted, match="SIGTERM"):
            strategy.run(loop, args=(iter(data),))
    return seen


def test_a_preempted_run_stops_at_the_next_draw(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", at=None)
    cases = [(1, None, False), (1, 2, True), (4, 2, False), (6, None, True), (6, 2, False)]
    for number, (at, every, optional) in enumerate(cases):
        folder = tmp_path / f"run-{number}"
        assert run(folder, at=at, every=every, optional=optional) == whole[:at], cases[number]
        rest = run(folder, at=None, optional=optional)
        assert at == len(whole) or rest == whole[at:], cases[number]


def test_a_save_after_a_draw_has_the_state_of_its_call(tmp_path: Path) -> None:
    run(tmp_path, at=None, every=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt-2", "ckpt-4", "ckpt-6"]
    progress = rd.State(step=0)
    rd.Checkpoint(progress=progress).restore(tmp_path / "ckpt-4", only="progress")
    assert progress.step == 4


def test_a_fit_in_several_steps_a_call_is_not_divided(tmp_path: Path) -> None:
    strategy = OneDeviceStrategy("cpu")
    with strategy.scope():
        torch.manual_seed(0)
        model = rd.Model(torch.nn.Linear(1, 1))
    model.compile("sgd", "mse", steps_per_execution=4)
    calls: list[int] = []

    class Terminate(rd.Callback):
        """A callback that sends SIGTERM after the first call."""

        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            calls.append(batch)
            if len(calls) == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    rows = torch.arange(32.0)[:, None]
    with pytest.raises(rd.Preempted):
        model.fit(rows, rows, batch_size=4, checkpoint=tmp_path, callbacks=[Terminate()])
    assert calls == [3]
