"""A process that is to end saves what it has reached: every batch is seen once, whenever the signal comes."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import raydist as rd
from raydist.strategies.one_device import OneDeviceStrategy

ROWS = 24


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def run(directory: Path, *, at: int | None, when: str, every: int | None = None) -> tuple[list[list[int]], rd.State]:
    """Two epochs; SIGTERM comes at step `at`. What steps have seen."""
    strategy, progress, seen = OneDeviceStrategy("cpu"), rd.State(step=0, epoch=0), list[list[int]]()
    data = strategy.distribute_dataset(rd.Dataset.range(ROWS).shuffle(ROWS, seed=3).batch(4))
    checkpoint = rd.Checkpoint(data=data, progress=progress)

    def step(batch: object) -> None:
        seen.append(batch.tolist())  # type: ignore[attr-defined]  # a tensor
        if progress.step == at and when == "in the step":
            terminate()

    with rd.CheckpointManager(checkpoint, directory, 2, checkpoint_interval=every) as manager:
        manager.restore_or_initialize()
        while progress.epoch < 2:
            for batch in data:
                if progress.step == at and when == "after the draw":
                    terminate()
                strategy.run(step, args=(batch,))
                if progress.step == at and when == "after the step":
                    terminate()
                progress.step += 1
                if every is not None:
                    manager.save()
            progress.epoch += 1
    return seen, progress


@pytest.mark.parametrize("when", ["after the draw", "in the step", "after the step"])
@pytest.mark.parametrize("at", [0, 3, 5, 6, 10])
@pytest.mark.parametrize("every", [None, 1])
def test_no_batch_is_lost_and_none_seen_twice(tmp_path: Path, when: str, at: int, every: int | None) -> None:
    handler = signal.getsignal(signal.SIGTERM)  # Ray's, where that was started
    whole, _ = run(tmp_path / "whole", at=None, when="")
    first: list[list[int]] = []
    with pytest.raises(rd.Preempted, match="it received SIGTERM") as ended:
        first, _ = run(tmp_path / "run", at=at, when=when, every=every)
    assert ended.value.code == 42
    state = rd.State(step=0, epoch=0)
    latest = rd.latest_checkpoint(tmp_path / "run")
    assert latest is not None
    rd.Checkpoint(progress=state).restore(latest, only="progress")
    rest, progress = run(tmp_path / "run", at=None, when="")
    assert first == []
    assert whole[state.step :] == rest
    assert (progress.step, progress.epoch) == (12, 2)
    assert signal.getsignal(signal.SIGTERM) == handler


def test_the_process_ends_with_the_code(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys, raydist as rd\n"
        "strategy = rd.OneDeviceStrategy('cpu')\n"
        "signal.signal(signal.SIGTERM, lambda number, frame: print('mine', flush=True))\n"
        "manager = rd.CheckpointManager(rd.Checkpoint(state=rd.State(a=1)), sys.argv[1], 1, exit_code=7)\n"
        "manager.restore_or_initialize()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "strategy.run(print, args=('not reached',))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, "mine\n", "")
    assert os.listdir(tmp_path) == ["ckpt-0"]


def test_a_signal_behind_the_last_step_is_not_lost(tmp_path: Path) -> None:
    progress = rd.State(step=0)
    called: list[int] = []

    def end(last: Callable[[rd.CheckpointManager], object]) -> None:
        with rd.CheckpointManager(rd.Checkpoint(progress=progress), tmp_path, 1) as manager:
            manager.restore_or_initialize()
            progress.step += 7
            terminate()
            last(manager)

    def leave_before(manager: rd.CheckpointManager) -> None:
        with pytest.raises(rd.Preempted):
            manager.save()

    handler = signal.signal(signal.SIGTERM, lambda number, frame: called.append(number))
    try:
        for times in (1, 2):
            with pytest.raises(rd.Preempted, match="it received SIGTERM"):
                end(lambda manager: None)
            assert (called, progress.step) == (times * [signal.SIGTERM], times * 7)
            progress.step = 0  # restored by the next one
        with pytest.raises(ZeroDivisionError):  # which the program ends by anyway
            end(lambda manager: 1 / 0)
        end(leave_before)
        assert called == 3 * [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, handler)


def test_what_cannot_be_saved_in_time_leaves_the_one_before(tmp_path: Path) -> None:
    strategy = OneDeviceStrategy("cpu")
    with rd.CheckpointManager(rd.Checkpoint(state=rd.State(a=1)), tmp_path, 2) as manager:
        manager.save()
        manager.sync()
        (tmp_path / "ckpt-2").write_text("in the way")
        manager._saves.calls = 2
        terminate()
        with pytest.raises(rd.Preempted, match=r"could not be saved .*; the last checkpoint is .*ckpt-1"):
            strategy.run(len, args=([],))


def test_preempted_is_a_system_exit_that_pickles() -> None:
    error = pickle.loads(pickle.dumps(rd.Preempted(3, "why")))
    assert isinstance(error, SystemExit)
    assert (error.code, str(error), str(rd.Preempted())) == (3, "why", "42")
