"""A `fit` that is interrupted anywhere, and run again, ends as if it had never been interrupted."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MeanAbsoluteError

import raydist as rd
from raydist.training.fit_checkpoints import FitManager, FitState
from tests.training.toys import At, Recorder, compiled, interrupt, regression, regression_arrays, small_net, terminate

EPOCHS, BATCHES = 3, 5
Kept = Callable[[rd.Model, Path], Any]
Found = tuple[dict[str, list[Any]], list[torch.Tensor], bool]


def noisy(x: Any, y: Any, *, rng: np.random.Generator) -> Any:
    return x + 0.01 * rng.normal(size=x.shape), y


def program(
    folder: Path,
    *callbacks: rd.Callback,
    strategy: rd.Strategy | None = None,
    kept: Kept | None = None,
    counted: bool = True,
    **more: Any,
) -> Found:
    """A training with everything random in it; its history, its weights, and whether it was stopped."""
    torch.manual_seed(3)
    with (strategy or rd.OneDeviceStrategy("cpu")).scope():
        net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1)).double()
        model = rd.Model(net)
        settings = {key: more.pop(key) for key in ("accumulate_steps", "steps_per_execution") if key in more}
        model.compile(
            torch.optim.Adam(net.parameters(), lr=0.05),
            "mse",
            {"mae": MeanAbsoluteError()},
            scheduler=lambda it: torch.optim.lr_scheduler.StepLR(it, 4, 0.7),
            **settings,
        )
    options = rd.Options(seed=5)
    rows = rd.Dataset.from_tensor_slices(regression_arrays(more.pop("rows", 18))).shuffle(7).map(noisy)
    rows = rows if counted else rows.filter(lambda x, y: True)
    stop = rd.EarlyStopping("val_loss", patience=5, restore_best_weights=True)
    checkpoint = (kept or every_batch)(model, folder)
    with checkpoint if isinstance(checkpoint, rd.CheckpointManager) else contextlib.nullcontext():
        history = model.fit(
            rows.batch(4).with_options(options),
            epochs=EPOCHS,
            validation_data=regression(6, 4),
            callbacks=[stop, rd.CSVLogger(folder / "log.csv"), *callbacks],
            verbose=False,
            checkpoint=checkpoint,
            **more,
        )
    assert len((folder / "log.csv").read_text().splitlines()) == 1 + len(history.history["loss"])
    return history.history, [parameter.detach().clone() for parameter in net.parameters()], model.stop_training


def every_batch(model: rd.Model, folder: Path) -> rd.CheckpointManager:
    checkpoint = rd.Checkpoint(**model.checkpoint_objects(), gradients=True)
    return rd.CheckpointManager(checkpoint, folder / "kept", 2, checkpoint_interval=1)


def every_epoch(model: rd.Model, folder: Path) -> Path:
    return folder / "kept"


def interrupted(folder: Path, hook: str, times: int, **more: Any) -> Found:
    """The program after it was ended once, and run again."""
    with pytest.raises(KeyboardInterrupt):
        program(folder, At(hook, times, interrupt), **more)
    return program(folder, **more)


def require_same(found: Found, expected: Found) -> None:
    assert found[0] == expected[0]
    assert all(map(torch.equal, found[1], expected[1]))
    assert found[2] == expected[2]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return program(tmp_path_factory.mktemp("whole"))


@pytest.mark.filterwarnings("ignore:fit has nothing to train")
def test_it_is_as_if_it_had_never_been_interrupted(tmp_path: Path, uninterrupted: Any) -> None:
    places = [
        ("on_train_batch_begin", 3, every_batch),
        ("on_train_batch_end", 7, every_epoch),
        ("on_train_batch_end", 2 * BATCHES, every_batch),
        ("on_test_batch_end", 1, every_batch),
        ("on_test_batch_end", 1, every_epoch),
        ("on_epoch_begin", 3, every_batch),
        ("on_epoch_end", 3, every_epoch),
        ("on_train_end", 1, every_batch),
    ]
    for number, (hook, times, kept) in enumerate(places):
        require_same(interrupted(tmp_path / str(number), hook, times, kept=kept), uninterrupted)


@pytest.mark.parametrize(
    "settings",
    [{"accumulate_steps": 3}, {"steps_per_execution": 2}, {"steps_per_epoch": 2, "rows": 26}],
    ids=["accumulation", "executions", "steps_per_epoch"],
)
def test_however_steps_are_made(settings: dict[str, Any], tmp_path: Path) -> None:
    whole = program(tmp_path / "whole", **settings)
    for hook, times in (("on_train_batch_end", 4), ("on_epoch_begin", 2)):
        require_same(interrupted(tmp_path / hook, hook, times, **settings), whole)


@pytest.mark.filterwarnings("ignore:fit has nothing to train")
def test_the_hooks_go_on_with_the_next_batch_or_begin_anew(tmp_path: Path, uninterrupted: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        program(tmp_path, At("on_train_batch_end", 8, interrupt))  # saved after the seventh: the second one of an epoch
    seen = Recorder()
    program(tmp_path, seen)
    assert seen.calls[:4] == ["train_begin", "epoch_begin 1", "batch_begin 2", "batch_end 2"]
    seen = Recorder()
    with pytest.warns(UserWarning, match=r"nothing to train: its checkpoint is that of the end of epoch 3, and"):
        require_same(program(tmp_path, seen), uninterrupted)
    assert seen.calls == ["train_begin", "train_end"]
    seen = Recorder()
    require_same(program(tmp_path, seen, resume=False), uninterrupted)
    assert seen.calls[:3] == ["train_begin", "epoch_begin 0", "batch_begin 0"]


@pytest.mark.filterwarnings("ignore:fit has nothing to train")
def test_sigterm_may_come_at_any_time(tmp_path: Path, uninterrupted: Any) -> None:
    places = [
        ("on_train_batch_begin", 1, ["train_begin", "epoch_begin 0", "batch_begin 0"]),
        ("on_train_batch_end", 3, ["train_begin", "epoch_begin 0", "batch_begin 3"]),
        ("on_train_batch_end", BATCHES, ["train_begin", "epoch_begin 0", "test_begin"]),
        ("on_test_batch_begin", 2, None),
        ("on_epoch_end", 2, ["train_begin", "epoch_begin 2", "batch_begin 0"]),
        ("on_epoch_end", EPOCHS, ["train_begin", "train_end"]),
        ("on_train_end", 1, ["train_begin", "train_end"]),
    ]
    for number, (hook, times, calls) in enumerate(places):
        with pytest.raises(rd.Preempted):
            program(tmp_path / str(number), At(hook, times, terminate), kept=every_epoch)
        seen = Recorder()
        require_same(program(tmp_path / str(number), seen, kept=every_epoch), uninterrupted)
        assert calls is None or seen.calls[:3] == calls, (hook, times)


def test_more_epochs_go_on_from_the_last(tmp_path: Path) -> None:
    def train(folder: str, epochs: int) -> list[float]:
        data = regression(10, 4)
        model = compiled(small_net())
        return model.fit(data, epochs=epochs, verbose=False, checkpoint=tmp_path / folder).history["loss"]

    first = train("a", 2)
    assert train("a", 4)[:2] == first
    assert train("a", 5) == train("b", 5)


def test_arrays_come_in_the_order_that_they_had(tmp_path: Path) -> None:
    x, y = regression_arrays(20)

    def train(seed: int, folder: str, *callbacks: rd.Callback) -> list[float]:
        model = compiled(small_net())
        torch.manual_seed(seed)
        settings: dict[str, Any] = {"batch_size": 4, "epochs": 3, "verbose": False, "callbacks": callbacks}
        return model.fit(x, y, checkpoint=tmp_path / folder, **settings).history["loss"]

    with pytest.raises(KeyboardInterrupt):
        train(1, "a", At("on_epoch_begin", 2, interrupt))
    assert train(2, "a") == train(1, "b")  # another process would not have the same numbers
    assert train(2, "c") != train(1, "d")


def test_a_manager_holds_what_is_the_programs_too(tmp_path: Path) -> None:
    mine = rd.State(note="first")
    model = compiled(small_net())
    manager = rd.CheckpointManager(rd.Checkpoint(net=model.module, mine=mine), tmp_path, 1, best=("loss", "min"))
    with manager:
        model.fit(regression(10, 4), verbose=False, checkpoint=manager)
        manager.sync()
        newest = manager.latest_checkpoint
        assert manager.best_checkpoint == newest
    assert newest is not None
    assert "net.safetensors" in os.listdir(newest)
    assert repr(manager.checkpoint) == "Checkpoint(net, mine)"
    model = compiled(small_net(), accumulate_steps=2)
    manager = rd.CheckpointManager(rd.Checkpoint(net=model.module), tmp_path / "accumulated", 1)
    with manager, pytest.raises(rd.InvalidArgumentError, match=r"must hold pending gradients.*gradients=True"):
        model.fit(regression(10, 4), verbose=False, checkpoint=manager)


@pytest.mark.ray
@pytest.mark.timeout(180)
def test_a_checkpoint_of_two_replicas_goes_on_with_one(two: rd.MirroredStrategy, tmp_path: Path) -> None:
    def train(folder: str, strategy: rd.Strategy, *callbacks: rd.Callback) -> dict[str, list[Any]]:
        with strategy.scope():
            model = compiled(small_net())
        settings: dict[str, Any] = {"epochs": 3, "verbose": False, "callbacks": callbacks}
        kept = rd.CheckpointManager(rd.Checkpoint(model=model.module), tmp_path / folder, 1, checkpoint_interval=1)
        with kept:
            return model.fit(regression(14, 4), checkpoint=kept, **settings).history

    with pytest.raises(KeyboardInterrupt):
        train("a", two, At("on_train_batch_end", 6, interrupt))
    found, expected = (train(folder, rd.OneDeviceStrategy("cpu"))["loss"] for folder in ("a", "b"))
    assert found == pytest.approx(expected, rel=1e-9)


class Count(rd.Callback):
    """Counts from a number on."""

    def __init__(self, number: int) -> None:
        self.number = number

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


class Other(rd.Callback):
    pass


class Renamed(Count):
    pass


def test_callbacks_take_the_state_of_their_like() -> None:
    saved = FitState([Count(1), Other(), Count(2)]).state_dict()
    fresh = [Other(), Count(0), Count(0), Count(7)]
    FitState(fresh).load_state_dict(saved)
    assert [one.number for one in fresh if isinstance(one, Count)] == [1, 2, 7]
    saved = FitState([Count(1), Count(2)]).state_dict()
    with pytest.warns(UserWarning, match="states of the callbacks Count, and Renamed begin anew.*Was one renamed"):
        FitState([Count(0), Renamed(0)]).load_state_dict(saved)
    FitState([Count(0)]).load_state_dict(saved)  # one was taken out
    FitState([Count(0), Count(0), Renamed(0)]).load_state_dict(saved)  # one came in
    with pytest.raises(rd.InvalidArgumentError, match="must be of version 1, got 2"):
        FitState().load_state_dict({"version": 2})


def test_an_epoch_that_was_not_validated_has_no_part_in_the_best(tmp_path: Path) -> None:
    checkpoint = rd.Checkpoint(progress=rd.State())
    with rd.CheckpointManager(checkpoint, tmp_path, None, best=("val_loss", "min")) as manager:
        fit_manager = FitManager(manager)
        for logs in ({"loss": 1.0}, {"loss": 2.0, "val_loss": 0.5}, {"loss": 3.0}):
            fit_manager.after_epoch(logs)
        manager.sync()
        assert Path(manager.best_checkpoint or "").name == "ckpt-2"
        with pytest.raises(rd.InvalidArgumentError, match=r"metrics must have 'val_loss', .* got loss, val_mae"):
            fit_manager.after_epoch({"loss": 1.0, "val_mae": 0.5})


FEW = 4


def batches() -> rd.Dataset:
    rows = rd.Dataset.from_tensor_slices(regression_arrays(4 * FEW))
    return rows.shuffle(7, seed=3).map(noisy, seed=4).batch(4)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The uninterrupted program on fewer rows."""
    return program(tmp_path_factory.mktemp("few"), rows=4 * FEW)


