"""`rd.CheckpointManager`: when it saves, what it keeps, what it restores, who may write."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import raydist as rd
from raydist.actors.metric_counters import SaveMetrics
from raydist.checkpoints.checkpoint import contents_of
from raydist.checkpoints.listing import Retention, SaveInterval, find_checkpoints
from raydist.checkpoints.run_directory import RunDirectory
from raydist.checkpoints.saves import BackgroundWriter, ManagerSaves
from raydist.checkpoints.tensor_file import MANIFEST_NAME
from raydist.checkpoints.watch import ManagerWatch
from raydist.core.errors import DeadlineExceededError
from raydist.core.failpoints import installed
from raydist.pipelines.stored.directory_files import directory_files
from raydist.strategies.one_device import OneDeviceStrategy
from tests.refused import check_refused


@pytest.fixture
def progress() -> rd.State:
    return rd.State(step=0)


@pytest.fixture
def open_managers() -> Iterator[list[rd.CheckpointManager]]:
    managers: list[rd.CheckpointManager] = []
    yield managers
    for each in managers:
        each.close()


@pytest.fixture
def manager(progress: rd.State, tmp_path: Path, open_managers: list[rd.CheckpointManager]) -> Any:
    def make(max_to_keep: int | None = None, directory: Any = tmp_path, **options: Any) -> rd.CheckpointManager:
        made = rd.CheckpointManager(rd.Checkpoint(progress=progress), directory, max_to_keep, **options)
        open_managers.append(made)
        return made

    return make


def names(paths: list[str]) -> list[str]:
    return [os.path.basename(path) for path in paths]


def saved_step(path: str | None) -> int:
    progress = rd.State(step=-1)
    rd.Checkpoint(progress=progress).restore(path or "")
    return int(progress.step)


def test_every_nth_call_saves_and_the_count_continues_after_a_restore(manager: Any, progress: rd.State) -> None:
    first = manager(checkpoint_interval=3)
    assert first.restore_or_initialize() is None
    handles = []
    for progress.step in range(1, 8):
        handles.append(first.save())
    assert [handle is not None for handle in handles] == [False, False, True, False, False, True, False]
    first.close()
    assert names(first.checkpoints) == ["ckpt-3", "ckpt-6"]
    again = manager(checkpoint_interval=3)
    progress.step = 0
    assert again.restore_or_initialize() == first.latest_checkpoint
    assert progress.step == 6
    handles = [again.save() for _ in range(3)]
    assert [handle is not None for handle in handles] == [False, False, True]
    again.sync()
    assert names(again.checkpoints)[-1] == "ckpt-9"


def test_a_step_counter_numbers_checkpoints_and_decides_when_to_save(manager: Any) -> None:
    counter = torch.tensor(10)
    one = manager(step_counter=counter, checkpoint_interval=5)
    one.restore_or_initialize()
    assert one.save() is None
    counter += 5
    one.save().wait()
    assert names(one.checkpoints) == ["ckpt-15"]
    assert one.checkpoint_interval == 5
    other = manager(step_counter=lambda: 7, directory=f"memory://{os.urandom(4).hex()}")
    other.save().wait()
    assert names(other.checkpoints) == ["ckpt-7"]


def test_seconds_between_saves(manager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("raydist.checkpoints.saves.time", SimpleNamespace(monotonic=lambda: now[0]))
    one = manager(interval_s=60)
    assert one.save() is None
    now[0] += 59
    assert one.save() is None
    now[0] += 1
    assert one.save() is not None
    assert one.save() is None
    now[0] += 60
    assert one.save() is not None
    one.close()
    again = manager(interval_s=60)
    now[0] += 60
    again.restore_or_initialize()
    assert again.save() is None, "seconds count from the restore"


def test_the_newest_and_the_best_are_kept(manager: Any, progress: rd.State) -> None:
    one = manager(2, best=("loss", "min"))
    for progress.step, loss in enumerate([3.0, 1.0, 2.0, 2.5]):
        one.save(metrics={"loss": torch.tensor(loss)})
    one.close()
    assert names(one.checkpoints) == ["ckpt-3", "ckpt-4"]
    assert os.path.basename(one.best_checkpoint) == "ckpt-2"
    assert saved_step(one.best_checkpoint) == 1
    assert sorted(name for name in os.listdir(one.directory)) == ["ckpt-2", "ckpt-3", "ckpt-4"]
    assert manager(2).best_checkpoint is None
    again = manager(2, best=("loss", "min"))
    assert (again.best_metric, again.best_checkpoint) == ("loss", one.best_checkpoint), "as the directory says"
    again.restore_or_initialize()
    again.save(metrics={"loss": 0.5})
    again.sync()
    assert sorted(os.listdir(again.directory)) == ["ckpt-4", "ckpt-5", "lease.json"]


def test_metrics_must_include_the_one_named_by_best(manager: Any) -> None:
    with pytest.raises(rd.InvalidArgumentError, match="metrics must have 'loss', which `best` names, got accuracy"):
        manager(1, best=("loss", "min")).save(metrics={"accuracy": 1.0})
    with pytest.raises(rd.InvalidArgumentError, match="names and numbers"):
        manager(1, directory="memory://metrics").save(metrics={"loss": "low"})


def test_the_newest_checkpoint_is_the_last_saved_even_if_numbers_restart(manager: Any, progress: rd.State) -> None:
    first = manager(2)
    first.save(checkpoint_number=900).wait()
    first.close()
    second = manager(2)
    second.save().wait()
    progress.step = 5
    second.save(checkpoint_number=1).wait()
    assert names(second.checkpoints) == ["ckpt-900", "ckpt-1"], "an existing number is replaced"
    second.close()
    assert saved_step(rd.latest_checkpoint(second.directory)) == 5
    third = manager(2)
    assert third.restore_or_initialize() == second.latest_checkpoint
    third.close()
    found = find_checkpoints(directory_files(second.directory))
    assert len({each.details["began"] for each in found}) == 1, "hours to keep one count from the first run"
    other = manager(2, checkpoint_name="finetune")
    other.save().wait()
    assert rd.latest_checkpoint(second.directory) == other.latest_checkpoint


def damage(path: str) -> None:
    manifest = Path(path) / MANIFEST_NAME
    manifest.write_bytes(manifest.read_bytes()[:-9])


def test_a_damaged_checkpoint_is_an_error_or_falls_back_to_the_previous_one(manager: Any, progress: rd.State) -> None:
    one = manager()
    for progress.step in range(3):
        one.save()
    one.close()
    damage(one.latest_checkpoint)
    with pytest.raises(rd.DataLossError, match="ckpt-3"), manager() as strict:
        strict.restore_or_initialize()
    again = manager()
    with pytest.warns(RuntimeWarning, match="ckpt-3.* Trying the previous checkpoint"):
        assert os.path.basename(again.restore_or_initialize(fallback=True)) == "ckpt-2"
    assert progress.step == 1
    again.save().wait()
    assert names(again.checkpoints)[-1] == "ckpt-3"


def test_leftovers_of_killed_saves_are_ignored_and_removed(manager: Any, tmp_path: Path) -> None:
    (tmp_path / "ckpt-7").mkdir()
    (tmp_path / "ckpt-7" / "model.safetensors").write_bytes(b"half")
    (tmp_path / "notes-1").mkdir()
    called: list[int] = []
    one = manager(init_fn=lambda: called.append(1))
    assert one.restore_or_initialize() is None
    assert sorted(os.listdir(tmp_path)) == ["lease.json", "notes-1"]
    one.save()
    one.sync()
    assert one.restore_or_initialize() is not None
    assert called == [1], "init_fn runs without a checkpoint"


def test_a_failed_write_warns_with_the_next_call_and_the_third_is_raised(manager: Any) -> None:
    def full(name: str) -> None:
        if name == "checkpoint.before_manifest":
            raise OSError(28, "No space left on device")

    one = manager()
    one.save().wait()
    with installed(full):
        one.save()
        one._saves.writer._thread.join()
        with pytest.warns(RuntimeWarning, match=r"ckpt-2.*No space left"):
            one.save()
        one._saves.writer._thread.join()
        with pytest.warns(RuntimeWarning, match="ckpt-3"):
            one.save()
        one._saves.writer._thread.join()
        with pytest.raises(OSError, match="No space left"):
            one.save()
    one.save().wait()
    assert names(one.checkpoints)[0] == "ckpt-1"
    assert sorted(os.listdir(one.directory))[0] == "ckpt-1"
    assert "ckpt-3" not in os.listdir(one.directory)


def test_a_second_writer_is_refused_until_the_first_closes(manager: Any) -> None:
    first, second = manager(), manager()
    first.restore_or_initialize()
    with pytest.raises(rd.FailedPreconditionError, match=rf"process {os.getpid()}"):
        second.save()
    first.close()
    first.close()
    second.save().wait()
    with pytest.raises(rd.FailedPreconditionError, match="is closed"):
        first.save()
    with pytest.raises(rd.FailedPreconditionError, match=r"inside of strategy\.run"):
        OneDeviceStrategy("cpu").run(second.save)
    with pytest.raises(rd.FailedPreconditionError, match="pickled"):
        pickle.dumps(second)


def test_invalid_directories_are_errors(manager: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    save: Any = lambda directory: manager(directory=directory).save()  # noqa: E731
    check_refused(save, [(tmp_path / "file", "it is a file")], rd.FailedPreconditionError)
    check_refused(save, [("nowhere://bucket/run", "nowhere")])


def test_arguments_out_of_range_start_nothing(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"checkpoint": rd.State()}, r"checkpoint must be an rd\.Checkpoint, got State"),
        ({"max_to_keep": 0}, "max_to_keep must be"),
        ({"max_to_keep": 1.5}, "max_to_keep must be"),
        ({"checkpoint_name": ""}, "checkpoint_name must consist"),
        ({"checkpoint_name": "../x"}, "checkpoint_name must consist"),
        ({"checkpoint_name": "x" * 181}, "at most 180 of them"),
        ({"checkpoint_interval": 0}, "checkpoint_interval must be"),
        ({"checkpoint_interval": True}, "checkpoint_interval must be"),
        ({"interval_s": 0}, "interval_s must be"),
        ({"interval_s": "1"}, "interval_s must be"),
        ({"best": "loss"}, "best must be"),
        ({"best": ("loss", "least")}, "best must be"),
        ({"best": (1, "min")}, "best must be"),
        ({"keep_checkpoint_every_n_hours": -1}, "keep_checkpoint_every_n_hours must be a number of hours > 0.* got -1"),
        ({"keep_checkpoint_every_n_hours": "1"}, "keep_checkpoint_every_n_hours must be .* got '1'"),
        ({"exit_code": True}, "exit_code must be"),
        ({"exit_code": 256}, "exit_code must be a number from 0 to 255, got 256"),
        ({"init_fn": 3}, "init_fn must be a function without arguments, or None, got 3"),
    ]
    good = {"checkpoint": rd.Checkpoint(state=rd.State()), "directory": tmp_path, "max_to_keep": 1}
    check_refused(lambda options: rd.CheckpointManager(**{**good, **options}), cases)
    assert os.listdir(tmp_path) == []


def test_a_relative_directory_is_resolved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    progress = rd.State(epoch=3)
    with rd.CheckpointManager(rd.Checkpoint(progress=progress), "run", 1) as manager:
        (tmp_path / "other").mkdir()
        os.chdir("other")
        manager.save()
        manager.sync()
        progress.epoch = 0
        assert manager.restore_or_initialize() == "run/ckpt-1"
    assert progress.epoch == 3
    assert os.listdir(tmp_path / "other") == []


def test_the_pause_of_a_save_is_measured(manager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(SaveMetrics, "note_save", lambda self, seconds: pauses.append(seconds))
    manager().save().wait()
    (pause,) = pauses
    assert 0 < pause < 5


def fail() -> None:
    raise OSError(28, "No space left on device")


def test_writes_run_one_after_another() -> None:
    writer, may_end, order = BackgroundWriter(), threading.Event(), list[str]()

    def slow() -> None:
        assert may_end.wait(10)
        order.append("slow")

    first = writer.submit("a", slow)
    assert not first.done()
    with pytest.raises(DeadlineExceededError, match="'a' must be written within 0.01 s"):
        first.wait(0.01)
    threading.Timer(0.05, may_end.set).start()
    writer.submit("b", lambda: order.append("quick")).wait()
    assert order == ["slow", "quick"]
    first.wait()
    may_end.clear()
    writer.submit("a", slow)
    threading.Timer(0.05, may_end.set).start()
    writer.run("b", lambda: order.append("here"))
    assert order == ["slow", "quick", "slow", "here"]
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
    writer = BackgroundWriter()
    writer.submit("c", fail)
    with pytest.warns(RuntimeWarning):
        writer.wait()
    with pytest.raises(OSError, match="No space left"):  # it was only a warning
        writer.close()
    with pytest.raises(KeyboardInterrupt):
        writer.submit("d", mock.Mock(side_effect=KeyboardInterrupt), here=True)


@pytest.fixture
def saves(tmp_path: Path) -> Iterator[ManagerSaves]:
    run = RunDirectory(str(tmp_path), "ckpt", Retention(2))
    run.acquire()
    made = ManagerSaves(contents_of(rd.Checkpoint(state=rd.State(a=1))), run, SaveInterval(3), None)
    yield made
    made.writer.close()
    run.release()


def test_invalid_numbers_and_unwritable_directories_are_errors(saves: ManagerSaves) -> None:
    numbers: list[Any] = [-1, 10**18, 1.0, True]
    check_refused(lambda number: saves.save(number, None, here=True), [(n, "must be an int >= 0") for n in numbers])
    refused = OSError(errno.EROFS, os.strerror(errno.EROFS), "ckpt-1")
    with (
        mock.patch.object(os, "mkdir", side_effect=refused),
        pytest.raises((rd.FailedPreconditionError, OSError), match="ckpt-1"),
    ):
        saves.save(1, None, here=True).wait()
    saves.save(2, None, here=True).wait()
    assert [path.rpartition("/")[2] for path in saves.run.newest()] == ["ckpt-2"]
    (found,) = saves.run.find()
    found.details["calls"] = "many"
    saves.continue_from(found)
    assert saves.calls == 2


def saves_of(directory: Path, checkpoint: rd.Checkpoint) -> ManagerSaves:
    run = RunDirectory(str(directory), "ckpt", Retention(2))
    return ManagerSaves(contents_of(checkpoint), run, SaveInterval(), None)


def test_the_watch_does_not_keep_a_dropped_manager_alive(tmp_path: Path) -> None:
    watch = ManagerWatch(saves_of(tmp_path, rd.Checkpoint(state=rd.State())), 7)
    gc.collect()
    assert watch.saves is None


def test_a_batch_of_a_plain_iterator_is_put_back(tmp_path: Path) -> None:
    for num_steps in range(3):
        iterator = iter(rd.Dataset.range(6))
        next(iterator)
        saves = saves_of(tmp_path / str(num_steps), rd.Checkpoint(iterator=iterator))
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
        rd.Checkpoint(iterator=again).restore(tmp_path / str(num_steps) / "ckpt-0")
        assert int(next(again)) == 1 + num_steps
