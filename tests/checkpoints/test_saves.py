"""The saves of one manager: writing beside training, counts, and positions at step boundaries."""

from __future__ import annotations

import errno
import gc
import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import raydist as rd
from raydist.checkpoints.checkpoint import contents_of
from raydist.checkpoints.listing import Retention, SaveInterval
from raydist.checkpoints.run_directory import RunDirectory
from raydist.checkpoints.saves import BackgroundWriter, ManagerSaves
from raydist.checkpoints.watch import ManagerWatch
from raydist.core.errors import DeadlineExceededError


def fail() -> None:
    raise OSError(28, "No space left on device")


def test_writes_run_one_after_another_in_a_thread() -> None:
    writer, may_end, order = BackgroundWriter(), threading.Event(), list[str]()

    def slow() -> None:
        assert may_end.wait(10)
        order.append("slow")

    first = writer.submit("a", slow)
    assert not first.done()
    with pytest.raises(DeadlineExceededError, match="'a' must be written within 0.01 s"):
        first.wait(0.01)
    threading.Timer(0.05, may_end.set).start()
    second = writer.submit("b", lambda: order.append("quick"))
    second.wait()
    assert order == ["slow", "quick"]
    first.wait()
    writer.close()


def test_a_success_resets_the_count_of_failures() -> None:
    writer = BackgroundWriter()
    for write in (fail, fail, lambda: None, fail, fail):
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            writer.submit("a", write)
    with pytest.warns(RuntimeWarning):
        writer.wait()
    writer.submit("a", lambda: None)
    writer.close()


def test_close_raises_the_last_failure_if_it_was_not_raised_before() -> None:
    writer = BackgroundWriter()
    writer.submit("a", fail)
    with pytest.raises(OSError, match="No space left"):
        writer.close()
    writer.close()
    handle = writer.submit("b", fail)
    with pytest.raises(OSError, match="No space left"):
        handle.wait()
    writer.close()


def test_close_raises_a_failure_that_was_only_a_warning() -> None:
    writer = BackgroundWriter()
    writer.submit("a", fail)
    with pytest.warns(RuntimeWarning):
        writer.wait()
    with pytest.raises(OSError, match="No space left"):
        writer.close()


def test_a_synchronous_write_is_complete_on_return() -> None:
    writer = BackgroundWriter()
    thread: list[threading.Thread] = []
    handle = writer.submit("a", lambda: thread.append(threading.current_thread()), here=True)
    assert handle.done()
    assert thread == [threading.current_thread()]
    with pytest.raises(KeyboardInterrupt):
        writer.submit("b", interrupted, here=True)


def interrupted() -> None:
    raise KeyboardInterrupt


@pytest.fixture
def saves(tmp_path: Path) -> Iterator[ManagerSaves]:
    run = RunDirectory(str(tmp_path), "ckpt", Retention(2))
    run.acquire()
    made = ManagerSaves(contents_of(rd.Checkpoint(state=rd.State(a=1))), run, SaveInterval(3), None)
    yield made
    made.writer.close()
    run.release()


def test_the_count_continues_after_a_restore(saves: ManagerSaves) -> None:
    saves.calls = 5
    saves.save(9, None, here=True).wait()
    (found,) = saves.run.find()
    saves.calls, saves.last_save = 0, -1.0
    saves.continue_from(found)
    assert (saves.calls, saves.last_step) == (5, 5)
    assert saves.last_save > 0, "seconds between saves count from the restore"
    found.details["calls"] = "many"
    saves.continue_from(found)
    assert saves.calls == 9


@pytest.mark.parametrize("number", [-1, 10**18, 1.0, True])
def test_invalid_numbers_are_errors(saves: ManagerSaves, number: int) -> None:
    with pytest.raises(rd.InvalidArgumentError, match="must be an int >= 0"):
        saves.save(number, None, here=True)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_read_only_run_directory_is_an_error(
    saves: ManagerSaves, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = os.mkdir

    def refuse(path: str, *args: int, **options: int) -> None:
        if os.path.basename(path).startswith("ckpt-"):
            raise OSError(number, os.strerror(number), path)
        made(path, *args, **options)

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises((rd.FailedPreconditionError, OSError)) as refused:
        saves.save(1, None, here=True).wait()
    assert "ckpt-1" in str(refused.value)
    monkeypatch.undo()
    saves.save(2, None, here=True).wait()
    assert [path.rpartition("/")[2] for path in saves.run.newest()] == ["ckpt-2"]


def made(directory: Path, checkpoint: rd.Checkpoint) -> ManagerSaves:
    run = RunDirectory(str(directory), "ckpt", Retention(2))
    return ManagerSaves(contents_of(checkpoint), run, SaveInterval(), None)


def test_a_batch_of_a_step_that_did_not_begin_is_put_back(tmp_path: Path) -> None:
    data = rd.OneDeviceStrategy("cpu").distribute_dataset(rd.Dataset.range(6).batch(2))
    saves = made(tmp_path, rd.Checkpoint(data=data))
    watch = ManagerWatch(saves, 42)
    saves.run.acquire()
    watch.look()
    iterator = iter(data)
    next(iterator)
    watch.before_step(1)
    next(iterator)
    assert f"{tmp_path}/ckpt-0" in str(watch.save_before_exit("why", undone=2))
    saves.run.release()
    rd.Checkpoint(data=data).restore(tmp_path / "ckpt-0")
    assert [batch.tolist() for batch in data] == [[2, 3], [4, 5]]


def test_the_watch_does_not_keep_a_dropped_manager_alive(tmp_path: Path) -> None:
    saves = made(tmp_path, rd.Checkpoint(state=rd.State()))
    watch = ManagerWatch(saves, 7)
    del saves
    gc.collect()
    assert str(watch.save_before_exit("why", undone=None)) == "This process is to end: why."
    assert watch.nodes() == set()


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_a_batch_of_a_plain_iterator_is_put_back(tmp_path: Path, num_steps: int) -> None:
    iterator = iter(rd.Dataset.range(6))
    next(iterator)
    saves = made(tmp_path, rd.Checkpoint(iterator=iterator))
    watch = ManagerWatch(saves, 42)
    saves.run.acquire()
    watch.look()
    for boundary in range(1, num_steps + 1):
        next(iterator)
        watch.before_step(boundary)
    next(iterator)
    watch.save_before_exit("why", undone=num_steps + 1)
    saves.run.release()
    again = iter(rd.Dataset.range(6))
    rd.Checkpoint(iterator=again).restore(tmp_path / "ckpt-0")
    assert int(next(again)) == 1 + num_steps


def test_the_list_of_checkpoints_is_read_from_the_directory(tmp_path: Path) -> None:
    checkpoint = rd.Checkpoint(state=rd.State())
    plain = rd.CheckpointManager(checkpoint, tmp_path, 1)
    kept = rd.CheckpointManager(checkpoint, tmp_path, 1, checkpoint_interval=5, interval_s=2.5, best=("loss", "min"))
    assert (kept.checkpoints, kept.latest_checkpoint, kept.best_checkpoint) == ([], None, None)
    with rd.CheckpointManager(rd.Checkpoint(state=rd.State()), tmp_path, 2, best=("loss", "min")) as manager:
        for loss in (1.0, 0.5, 2.0):
            manager.save(metrics={"loss": loss})
    assert (kept.checkpoint_interval, kept.interval_s) == (5, 2.5)
    assert kept.directory == str(tmp_path)
    assert kept.checkpoints == [f"{tmp_path}/ckpt-3"]
    assert kept.latest_checkpoint == f"{tmp_path}/ckpt-3"
    assert (kept.best_metric, kept.best_checkpoint) == ("loss", f"{tmp_path}/ckpt-2")
    assert (plain.best_metric, plain.best_checkpoint) == (None, None)
