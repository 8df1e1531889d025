from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import raydist as rd
from tests.training.callbacks.scripted import Logged
from tests.training.toys import compiled, regression, small_net


def saved(folder: Path, values: list[float], path: str, **settings: Any) -> list[str]:
    """Names of what a training with these scores has saved."""
    callback = rd.ModelCheckpoint(folder / path, **{"monitor": "score"} | settings)
    model = compiled(small_net())
    model.fit(regression(6, 2), epochs=len(values), callbacks=[Logged(values), callback], verbose=False)
    return sorted(file.name for file in folder.iterdir())


@pytest.mark.parametrize(
    ("path", "settings", "expected"),
    [
        ("{epoch}.safetensors", {}, ["1.safetensors", "2.safetensors", "3.safetensors"]),
        ("{epoch:02d}-{score:.1f}", {}, ["01-3.0", "02-1.0", "03-2.0"]),
        ("{epoch}", {"save_best_only": True}, ["1", "2"]),
        ("{epoch}", {"save_best_only": True, "mode": "max"}, ["1"]),
        ("{epoch}", {"save_best_only": True, "initial_value_threshold": 1.5}, ["2"]),
        ("{epoch}-{batch}", {"save_freq": 2}, ["1-2", "2-1", "2-3", "3-2"]),
        ("best", {"save_best_only": True}, ["best"]),
    ],
)
def test_when_and_where(path: str, settings: dict[str, Any], expected: list[str], tmp_path: Path) -> None:
    assert saved(tmp_path, [3.0, 1.0, 2.0], path, **settings) == expected


@pytest.mark.parametrize("weights_only", [False, True])
def test_what_is_saved(weights_only: bool, tmp_path: Path) -> None:
    model = compiled(small_net(), optimizer="adam")
    callbacks = [rd.ModelCheckpoint(tmp_path / name, save_weights_only=weights_only) for name in ("a", "a.safetensors")]
    model.fit(regression(6, 2), callbacks=callbacks, verbose=False)
    files = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert files == ["manifest.json", "model.safetensors", *([] if weights_only else ["optimizer.safetensors"])]
    net = small_net()
    rd.Model.load(tmp_path / "a.safetensors", module=net)
    assert all(map(torch.equal, net.parameters(), model.parameters()))
    optimizer = torch.optim.Adam(net.parameters())
    if weights_only:
        with pytest.raises(rd.InvalidArgumentError, match="it holds none"):
            rd.Model.load(tmp_path / "a.safetensors", module=net, optimizer=optimizer)
    else:
        rd.Model.load(tmp_path / "a.safetensors", module=net, optimizer=optimizer)


def test_it_says_what_it_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path, [1.0, 2.0], "best", save_best_only=True, verbose=1)
    assert capsys.readouterr().out.replace(str(tmp_path), "") == (
        "Epoch 1: score improved from None to 1.00000\nEpoch 1: saving model to /best\n"
        "Epoch 2: score did not improve from 1.00000\n"
    )


def test_a_missing_value_is_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"ModelCheckpoint monitors 'val_loss', which is not among the logs"):
        saved(tmp_path, [1.0], "best", save_best_only=True, monitor="val_loss")


def test_a_path_names_what_is_logged(tmp_path: Path) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=r"filepath may name epoch and what is logged, \['loss', 'score"):
        saved(tmp_path, [1.0], "{val_loss}")


def test_its_state_goes_on() -> None:
    first, second = (rd.ModelCheckpoint("a", save_freq=5) for _ in range(2))
    first.on_train_batch_end(2, {})
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == {"best": None, "batches": 3, "last_batch": 2}


@pytest.mark.parametrize("save_freq", [0, "batch", 1.5])
def test_bad_settings(save_freq: Any) -> None:
    with pytest.raises(rd.InvalidArgumentError, match='save_freq must be "epoch" or a number of batches >= 1, got'):
        rd.ModelCheckpoint("a", save_freq=save_freq)
