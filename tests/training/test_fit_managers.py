"""The managers of a fit's checkpoints, and the progress in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import raydist as rd
from raydist.training.fit_checkpoints import FitCheckpoints, FitManager, FitState
from tests.training.toys import regression


def test_it_restores_the_same_again(tmp_path: Path) -> None:
    progress = rd.State(epoch=3)
    with rd.CheckpointManager(rd.Checkpoint(progress=progress), tmp_path, 1) as manager:
        manager.save()
    progress.epoch = 0
    with rd.CheckpointManager(rd.Checkpoint(progress=progress), tmp_path, 1) as manager:
        fit_manager = FitManager(manager)
        found = fit_manager.restore()
        progress.epoch = 7
        assert fit_manager.restore() == found == str(tmp_path / "ckpt-1")
    assert progress.epoch == 3


def test_it_saves_when_it_is_to(tmp_path: Path) -> None:
    with rd.CheckpointManager(rd.Checkpoint(progress=rd.State()), tmp_path, None, checkpoint_interval=2) as manager:
        fit_manager = FitManager(manager, within_epochs=True, each_epoch=False)
        assert fit_manager.restore() is None
        for _ in range(5):
            fit_manager.after_execution()
        fit_manager.after_epoch({"loss": 0.5})
        manager.sync()
        assert [Path(path).name for path in manager.checkpoints] == ["ckpt-2", "ckpt-4"]


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


def test_it_removes_what_it_saved_once_all_is_done(tmp_path: Path) -> None:
    with rd.CheckpointManager(rd.Checkpoint(progress=rd.State()), tmp_path / "kept", 2) as manager:
        fit_manager = FitManager(manager, delete=True)
        fit_manager.after_epoch({})
        fit_manager.finish()
        assert not (tmp_path / "kept").exists()


class Noting:
    """Writes down what it is told."""

    def __init__(self, found: str | None, calls: list[Any]) -> None:
        self._found = found
        self._calls = calls

    def restore(self) -> str | None:
        self._calls.append(("restore", self._found))
        return self._found

    def after_execution(self) -> None:
        self._calls.append("execution")

    def after_epoch(self, logs: dict[str, Any]) -> None:
        self._calls.append(logs)

    def finish(self) -> None:
        self._calls.append("finish")


def checkpoints_of(managers: Any) -> FitCheckpoints:
    return FitCheckpoints(managers, FitState())


def test_the_first_with_a_checkpoint_restores() -> None:
    calls: list[Any] = []
    checkpoints = checkpoints_of([Noting(None, calls), Noting("a", calls), Noting("b", calls)])
    assert checkpoints.restore()
    checkpoints.restore_again()
    assert calls == [("restore", None), ("restore", "a"), ("restore", "a")]


def test_without_any_nothing_is_restored() -> None:
    checkpoints = checkpoints_of([Noting(None, [])])
    assert not checkpoints.restore()
    checkpoints.restore_again()


def test_all_are_told() -> None:
    calls: list[Any] = []
    checkpoints = checkpoints_of([Noting(None, calls), Noting(None, calls)])
    checkpoints.after_execution()
    checkpoints.after_epoch({"loss": 0.5})
    checkpoints.finish()
    assert calls == ["execution", "execution", {"loss": 0.5}, {"loss": 0.5}, "finish", "finish"]


@pytest.mark.parametrize(("stop", "why"), [(True, "was stopped then"), (False, r"ends there \(epochs=3\)")])
def test_it_says_that_nothing_is_left(stop: bool, why: str) -> None:
    state = FitState()
    state.epoch, state.stop = 3, stop
    with pytest.warns(UserWarning, match=rf"the end of epoch 3, and training {why}. Give a larger number"):
        FitCheckpoints([], state).warn_nothing_is_left(3)


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


def test_it_goes_on_where_another_was() -> None:
    state = FitState()
    state.epoch, state.batches, state.saw_data = 2, 5, True
    state.end_training({"loss": 0.5})
    again = FitState()
    again.load_state_dict(state.state_dict())
    assert again.state_dict() == state.state_dict()
    assert again.is_within_epoch
    again.end_epoch({"loss": 0.5, "val_loss": 1.0})
    assert (again.epoch, again.batches, again.logs, again.is_within_epoch) == (3, 0, None, False)
    assert again.last_logs == {"loss": 0.5, "val_loss": 1.0}


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


def test_callbacks_are_not_asked_before_training_begins() -> None:
    saved = FitState([Count(1)]).state_dict()
    count = Count(7)
    state = FitState([count])
    with state.without_callbacks():
        assert state.state_dict()["callbacks"] == []
        state.load_state_dict(saved)
        assert count.number == 7
    state.load_state_dict(saved)
    assert count.number == 1
