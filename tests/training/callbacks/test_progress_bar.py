from __future__ import annotations

import io

import pytest

import raydist as rd
from tests.training.toys import compiled, regression, small_net


@pytest.mark.parametrize("verbose", [False, True])
def test_progress_is_shown_once_where_the_bar_says(verbose: bool, capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    compiled(small_net()).fit(regression(4, 4), epochs=2, callbacks=[rd.ProgressBar(out)], verbose=verbose)
    assert [line.split("  ")[0] for line in out.getvalue().splitlines()] == ["Epoch 1/2", "Epoch 2/2"]
    assert capsys.readouterr().out == ""