def test_executions_that_fit_an_epoch_leave_nothing_of_it(tmp_path: Path, few: Found) -> None:
    """Replicas that loop do not see the end of the data then; the next epoch is a whole one all the same."""
    settings: dict[str, Any] = {"kept": every_epoch, "rows": 4 * FEW, "steps_per_execution": FEW}
    for hook in ("on_train_batch_end", "on_epoch_begin"):
        require_same(interrupted(tmp_path / hook, hook, 2, **settings), few)


def test_a_pass_whose_end_was_seen_before_the_checkpoint_is_over(tmp_path: Path, few: Found) -> None:
    cases = [
        (3, True, "on_test_begin"),
        (3, False, "on_epoch_end"),
        (5, True, "on_epoch_end"),
        (5, False, "on_test_begin"),
    ]
    for size, counted, hook in cases:  # executions of three batches do not fit the epoch's four
        settings: dict[str, Any] = {"rows": 4 * FEW, "steps_per_execution": size, "counted": counted}
        require_same(interrupted(tmp_path / f"{size}-{counted}", hook, 1, **settings), few)


@pytest.mark.filterwarnings("ignore:The dataset ran out of batches")
@pytest.mark.filterwarnings("ignore:fit has nothing to train")
def test_training_that_ran_out_of_data_stays_ended(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"kept": every_epoch, "rows": 4 * FEW, "steps_per_epoch": FEW + 1}
    whole = program(tmp_path / "whole", **settings)
    for hook in ("on_test_batch_begin", "on_train_end"):
        with pytest.raises(rd.Preempted):
            program(tmp_path / hook, At(hook, 1, terminate), **settings)
        require_same(program(tmp_path / hook, **settings), whole)


