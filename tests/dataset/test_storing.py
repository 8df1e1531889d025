from __future__ import annotations

from pathlib import Path

import pytest

from raydist.dataset import Dataset


def test_nothing_is_saved_of_a_dataset_with_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        Dataset.range(4).map(lambda x: 1 // (int(x) - 2)).save(tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []
