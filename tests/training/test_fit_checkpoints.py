"""A `fit` that is interrupted anywhere, and run again, ends as if it had never been interrupted."""

from __future__ import annotations

import contextlib
import os
import signal
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
from tests.training.toys import Recorder, compiled, regression, regression_arrays, small_net

EPOCHS, BATCHES = 3, 5
Kept = Callable[[rd.Model, Path], Any]


class Interrupt(rd.Callback):
    """Ends the program at a hook, the n-th time that it is called."""

    def __init__(self, hook: str, times: int) -> None:
        setattr(self, hook, self._count)
        self._left = times

    def _count(self, *args: Any) -> None:
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt


def noisy(x: Any, y: Any, *, rng: np.random.Generator) -> Any:
    return x + 0.01 * rng.normal(size=x.shape), y


def program(
    folder: Path, *callbacks: rd.Callback, strategy: rd.Strategy | None = None, kept: Kept | None = None, **more: Any
) -> tuple[dict[str, list[Any]], list[torch.Tensor]]:
    """A training with everything random in it; its history and its weights."""
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
    rows = (
        rd.Dataset.from_tensor_slices(regression_arrays(more.pop("rows", 18)))
        .shuffle(7)
        .map(noisy)
        .batch(4)
        .with_options(options)
    )
    stop = rd.EarlyStopping("val_loss", patience=5, restore_best_weights=True)
    checkpoint = (kept or every_batch)(model, folder)
    with checkpoint if isinstance(checkpoint, rd.CheckpointManager) else contextlib.nullcontext():
        history = model.fit(
            rows,
            epochs=EPOCHS,
            validation_data=regression(6, 4),
            callbacks=[stop, rd.CSVLogger(folder / "log.csv"), *callbacks],
            verbose=False,
            checkpoint=checkpoint,
            **more,
        )
    assert len((folder / "log.csv").read_text().splitlines()) == 1 + EPOCHS
    return history.history, [parameter.detach().clone() for parameter in net.parameters()]


def every_batch(model: rd.Model, folder: Path) -> rd.CheckpointManager:
    checkpoint = rd.Checkpoint(**model.checkpoint_objects(), gradients=True)
    return rd.CheckpointManager(checkpoint, folder / "kept", 2, checkpoint_interval=1)


def every_epoch(model: rd.Model, folder: Path) -> Path:
    return folder / "kept"


def interrupted(folder: Path, hook: str, times: int, **more: Any) -> tuple[dict[str, list[Any]], list[torch.Tensor]]:
    """The program after it was ended once, and run again."""
    with pytest.raises(KeyboardInterrupt):
        program(folder, Interrupt(hook, times), **more)
    return program(folder, **more)


def require_same(found: Any, expected: Any) -> None:
    assert found[0] == expected[0]
    assert all(map(torch.equal, found[1], expected[1]))


