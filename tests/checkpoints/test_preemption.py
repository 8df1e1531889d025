"""A process that is to end saves what it has reached: every batch is seen once, whenever the signal comes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import raydist as rd
from raydist.core.failpoints import installed
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
def test_no_batch_is_lost_or_repeated(tmp_path: Path, when: str) -> None:
    handler = signal.getsignal(signal.SIGTERM)  # Ray's, where that was started
    whole, _ = run(tmp_path / "whole", at=None, when="")
    for at, every in ((0, 1), (5, None), (5, 1), (10, None)):
        folder = tmp_path / f"{at}-{every}"
        with pytest.raises(rd.Preempted, match="it received SIGTERM") as ended:
            run(folder, at=at, when=when, every=every)
        assert ended.value.code == 42
        state = rd.State(step=0, epoch=0)
        latest = rd.latest_checkpoint(folder)
        assert latest is not None
        rd.Checkpoint(progress=state).restore(latest, only="progress")
        rest, progress = run(folder, at=None, when="")
        assert whole[state.step :] == rest, (at, every)
        assert (progress.step, progress.epoch) == (12, 2)
        assert signal.getsignal(signal.SIGTERM) == handler


def looping(strategy: rd.Strategy, directory: Path, *, then: Callable[[], object] = lambda: None) -> float:
    """Three runs that draw two batches each; how many steps were made. `then` comes after the first."""
    with strategy.scope():
        counter = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(counter.weight)

    def loop(batches: Iterator[torch.Tensor]) -> None:
        for _, batch in zip(range(2), batches, strict=False):
            assert len(batch) <= 2
            with torch.no_grad():
                counter.weight.add_(1)

    data = strategy.distribute_dataset(rd.Dataset.range(12).batch(2))
    with rd.CheckpointManager(rd.Checkpoint(model=counter, data=data), directory, 2) as manager:
        manager.restore_or_initialize()
        iterator = iter(data)
        for number in range(3):
            strategy.run(loop, args=(iterator,))
            if number == 0:
                counter.weight.tolist()  # the run is over
                then()
        return float(counter.weight.detach())


def test_batches_drawn_by_the_driver_before_are_not_repeated(tmp_path: Path) -> None:
    with pytest.raises(rd.Preempted):
        looping(OneDeviceStrategy("cpu"), tmp_path, then=terminate)
    assert looping(OneDeviceStrategy("cpu"), tmp_path) == 6


@pytest.mark.ray
@pytest.mark.timeout(120)
def test_batches_drawn_by_replicas_before_are_not_repeated(
    tmp_path: Path, mirrored: Callable[[int], rd.MirroredStrategy]
) -> None:
    strategy = mirrored(2)
    with pytest.raises(rd.Preempted):
        looping(strategy, tmp_path, then=terminate)
    assert looping(strategy, tmp_path) == 6


def test_the_process_ends_with_the_exit_code(tmp_path: Path) -> None:
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
    assert (done.returncode, done.stdout) == (7, "mine\n")
    (line,) = done.stderr.splitlines()
    assert re.fullmatch(r"This process is to end: .* is in '.*ckpt-0'\. Start the program again .*\.", line), line
    assert os.listdir(tmp_path) == ["ckpt-0"]


def test_a_signal_after_the_last_step_is_not_lost(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("num_bad", [3, 4])
def test_the_last_save_is_tried_after_failures_in_a_row(tmp_path: Path, num_bad: int) -> None:
    """Nobody was told of the third one yet. With the fourth there is no room for the last save either."""
    strategy, failures = OneDeviceStrategy("cpu"), list[str]()

    def full(name: str) -> None:
        if name == "checkpoint.before_manifest" and len(failures) < num_bad:
            failures.append(name)
            raise OSError(28, "No space left on device")

    def end(manager: rd.CheckpointManager, last: Callable[[rd.CheckpointManager], object]) -> None:
        handle: rd.SaveHandle | None = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of the first two
            for _ in range(3):
                handle = manager.save()
        while handle is None or not handle.done():
            time.sleep(0.001)
        terminate()
        last(manager)

    lasts: dict[str, Callable[[rd.CheckpointManager], object]] = {
        "run": lambda manager: strategy.run(len, args=([],)),
        "save": lambda manager: manager.save(),
        "close": lambda manager: None,
    }
    said = "What it reached is in" if num_bad == 3 else "could not be saved .OSError: .*No space left"
    for name, last in lasts.items():
        failures.clear()
        with (
            installed(full),
            pytest.raises(rd.Preempted, match=said) as ended,
            rd.CheckpointManager(rd.Checkpoint(state=rd.State(a=1)), tmp_path / name, 2) as manager,
        ):
            end(manager, last)
        assert ended.value.code == 42
        assert len(os.listdir(tmp_path / name)) == (1 if num_bad == 3 else 0), name


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_second_signal_changes_nothing(tmp_path: Path, asynchronous: bool) -> None:
    """In the middle of the last save, and of one that was under way when the first came."""
    strategy, came = OneDeviceStrategy("cpu"), list[str]()

    def again(name: str) -> None:
        if name.startswith("checkpoint.") and name not in came:
            came.append(name)
            terminate()

    manager = rd.CheckpointManager(rd.Checkpoint(state=rd.State(a=1)), tmp_path, None, asynchronous=asynchronous)
    manager.watch()

    def end() -> None:
        with manager:
            manager.save()
            strategy.run(len, args=([],))
            strategy.run(len, args=([],))

    with installed(again), pytest.raises(rd.Preempted, match="What it reached is in") as ended:
        end()
    assert len(came) >= 2
    assert ended.value.code == 42
    assert rd.latest_checkpoint(tmp_path) == f"{tmp_path}/ckpt-1"
    rd.Checkpoint(state=rd.State(a=0)).restore(tmp_path / "ckpt-1")


def test_signal_handlers_of_asyncio_are_kept(tmp_path: Path) -> None:
    """As a notebook's kernel has one: it runs in the main thread, within a loop."""
    strategy, called = OneDeviceStrategy("cpu"), list[int]()

    async def cell() -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, called.append, 1)
        found = signal.getsignal(signal.SIGTERM)
        manager = rd.CheckpointManager(rd.Checkpoint(state=rd.State()), tmp_path, 1)
        manager.restore_or_initialize()
        terminate()
        with pytest.raises(rd.Preempted):
            strategy.run(len, args=([],))
        manager.close()
        assert signal.getsignal(signal.SIGTERM) == found
        await asyncio.sleep(0.01)
        num_before = len(called)
        terminate()
        await asyncio.sleep(0.01)
        assert len(called) == num_before + 1
        loop.remove_signal_handler(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    asyncio.run(cell())
    signal.signal(signal.SIGTERM, before)
    assert rd.latest_checkpoint(tmp_path) == f"{tmp_path}/ckpt-0"


def test_a_manager_in_another_thread_leaves_the_signal_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    called = list[int]()

    def work(manager: rd.CheckpointManager) -> None:
        manager.restore_or_initialize()
        manager.save()

    def mine(number: int, frame: object) -> None:
        called.append(number)

    manager = rd.CheckpointManager(rd.Checkpoint(state=rd.State(a=1)), tmp_path, 1)
    before = signal.signal(signal.SIGTERM, mine)
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="mine") as thread, caplog.at_level(logging.WARNING, "raydist"):
            thread.submit(work, manager).result(20)
            assert signal.getsignal(signal.SIGTERM) is mine
            assert "SIGTERM is not watched: only the main thread may do that, this is mine_0" in caplog.text
            manager.save()  # from now on it is
            terminate()
            assert called == []
            with pytest.raises(rd.Preempted):
                thread.submit(OneDeviceStrategy("cpu").run, len, ([],)).result(20)
            thread.submit(manager.close).result(20)
        assert called == [signal.SIGTERM]
        terminate()
        assert called == [signal.SIGTERM] * 2
    finally:
        signal.signal(signal.SIGTERM, before)


