from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from raydist.core.errors import NotFoundError
from raydist.dataset import Dataset


@pytest.mark.parametrize("source", ["list_files", "from_numpy", "from_parquet", "from_csv", "from_json", "load"])
def test_a_missing_file_is_an_error_at_once(source: str, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nowhere"):
        getattr(Dataset, source)(str(tmp_path / "nowhere.npy"))


def test_datasets_of_files_are_pickled_by_path(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(100_000))
    assert len(Dataset.from_numpy(tmp_path / "x.npy").__reduce__()[1][1]) < 10_000
