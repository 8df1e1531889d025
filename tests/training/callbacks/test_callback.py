"""Callbacks, hooks, their logs, functions as hooks."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import raydist as rd
from raydist.training.callbacks.callback import BatchLogs
from tests.training.callbacks.scripted import history_of
from tests.training.toys import Recorder, compiled, regression, small_net


def test_the_batch_end_hook_gets_logs_in_evaluate_and_predict() -> None:
    seen: dict[str, list[Any]] = {"test": [], "predict": []}

    class Look(rd.Callback):
        def on_test_batch_end(self, batch: int, logs: Mapping[str, Any]) -> None:
            seen["test"].append(sorted(logs))

        def on_predict_batch_end(self, batch: int, logs: Mapping[str, Any]) -> None:
            seen["predict"].append(tuple(logs["outputs"].shape))

    model = compiled(small_net())
    model.evaluate(regression(5, 4), callbacks=[Look()], verbose=False)
    model.predict(regression(5, 4), callbacks=[Look()], verbose=False)
    assert seen == {"test": [["loss"], ["loss"]], "predict": [(4, 1), (1, 1)]}


def test_batch_logs_are_read_once_and_only_if_looked_at() -> None:
    reads: list[int] = []

    def read() -> dict[str, float]:
        reads.append(1)
        return {"loss": 0.5}

    logs = BatchLogs(read)
    assert logs or {}
    assert not reads
    assert (logs["loss"], dict(logs), len(logs), logs.get("accuracy")) == (0.5, {"loss": 0.5}, 1, None)
    assert len(reads) == 1
    logs.seal()
    assert logs["loss"] == 0.5


def test_unread_batch_logs_can_not_be_read_after_their_hook() -> None:
    logs = BatchLogs(lambda: {"loss": 0.5})
    logs.seal()
    with pytest.raises(rd.FailedPreconditionError, match=r"must be read in its hook.*dict\(logs\)"):
        logs["loss"]


def test_a_class_is_no_callback() -> None:
    with pytest.raises(rd.InvalidArgumentError, match="instances of raydist.Callback.*Was a class passed"):
        compiled(small_net()).fit(regression(4, 4), callbacks=[Recorder], verbose=False)  # type: ignore[list-item]


def test_functions_are_called_as_hooks() -> None:
    calls: list[Any] = []
    names = ["on_epoch_begin", "on_epoch_end", "on_train_begin", "on_train_end", "on_test_begin", "on_batch_end"]
    hooks: dict[str, Any] = {name: lambda *args, name=name: calls.append((name, len(args))) for name in names}
    data = regression(4, 4)
    compiled(small_net()).fit(data, validation_data=data, callbacks=[rd.LambdaCallback(**hooks)], verbose=False)
    assert calls == [
        ("on_train_begin", 1),
        ("on_epoch_begin", 2),
        ("on_batch_end", 2),
        ("on_test_begin", 1),
        ("on_epoch_end", 2),
        ("on_train_end", 1),
    ]


@pytest.mark.parametrize(
    ("hooks", "message"),
    [({"on_epoch": print}, "no hook 'on_epoch'. Use one of on_batch_begin"), ({"on_epoch_end": 1}, "be a function")],
)
def test_bad_hooks(hooks: dict[str, Any], message: str) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=message):
        rd.LambdaCallback(**hooks)


def test_a_line_for_every_epoch(tmp_path: Path) -> None:
    path = tmp_path / "new" / "log.csv"
    history = history_of([1.0, 2.0], rd.CSVLogger(path))
    losses = history["loss"]
    assert (
        path.read_text() == f"epoch,loss,score,val_loss,val_score\n0,{losses[0]},1.0,NA,NA\n1,{losses[1]},2.0,NA,NA\n"
    )


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


def test_a_separator_is_one_character() -> None:
    with pytest.raises(rd.InvalidArgumentError, match="separator must be one character, got ', '"):
        rd.CSVLogger("log.csv", separator=", ")


@pytest.mark.parametrize("verbose", [False, True])
def test_progress_is_shown_once_where_the_bar_says(verbose: bool, capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    compiled(small_net()).fit(regression(4, 4), epochs=2, callbacks=[rd.ProgressBar(out)], verbose=verbose)
    assert [line.split("  ")[0] for line in out.getvalue().splitlines()] == ["Epoch 1/2", "Epoch 2/2"]
    assert capsys.readouterr().out == ""


def test_callbacks_know_model_and_params() -> None:
    class Look(rd.Callback):
        begun: ClassVar[list[int]] = []

        def on_train_begin(self, logs: dict[str, Any]) -> None:
            self.seen = (self.model, dict(self.params))

        def on_batch_begin(self, batch: int, logs: Mapping[str, Any]) -> None:
            self.begun.append(batch)

    look = Look()
    model = compiled(small_net())
    model.fit(regression(10, 4), epochs=2, callbacks=[look], verbose=False)
    assert look.seen == (model, {"epochs": 2, "steps": 3})
    assert look.begun == [0, 1, 2] * 2
