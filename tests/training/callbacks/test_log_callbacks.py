"""CSVLogger and ProgressBar."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

import raydist as rd
from tests.training.callbacks.scripted import history_of
from tests.training.toys import compiled, regression, small_net


def test_a_line_for_every_epoch(tmp_path: Path) -> None:
    path = tmp_path / "new" / "log.csv"
    history = history_of([1.0, 2.0], rd.CSVLogger(path))
    losses = history["loss"]
    assert (
        path.read_text() == f"epoch,loss,score,val_loss,val_score\n0,{losses[0]},1.0,NA,NA\n1,{losses[1]},2.0,NA,NA\n"
    )


def test_values_of_a_later_validation_have_their_column(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    data = regression(4, 4)
    logger = rd.CSVLogger(path, separator=";")
    compiled(small_net()).fit(
        data, epochs=2, validation_data=data, validation_freq=2, callbacks=[logger], verbose=False
    )
    lines = path.read_text().splitlines()
    assert lines[0] == "epoch;loss;val_loss"
    assert lines[1].endswith(";NA")
    assert not lines[2].endswith("NA")


def test_a_file_is_replaced_or_added_to(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    for append, expected in [(False, 2), (True, 3), (False, 2)]:
        history_of([1.0], rd.CSVLogger(path, append=append))
        assert len(path.read_text().splitlines()) == expected


def test_lines_after_a_checkpoint_are_cut_off(tmp_path: Path) -> None:
    logger, again = rd.CSVLogger(tmp_path / "log.csv"), rd.CSVLogger(tmp_path / "log.csv")
    logger.on_train_begin({})
    logger.on_epoch_end(0, {"loss": 0.5, "values": torch.tensor([1, 2])})
    state = logger.state_dict()
    logger.on_epoch_end(1, {"loss": 0.25, "values": torch.tensor([3, 4])})
    again.on_train_begin({})
    again.load_state_dict(state)
    again.on_epoch_end(1, {"loss": 0.125, "values": torch.tensor([5, 6])})
    assert (tmp_path / "log.csv").read_text().splitlines() == [
        "epoch,loss,values,val_loss,val_values",
        '0,0.5,"[1, 2]",NA,NA',
        '1,0.125,"[5, 6]",NA,NA',
    ]


def test_without_its_file_it_begins_one(tmp_path: Path) -> None:
    logger = rd.CSVLogger(tmp_path / "log.csv")
    logger.load_state_dict({"columns": ["loss"], "num_bytes": 70})
    logger.on_epoch_end(3, {"loss": 0.5})
    assert (tmp_path / "log.csv").read_text() == "epoch,loss\n3,0.5\n"


def test_a_separator_is_one_character() -> None:
    with pytest.raises(rd.InvalidArgumentError, match="separator must be one character, got ', '"):
        rd.CSVLogger("log.csv", separator=", ")


@pytest.mark.parametrize("verbose", [False, True])
def test_progress_is_shown_once_where_the_bar_says(verbose: bool, capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    compiled(small_net()).fit(regression(4, 4), epochs=2, callbacks=[rd.ProgressBar(out)], verbose=verbose)
    assert [line.split("  ")[0] for line in out.getvalue().splitlines()] == ["Epoch 1/2", "Epoch 2/2"]
    assert capsys.readouterr().out == ""
