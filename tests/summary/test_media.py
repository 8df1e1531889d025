from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import raydist as rd


@pytest.mark.parametrize("data", [["a", "b"], [["a", "b"], ["c", "d"]], "a", ("a",)])
def test_texts_and_tables_of_them(data: Any, tmp_path: Path) -> None:
    with rd.summary.create_file_writer(tmp_path) as writer, writer.as_default(step=0):
        assert rd.summary.text("x", data)


@pytest.mark.parametrize("data", [3, [], ["a", 3], [["a"], ["b", "c"]], [[]], b"a"])
def test_what_is_no_text(data: Any, tmp_path: Path) -> None:
    wrong = pytest.raises(rd.InvalidArgumentError, match="text 'x' must be a str, a list of str")
    with rd.summary.create_file_writer(tmp_path) as writer, writer.as_default(step=0), wrong:
        rd.summary.text("x", data)


@pytest.mark.parametrize("count", [0, -1, 1.5])
def test_so_many_are_shown(count: Any) -> None:
    with pytest.raises(rd.InvalidArgumentError, match="max_outputs must be a number >= 1, got"):
        rd.summary.image("x", torch.zeros(1, 1, 2, 2), max_outputs=count)
    with pytest.raises(rd.InvalidArgumentError, match="max_outputs must be a number >= 1, got"):
        rd.summary.audio("x", torch.zeros(1, 2, 1), 8000, max_outputs=count)


def test_an_image_of_a_wrong_range_is_told_where_it_is_shown(tmp_path: Path) -> None:
    with rd.summary.create_file_writer(tmp_path) as writer, writer.as_default(step=0):
        with pytest.raises(rd.InvalidArgumentError, match="image 'x' must be uint8, or float in"):
            rd.summary.image("x", torch.full((1, 1, 2, 2), 255.0))
        with pytest.raises(rd.InvalidArgumentError, match="image 'x' must have the dimensions NCHW"):
            rd.summary.image("x", torch.zeros(1, 28, 28))
