"""ModelCheckpoint and BackupAndRestore."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

import raydist as rd
from tests.refused import check_refused
from tests.training.toys import At, Logged, Recorder, compiled, interrupt, regression, small_net


def saved(folder: Path, values: list[float], path: str, **settings: Any) -> list[str]:
    """Names of what a training with these scores has saved."""
    callback = rd.ModelCheckpoint(folder / path, **{"monitor": "score"} | settings)
    model = compiled(small_net())
    model.fit(regression(6, 2), epochs=len(values), callbacks=[Logged(values), callback], verbose=False)
    return sorted(file.name for file in folder.iterdir())


def test_when_and_where(tmp_path: Path) -> None:
    cases: list[tuple[str, dict[str, Any], list[str]]] = [
        ("{epoch}.safetensors", {}, ["1.safetensors", "2.safetensors", "3.safetensors"]),
        ("{epoch:02d}-{score:.1f}", {}, ["01-3.0", "02-1.0", "03-2.0"]),
        ("{epoch}", {"save_best_only": True}, ["1", "2"]),
        ("{epoch}", {"save_best_only": True, "mode": "max"}, ["1"]),
        ("{epoch}", {"save_best_only": True, "initial_value_threshold": 1.5}, ["2"]),
        ("{epoch}-{batch}", {"save_freq": 2}, ["1-2", "2-1", "2-3", "3-2"]),
        ("best", {"save_best_only": True}, ["best"]),
    ]
    for number, (path, settings, expected) in enumerate(cases):
        assert saved(tmp_path / str(number), [3.0, 1.0, 2.0], path, **settings) == expected


def test_what_is_saved(tmp_path: Path) -> None:
    for weights_only in (False, True):
        folder = tmp_path / str(weights_only)
        model = compiled(small_net(), optimizer="adam")
        callbacks = [
            rd.ModelCheckpoint(folder / name, save_weights_only=weights_only) for name in ("a", "a.safetensors")
        ]
        model.fit(regression(6, 2), callbacks=callbacks, verbose=False)
        files = {file.name for file in (folder / "a").iterdir()}
        step = {"global_step.safetensors"}  # where an earlier test has left a strategy that has counted
        expected = {"manifest.json", "model.safetensors", *(() if weights_only else ("optimizer.safetensors",))}
        assert files - step == expected
        net = small_net()
        rd.Model.load(folder / "a.safetensors", module=net)
        assert all(map(torch.equal, net.parameters(), model.parameters()))
        optimizer = torch.optim.Adam(net.parameters())
        told = pytest.raises(rd.InvalidArgumentError, match="it holds none")
        with told if weights_only else contextlib.nullcontext():
            rd.Model.load(folder / "a.safetensors", module=net, optimizer=optimizer)


def test_it_says_what_it_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path, [1.0, 2.0], "best", save_best_only=True, verbose=1)
    assert capsys.readouterr().out.replace(str(tmp_path), "") == (
        "Epoch 1: score improved from None to 1.00000\nEpoch 1: saving model to /best\n"
        "Epoch 2: score did not improve from 1.00000\n"
    )
    with pytest.raises(rd.InvalidArgumentError, match=r"filepath may name epoch and what is logged, \['loss', 'score"):
        saved(tmp_path, [1.0], "{val_loss}")
    wrong: list[Any] = [0, "batch", 1.5]
    told = 'save_freq must be "epoch" or a number of batches >= 1, got'
    check_refused(lambda save_freq: rd.ModelCheckpoint("a", save_freq=save_freq), [(each, told) for each in wrong])
    cases: list[tuple[dict[str, Any], str]] = [
        ({"backup_dir": ""}, "backup_dir must be a directory"),
        ({"backup_dir": "a", "save_freq": 0}, 'save_freq must be "epoch", a number'),
        ({"backup_dir": "a", "save_freq": True}, 'save_freq must be "epoch", a number'),
    ]
    check_refused(lambda settings: rd.BackupAndRestore(**settings), cases)


def train(*callbacks: rd.Callback) -> list[float]:
    model = compiled(small_net())
    return model.fit(regression(12, 4), epochs=3, callbacks=callbacks, verbose=False).history["loss"]


def test_the_next_batch_is_the_one_after_the_last_saved(tmp_path: Path) -> None:
    cases: list[tuple[Any, list[str]]] = [
        ("epoch", ["epoch_begin 1", "batch_begin 0"]),
        (2, ["epoch_begin 1", "batch_begin 1"]),
    ]
    folder = tmp_path / "backup"
    for save_freq, first in cases:
        with pytest.raises(KeyboardInterrupt):
            train(rd.BackupAndRestore(folder, save_freq), At("on_train_batch_end", 5, interrupt))
        assert folder.exists()
        seen = Recorder()
        assert train(rd.BackupAndRestore(folder, save_freq), seen) == train()
        assert seen.calls[1:3] == first
        assert not folder.exists()
    with pytest.raises(KeyboardInterrupt):
        train(
            rd.BackupAndRestore(tmp_path, save_freq=False), At("on_train_batch_end", 5, interrupt)
        )  # only the end of the process saves
    assert not list(tmp_path.glob("ckpt-*"))


def test_two_are_kept_and_the_one_before_is_taken_where_the_last_is_damaged(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"save_freq": 1, "double_checkpoint": True, "delete_checkpoint": False}
    with pytest.raises(KeyboardInterrupt):
        train(rd.BackupAndRestore(tmp_path, **settings), At("on_train_batch_end", 5, interrupt))
    kept = sorted(path.name for path in tmp_path.glob("ckpt-*"))
    assert kept == ["ckpt-3", "ckpt-4"]
    damaged = next((tmp_path / "ckpt-4").glob("model*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.warns(RuntimeWarning, match="Trying the previous checkpoint"):
        assert train(rd.BackupAndRestore(tmp_path, **settings)) == train()
    assert sorted(path.name for path in tmp_path.glob("ckpt-*")) == ["ckpt-8", "ckpt-9"]


def test_it_removes_what_it_saved_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / ".kept").write_text("")
    train(rd.ModelCheckpoint(tmp_path / "best-{epoch}"), rd.BackupAndRestore(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".kept", "best-1", "best-2", "best-3"]
    hidden = tmp_path / "only" / ".hidden"
    hide = rd.LambdaCallback(on_epoch_end=lambda epoch, logs: hidden.write_text(""))
    train(rd.BackupAndRestore(tmp_path / "only"), hide)
    assert [path.name for path in (tmp_path / "only").iterdir()] == [".hidden"]
