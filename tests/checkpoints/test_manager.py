"""`rd.CheckpointManager`: when it saves, what it keeps, what it restores, who may write."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import raydist as rd
from raydist.actors.metric_counters import SaveMetrics
from raydist.checkpoints import saves
from raydist.checkpoints.tensor_file import MANIFEST_NAME
from raydist.core.failpoints import installed
from raydist.strategies.one_device import OneDeviceStrategy


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
    monkeypatch.setattr(saves, "time", SimpleNamespace(monotonic=lambda: now[0]))
    one = manager(interval_s=60)
    assert one.save() is None
    now[0] += 59
    assert one.save() is None
    now[0] += 1
    assert one.save() is not None
    assert one.save() is None
    now[0] += 60
    assert one.save() is not None


def test_the_newest_and_the_best_are_kept(manager: Any, progress: rd.State) -> None:
    one = manager(2, best=("loss", "min"))
    for progress.step, loss in enumerate([3.0, 1.0, 2.0, 2.5]):
        one.save(metrics={"loss": torch.tensor(loss)})
    one.close()
    assert names(one.checkpoints) == ["ckpt-3", "ckpt-4"]
    assert os.path.basename(one.best_checkpoint) == "ckpt-2"
    assert saved_step(one.best_checkpoint) == 1
    assert sorted(name for name in os.listdir(one.directory)) == ["ckpt-2", "ckpt-3", "ckpt-4"]
    again = manager(2, best=("loss", "min"))
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
    progress.step = 5
    second = manager(2)
    second.save().wait()
    assert names(second.checkpoints) == ["ckpt-900", "ckpt-1"]
    second.close()
    assert saved_step(rd.latest_checkpoint(second.directory)) == 5
    assert manager(2).restore_or_initialize() == second.latest_checkpoint


def test_an_existing_number_is_replaced(manager: Any, progress: rd.State) -> None:
    one = manager(2)
    one.save(checkpoint_number=1).wait()
    progress.step = 8
    one.save(checkpoint_number=1).wait()
    assert names(one.checkpoints) == ["ckpt-1"]
    assert saved_step(one.latest_checkpoint) == 8


def test_init_fn_runs_without_a_checkpoint(manager: Any) -> None:
    called: list[int] = []
    one = manager(1, init_fn=lambda: called.append(1))
    assert one.restore_or_initialize() is None
    one.save()
    one.sync()
    assert one.restore_or_initialize() is not None
    assert called == [1]


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
    one = manager()
    assert one.restore_or_initialize() is None
    assert sorted(os.listdir(tmp_path)) == ["lease.json", "notes-1"]


def test_an_asynchronous_save_has_the_state_of_its_call(manager: Any, progress: rd.State) -> None:
    weights = torch.zeros(3)
    thing = torch.nn.ParameterDict({"w": torch.nn.Parameter(weights, requires_grad=False)})
    directory = manager().directory
    one = rd.CheckpointManager(rd.Checkpoint(thing=thing), directory, 1)
    handle = one.save()
    weights += 1
    assert handle is not None
    handle.wait()
    one.close()
    assert load_file(os.path.join(handle.path, "thing.safetensors"))["w"].tolist() == [0, 0, 0]


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


@pytest.mark.parametrize(("directory", "told"), [("file", "it is a file"), ("nowhere://bucket/run", "nowhere")])
def test_invalid_directories_are_errors(manager: Any, directory: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises((rd.InvalidArgumentError, rd.FailedPreconditionError), match=told):
        manager(directory=directory if "://" in directory else tmp_path / directory).save()


def test_with_closes_the_manager(manager: Any) -> None:
    with manager(directory="memory://closed") as one:
        one.save()
    assert names(one.checkpoints) == ["ckpt-1"]
    with pytest.raises(ValueError, match="mine"), manager() as one:
        raise_after(one.save)
    assert os.listdir(one.directory) == ["ckpt-1"]


def raise_after(save: Callable[[], object]) -> None:
    save()
    raise ValueError("mine")


def test_managers_do_not_work_in_steps_or_other_processes(manager: Any) -> None:
    one = manager()
    with pytest.raises(rd.FailedPreconditionError, match=r"inside of strategy\.run"):
        OneDeviceStrategy("cpu").run(one.save)
    with pytest.raises(rd.FailedPreconditionError, match="pickled"):
        pickle.dumps(one)


@pytest.mark.parametrize(
    ("options", "message"),
    [
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
    ],
)
def test_arguments_out_of_range_start_nothing(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    good = {"checkpoint": rd.Checkpoint(state=rd.State()), "directory": tmp_path, "max_to_keep": 1}
    with pytest.raises(rd.InvalidArgumentError, match=message):
        rd.CheckpointManager(**{**good, **options})
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
