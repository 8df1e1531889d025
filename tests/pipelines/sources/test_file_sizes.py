from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import raydist as rd
from raydist.errors import FailedPreconditionError
from raydist.pipelines.sources.file_sizes import local_size, require_same_size


def test_a_size_is_compared_where_it_is_known(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("12345")
    assert [local_size(path) for path in (str(tmp_path / "a"), str(tmp_path / "b"), "memory://x/a")] == [5, 0, 0]
    for path, size in (("a", 5), ("a", 0), ("b", 7)):
        require_same_size(str(tmp_path / path), size)
    require_same_size("memory://x/a", 7)
    with pytest.raises(FailedPreconditionError, match="had 6 bytes then and has 5 now. Restore the file"):
        require_same_size(str(tmp_path / "a"), 6)


def as_text(path: str) -> rd.Dataset:
    return rd.TextLineDataset([path])


def as_rows(path: str) -> rd.Dataset:
    return rd.Dataset.from_csv([path])


@pytest.mark.parametrize("read", [as_text, as_rows])
def test_an_epoch_goes_on_in_the_same_file_only(read: Callable[[str], rd.Dataset], tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_text("".join(f"{number}\n" for number in range(100, 120)))
    view = rd.OneDeviceStrategy("cpu").distribute_dataset(read(str(path)).batch(4))
    iterator = iter(view)
    next(iterator)
    state: Any = view.state_dict()
    rest = [str(batch) for batch in iterator]

    def resumed() -> list[str]:
        again = rd.OneDeviceStrategy("cpu").distribute_dataset(read(str(path)).batch(4))
        again.load_state_dict(state)
        return [str(batch) for batch in again]

    assert resumed() == rest
    path.write_text("".join(f"{number}\n" for number in range(1000, 1020)))
    with pytest.raises(FailedPreconditionError, match="data.csv' had 80 bytes then and has 100 now"):
        resumed()