def drawn(iterator: Any, *, optional: bool) -> Iterator[torch.Tensor]:
    """Yield all batches, drawn by `next` or by `get_next_as_optional`."""
    if not optional:
        yield from iterator
    while (found := iterator.get_next_as_optional()).has_value():
        yield found.get_value()


def run_loop(directory: Path, *, at: int | None, every: int | None = None, optional: bool = False) -> list[list[int]]:
    """Run one epoch with SIGTERM in step `at`, and return the batches that steps have seen."""
    strategy, seen = OneDeviceStrategy("cpu"), list[list[int]]()
    data = strategy.distribute_dataset(rd.Dataset.range(ROWS).shuffle(ROWS, seed=3).batch(4))
    progress = rd.State(step=0)

    def loop(iterator: Any) -> None:
        for batch in drawn(iterator, optional=optional):
            seen.append(batch.tolist())
            progress.step += 1
            if progress.step == at:
                terminate()
            if every is not None:
                manager.save()

    checkpoint = rd.Checkpoint(data=data, progress=progress)
    with rd.CheckpointManager(checkpoint, directory, None, checkpoint_interval=every) as manager:
        manager.restore_or_initialize()
        with contextlib.nullcontext() if at is None else pytest.raises(rd.Preempted, match="SIGTERM"):
            strategy.run(loop, args=(iter(data),))
    return seen


def test_a_preempted_run_stops_at_the_next_draw(tmp_path: Path) -> None:
    whole = run_loop(tmp_path / "whole", at=None)
    cases = [(1, None, False), (1, 2, True), (4, 2, False), (6, None, True), (6, 2, False)]
    for number, (at, every, optional) in enumerate(cases):
        folder = tmp_path / f"run-{number}"
        assert run_loop(folder, at=at, every=every, optional=optional) == whole[:at], cases[number]
        rest = run_loop(folder, at=None, optional=optional)
        assert at == len(whole) or rest == whole[at:], cases[number]


def test_a_save_after_a_draw_has_the_state_of_its_call(tmp_path: Path) -> None:
    run_loop(tmp_path, at=None, every=2)
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

    def end(batch: int, logs: object) -> None:
        calls.append(batch)
        if len(calls) == 1:
            terminate()

    rows = torch.arange(32.0)[:, None]
    with pytest.raises(rd.Preempted):
        model.fit(rows, rows, batch_size=4, checkpoint=tmp_path, callbacks=[rd.LambdaCallback(on_train_batch_end=end)])
    assert calls == [3]
