"""Checkpoints around the ends of passes and of a whole `fit`: what goes on from them trains neither twice nor less."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import raydist as rd
from tests.training.toys import compiled, regression, regression_arrays, small_net

BATCHES = 4


class At(rd.Callback):
    """Does something at a hook, the n-th time that it is called."""

    def __init__(self, hook: str, times: int, act: Any) -> None:
        setattr(self, hook, self._count)
        self._left, self._act = times, act

    def _count(self, *args: Any) -> None:
        self._left -= 1
        if self._left == 0:
            self._act()


def interrupt() -> None:
    raise KeyboardInterrupt


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def jittered(x: Any, y: Any, *, rng: np.random.Generator) -> Any:
    return x + 0.01 * rng.normal(size=x.shape), y


def data(*, counted: bool = True) -> rd.Dataset:
    rows = rd.Dataset.from_tensor_slices(regression_arrays(4 * BATCHES)).shuffle(7, seed=3).map(jittered, seed=4)
    return (rows if counted else rows.filter(lambda x, y: True)).batch(4)


Found = tuple[dict[str, list[Any]], torch.Tensor, bool]


def train(
    folder: Path, *callbacks: rd.Callback, every: int | None = None, size: int = 1, rows: Any = None, **more: Any
) -> Found:
    """A `fit` of 3 epochs, kept after each or after every so many batches."""
    torch.manual_seed(3)
    with rd.OneDeviceStrategy("cpu").scope():
        net = nn.Linear(3, 1).double()
        model = rd.Model(net)
        model.compile(torch.optim.Adam(net.parameters(), lr=0.05), "mse", steps_per_execution=size)
    checkpoint = rd.Checkpoint(**model.checkpoint_objects())
    with rd.CheckpointManager(checkpoint, folder, 3, checkpoint_interval=every) as manager:
        kept: Any = folder if every is None else manager
        fitted = model.fit(
            data() if rows is None else rows,
            epochs=3,
            validation_data=regression(6, 4),
            callbacks=callbacks,
            verbose=False,
            checkpoint=kept,
            **more,
        )
    return fitted.history, net.weight.detach().clone(), model.stop_training


def require_same(found: Found, expected: Found) -> None:
    assert found[0] == expected[0]
    assert torch.equal(found[1], expected[1])
    assert found[2] == expected[2]


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_epoch_begin"])
def test_executions_that_fit_an_epoch_leave_nothing_of_it(tmp_path: Path, hook: str) -> None:
    """Replicas that loop do not see the end of the data then; the next epoch is a whole one all the same."""
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", At(hook, 2, interrupt), size=BATCHES)
    require_same(train(tmp_path / "run", size=BATCHES), train(tmp_path / "whole", size=BATCHES))


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("size", [3, BATCHES + 1])
@pytest.mark.parametrize("hook", ["on_test_begin", "on_epoch_end"])
def test_a_pass_whose_end_was_seen_before_the_checkpoint_is_over(
    tmp_path: Path, counted: bool, size: int, hook: str
) -> None:
    given: dict[str, Any] = {"rows": data(counted=counted), "size": size, "every": 1}
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", At(hook, 1, interrupt), **given)
    given["rows"] = data(counted=counted)
    found = train(tmp_path / "run", **given)
    given["rows"] = data(counted=counted)
    require_same(found, train(tmp_path / "whole", **given))


@pytest.mark.filterwarnings("ignore:The dataset ran out of batches")
@pytest.mark.filterwarnings("ignore:fit has nothing to train")
@pytest.mark.parametrize(("hook", "times"), [("on_test_batch_begin", 1), ("on_train_end", 1)])
def test_training_that_ran_out_of_data_stays_ended(tmp_path: Path, hook: str, times: int) -> None:
    with pytest.raises(rd.Preempted):
        train(tmp_path / "run", At(hook, times, terminate), steps_per_epoch=BATCHES + 1)
    require_same(
        train(tmp_path / "run", steps_per_epoch=BATCHES + 1), train(tmp_path / "whole", steps_per_epoch=BATCHES + 1)
    )


@pytest.mark.parametrize("times", [1, 3, BATCHES + 1])
def test_a_save_before_a_batch_is_followed_by_that_batch(tmp_path: Path, times: int) -> None:
    def saved_run(folder: Path, *then: rd.Callback) -> torch.Tensor:
        torch.manual_seed(3)
        model = compiled(small_net())
        checkpoint = rd.Checkpoint(**model.checkpoint_objects())
        with rd.CheckpointManager(checkpoint, folder, 9, asynchronous=False) as manager:
            save = At("on_train_batch_begin", times, lambda: manager.save(check_interval=False))
            model.fit(data(), epochs=2, callbacks=[save, *then], verbose=False, checkpoint=manager)
        weight: torch.Tensor = next(model.parameters()).detach().clone()
        return weight

    with pytest.raises(KeyboardInterrupt):
        saved_run(tmp_path / "run", At("on_train_batch_begin", times, interrupt))
    assert torch.equal(saved_run(tmp_path / "run"), saved_run(tmp_path / "whole"))


@pytest.mark.filterwarnings("ignore:fit has nothing to train")
def test_what_is_saved_behind_a_fit_is_found_by_the_next(tmp_path: Path) -> None:
    def program(epochs: int, *again: int) -> list[list[int]]:
        model = compiled(small_net())
        with rd.CheckpointManager(rd.Checkpoint(mine=rd.State(note=1)), tmp_path, 1) as manager:
            found = []
            for count in (epochs, *again):
                found.append(model.fit(data(), epochs=count, verbose=False, checkpoint=manager).epoch)
                manager.save(check_interval=False)
        return found

    assert program(1) == [[0]]
    assert program(1, 2) == [[0], [0, 1]]  # the model is held by the second one, too
    assert program(3) == [[0, 1, 2]]


@pytest.mark.filterwarnings("ignore:fit has nothing to train")
def test_a_notice_behind_the_last_step_leaves_a_checkpoint_of_the_whole_fit(tmp_path: Path) -> None:
    with pytest.raises(rd.Preempted):
        train(tmp_path, At("on_train_end", 1, terminate), every=1)
    assert len(train(tmp_path, every=1)[0]["loss"]) == 3
