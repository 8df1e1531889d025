from __future__ import annotations

import numpy as np
import pytest

import raydist as rd
from tests.training.toys import Recorder, column, compiled, line


def data() -> rd.Dataset:
    return rd.Dataset.from_tensor_slices((column([1.0, np.inf, 1.0]), column([0.0, 0.0, 0.0]))).batch(1)


def test_it_ends_in_order_after_the_batch(capsys: pytest.CaptureFixture[str]) -> None:
    seen = Recorder()
    compiled(line(1.0)).fit(data(), epochs=2, callbacks=[rd.TerminateOnNaN(), seen], verbose=False)
    assert seen.calls[-3:] == ["batch_end 1", "epoch_end 0", "train_end"]
    assert capsys.readouterr().out == "Batch 1: Invalid loss, terminating training\n"


def test_or_it_raises() -> None:
    with pytest.raises(rd.FailedPreconditionError, match="The loss must be a finite number, got inf after batch 1"):
        compiled(line(1.0)).fit(data(), callbacks=[rd.TerminateOnNaN(raise_error=True)], verbose=False)
