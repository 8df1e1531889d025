from __future__ import annotations

import pytest

from raydist.dataset import Dataset


@pytest.mark.parametrize("wrong", [(), (3,), ([],), (Dataset.range(2), "text")])
def test_zip_takes_datasets(wrong: tuple[object, ...]) -> None:
    with pytest.raises(TypeError, match="zip takes datasets, or one nest of them, got "):
        Dataset.zip(*wrong)


def test_concatenate_takes_a_dataset() -> None:
    with pytest.raises(TypeError, match="concatenate takes a Dataset, got 3"):
        Dataset.range(2).concatenate(3)  # type: ignore[arg-type]  # the point of this test