PLACES = [
    ("on_train_batch_begin", 3),
    ("on_train_batch_end", 7),
    ("on_train_batch_end", 2 * BATCHES),
    ("on_test_batch_end", 1),
    ("on_epoch_begin", 3),
    ("on_epoch_end", 3),
    ("on_train_end", 1),
]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return program(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize(
    ("hook", "times", "kept"),
    [*((*place, every_batch) for place in PLACES), *((*place, every_epoch) for place in PLACES[1::2])],
)
@pytest.mark.filterwarnings("ignore:fit has nothing to train")
def test_it_is_as_if_it_had_never_been_interrupted(
    hook: str, times: int, kept: Kept, tmp_path: Path, uninterrupted: Any
) -> None:
    require_same(interrupted(tmp_path, hook, times, kept=kept), uninterrupted)


@pytest.mark.parametrize(
    "settings",
    [{"accumulate_steps": 3}, {"steps_per_execution": 2}, {"steps_per_epoch": 2, "rows": 26}],
    ids=["accumulation", "executions", "steps_per_epoch"],
)
def test_however_steps_are_made(settings: dict[str, Any], tmp_path: Path) -> None:
    whole = program(tmp_path / "whole", **settings)
    for hook, times in (("on_train_batch_end", 4), ("on_epoch_begin", 2)):
        require_same(interrupted(tmp_path / hook, hook, times, **settings), whole)


def test_the_hooks_go_on_with_the_next_batch(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        program(tmp_path, Interrupt("on_train_batch_end", 8))  # saved after the seventh: the second one of an epoch
    seen = Recorder()
    program(tmp_path, seen)
    assert seen.calls[:4] == ["train_begin", "epoch_begin 1", "batch_begin 2", "batch_end 2"]


def test_sigterm_saves_where_it_is(tmp_path: Path, uninterrupted: Any) -> None:
    class Terminate(rd.Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            if batch == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(rd.Preempted):
        program(tmp_path, Terminate(), kept=every_epoch)
    seen = Recorder()
    require_same(program(tmp_path, seen, kept=every_epoch), uninterrupted)
    assert seen.calls[2] == "batch_begin 3"


@pytest.mark.parametrize(
    ("hook", "times"),
    [
        ("on_train_batch_begin", 1),
        ("on_train_batch_end", BATCHES),
        ("on_test_batch_begin", 2),
        ("on_epoch_end", 2),
        ("on_epoch_end", EPOCHS),
        ("on_train_end", 1),
    ],
)
@pytest.mark.filterwarnings("ignore:fit has nothing to train")
def test_sigterm_may_come_at_any_time(hook: str, times: int, tmp_path: Path, uninterrupted: Any) -> None:
    class Terminate(rd.Callback):
        left = times

    def terminate(self: Any, *args: Any) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    setattr(Terminate, hook, terminate)
    with pytest.raises(rd.Preempted):
        program(tmp_path, Terminate(), kept=every_epoch)
    require_same(program(tmp_path, kept=every_epoch), uninterrupted)


def test_after_the_last_epoch_nothing_is_trained(tmp_path: Path, uninterrupted: Any) -> None:
    program(tmp_path)
    seen = Recorder()
    with pytest.warns(UserWarning, match=r"nothing to train: its checkpoint is that of the end of epoch 3, and"):
        require_same(program(tmp_path, seen), uninterrupted)
    assert seen.calls == ["train_begin", "train_end"]


def test_without_resume_it_begins_anew(tmp_path: Path, uninterrupted: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        program(tmp_path, Interrupt("on_train_batch_end", 7))
    seen = Recorder()
    require_same(program(tmp_path, seen, resume=False), uninterrupted)
    assert seen.calls[:3] == ["train_begin", "epoch_begin 0", "batch_begin 0"]


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
        train(1, "a", Interrupt("on_epoch_begin", 2))
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
    files = sorted(path.name for path in Path(newest).iterdir())
    assert "net.safetensors" in files
    assert repr(manager.checkpoint) == "Checkpoint(net, mine)"


def test_a_manager_of_accumulated_batches_keeps_gradients(tmp_path: Path) -> None:
    model = compiled(small_net(), accumulate_steps=2)
    manager = rd.CheckpointManager(rd.Checkpoint(net=model.module), tmp_path, 1)
    with manager, pytest.raises(rd.InvalidArgumentError, match=r"must hold pending gradients.*gradients=True"):
        model.fit(regression(10, 4), verbose=False, checkpoint=manager)


@pytest.mark.ray
@pytest.mark.timeout(180)
def test_two_replicas_go_on_as_if_they_had_not_been_interrupted(two: rd.MirroredStrategy, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"strategy": two}
    whole = program(tmp_path / "whole", **settings)
    require_same(interrupted(tmp_path / "parts", "on_train_batch_end", 8, **settings), whole)


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
        train("a", two, Interrupt("on_train_batch_end", 6))
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


def test_callbacks_take_the_state_of_their_like() -> None:
    saved = FitState([Count(1), Other(), Count(2)]).state_dict()
    fresh = [Other(), Count(0), Count(0), Count(7)]
    FitState(fresh).load_state_dict(saved)
    assert [one.number for one in fresh if isinstance(one, Count)] == [1, 2, 7]


def test_a_validation_that_is_interrupted_begins_anew() -> None:
    held_out = rd.OneDeviceStrategy("cpu").distribute_dataset(regression(8, 4))
    state = FitState([], held_out)
    state.end_training({"loss": 0.5})
    iterator = iter(held_out)
    next(iterator)
    saved = state.state_dict()
    assert saved["held_out"]["epochs"] == 0
    state.end_epoch({"loss": 0.5})
    for _ in iterator:
        pass
    assert state.state_dict()["held_out"]["epochs"] == 1
    FitState([], held_out).load_state_dict(saved)
    assert len(list(held_out)) == 2


def test_a_state_of_another_version_is_refused() -> None:
    with pytest.raises(rd.InvalidArgumentError, match="must be of version 1, got 2"):
        FitState().load_state_dict({"version": 2})


class Renamed(Count):
    pass


def test_a_callback_that_was_renamed_is_told_of() -> None:
    saved = FitState([Count(1), Count(2)]).state_dict()
    with pytest.warns(UserWarning, match="states of the callbacks Count, and Renamed begin anew.*Was one renamed"):
        FitState([Count(0), Renamed(0)]).load_state_dict(saved)
    FitState([Count(0)]).load_state_dict(saved)  # one was taken out
    FitState([Count(0), Count(0), Renamed(0)]).load_state_dict(saved)  # one came in


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