def test_a_save_before_a_batch_is_followed_by_that_batch(tmp_path: Path) -> None:
    def saved_run(folder: Path, times: int, *then: rd.Callback) -> torch.Tensor:
        torch.manual_seed(3)
        model = compiled(small_net())
        checkpoint = rd.Checkpoint(**model.checkpoint_objects())
        with rd.CheckpointManager(checkpoint, folder, 9, asynchronous=False) as manager:
            save = At("on_train_batch_begin", times, lambda: manager.save(check_interval=False))
            model.fit(batches(), epochs=2, callbacks=[save, *then], verbose=False, checkpoint=manager)
        weight: torch.Tensor = next(model.parameters()).detach().clone()
        return weight

    whole = saved_run(tmp_path / "whole", 1)
    for times in (1, 3, FEW + 1):
        folder = tmp_path / f"{times}"
        with pytest.raises(KeyboardInterrupt):
            saved_run(folder, times, At("on_train_batch_begin", times, interrupt))
        assert torch.equal(saved_run(folder, times), whole), times


@pytest.mark.filterwarnings("ignore:fit has nothing to train")
def test_what_is_saved_behind_a_fit_is_found_by_the_next(tmp_path: Path) -> None:
    def program(epochs: int, *again: int) -> list[list[int]]:
        model = compiled(small_net())
        with rd.CheckpointManager(rd.Checkpoint(mine=rd.State(note=1)), tmp_path, 1) as manager:
            found = []
            for count in (epochs, *again):
                found.append(model.fit(batches(), epochs=count, verbose=False, checkpoint=manager).epoch)
                manager.save(check_interval=False)
        return found

    assert program(1) == [[0]]
    assert program(1, 2) == [[0], [0, 1]]  # the model is held by the second one, too
    assert program(3) == [[0, 1, 2]]
